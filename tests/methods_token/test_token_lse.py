"""H2O takes the softmax denominators of a prompt from the attention kernel that ran anyway."""

import pytest
import torch
from tiny_models import build
from torch.nn.functional import scaled_dot_product_attention

import kvsparse_hf as kv
from kvsparse_hf.hf import listening
from kvsparse_hf.hf.compat import CACHE_ARGUMENT
from kvsparse_hf.hf.listening import LseListener
from kvsparse_hf.methods import h2o


def _lse(query, key, scale, keep):
    logits = query.double() @ key.double().repeat_interleave(query.shape[1] // key.shape[1], 1).transpose(-1, -2) * scale
    return logits.masked_fill(~keep, float("-inf")).logsumexp(-1)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("masked", [False, True])
def test_what_the_kernel_tells_is_right_and_changes_nothing(context, masked):
    query, key, value = torch.randn(2, 6, 37, 16), torch.randn(2, 2, 37, 16), torch.randn(2, 2, 37, 16)
    keep = torch.ones(37, 37, dtype=torch.bool).tril()
    options = dict(attn_mask=keep.expand(2, 1, 37, 37)) if masked else dict(is_causal=True)
    with context():
        expected = scaled_dot_product_attention(query, key, value, scale=0.3, enable_gqa=True, **options)
        with LseListener() as listener:
            out = scaled_dot_product_attention(query, key, value, scale=0.3, enable_gqa=True, **options)
    assert torch.equal(out, expected)
    torch.testing.assert_close(listener.lse(query).double(), _lse(query, key, 0.3, keep), rtol=1e-5, atol=1e-5)


def test_silent_where_no_fused_kernel_took_these_queries():
    query = torch.randn(1, 2, 5, 8)
    with LseListener() as listener:
        query.softmax(-1)
    assert listener.lse(query) is None
    with LseListener() as listener, torch.no_grad():
        for _ in range(2):
            scaled_dot_product_attention(query, query, query)
    assert listener.lse(query) is None


@pytest.mark.parametrize("pads", [(0,), (0, 9)])
def test_h2o_hears_it_and_keeps_what_it_kept_without(monkeypatch, pads):
    model = build("llama-gqa2")
    ids = torch.randint(3, model.config.vocab_size, (len(pads), 60))
    mask = torch.ones_like(ids)
    for row, pad in enumerate(pads):
        mask[row, :pad] = 0
    heard, layers = [], model.config.num_hidden_layers
    original = h2o.received_attention

    def spy(candidates, *args):
        heard.append(candidates.lse is not None)
        return original(candidates, *args)

    def kept(cache):
        with torch.no_grad():
            model(ids, attention_mask=mask, **{CACHE_ARGUMENT: cache})
        return [layer.store.export()[2] for layer in cache.sparse_layers]

    monkeypatch.setattr(listening, "DEVICES", ("cpu",))
    monkeypatch.setattr(h2o, "received_attention", spy)
    with_lse = kept(kv.H2OCache(model, budget=20))
    assert heard == [True] * layers
    monkeypatch.setattr(h2o.HeavyHitterPolicy, "reads_lse", False)
    without = kept(kv.H2OCache(model, budget=20))
    assert heard == [True] * layers + [False] * layers
    for one, other in zip(with_lse, without, strict=True):
        assert torch.equal(one, other)
