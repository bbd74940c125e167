"""Models that share by themselves: their readers stay readers, with every method, and the owners see their queries."""

import copy
import logging

import pytest
import torch
import torch._dynamo
from helpers import (
    decode,
    dense,
    forward,
    generate,
    kept_in_all_layers,
    left_pad,
    positions,
    prefill,
    storage_bytes,
    tensors_of,
    tokens,
)
from native_models import NATIVE, OWNER, READERS, gemma3n, gemma4
from shared_oracle import group_mean
from torch._dynamo.backends.debugging import aot_eager
from transformers.generation import CompileConfig

import kvsparse_hf
from kvsparse_hf import (
    FullCache,
    H2OCache,
    QuestCache,
    SnapKVCache,
    SparseCache,
    UnsupportedModelError,
    UnsupportedOperationError,
)
from kvsparse_hf.calibrate.probe import observed_attention
from kvsparse_hf.hf import handoff

BUDGET, HEADS = 12, 2
MAKE = {
    "full": lambda model, budget=BUDGET: FullCache(model),
    "snapkv": lambda model, budget=BUDGET: SnapKVCache(model, budget=budget, window=4, kernel=1),
    "h2o": lambda model, budget=BUDGET: H2OCache(model, budget=budget),
    "quest": lambda model, budget=BUDGET: QuestCache(model, budget=budget, page_size=2, sinks=2, recent=2, dense_layers=0),
    "streaming": lambda model, budget=BUDGET: kvsparse_hf.StreamingLLMCache(model, budget=budget, positions="original"),
}
by_model = pytest.mark.parametrize("name", NATIVE)
by_method = pytest.mark.parametrize("method", MAKE)


@by_model
@by_method
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_an_ample_budget_is_dense(name, method, attention):
    """Prompt bit for bit, steps, a turn, with padding, as Transformers' own cache."""
    model = NATIVE[name](attention)
    ids, mask = left_pad([tokens(30), tokens(17, seed=2)])
    reference, mine = dense(model), MAKE[method](model, 512)
    assert torch.equal(prefill(model, mine, ids, mask), prefill(model, reference, ids, mask))
    after = tokens(5, 2, seed=3)
    torch.testing.assert_close(decode(model, mine, after, mask), decode(model, reference, after, mask), atol=2e-5, rtol=0)
    grown = torch.cat((mask, mask.new_ones(2, 9)), dim=1)
    turn = dict(attention_mask=grown, position_ids=positions(grown)[:, -4:])
    got, expected = (forward(model, tokens(4, 2, seed=4), cache, **turn) for cache in (mine, reference))
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=0)
    text = [generate(model, ids, cache, 20, attention_mask=mask) for cache in (dense(model), MAKE[method](model, 512))]
    assert torch.equal(*text)


@by_model
@by_method
def test_stepwise_equals_prompt(name, method):
    """A shared layer reads at the position before its owner moved on (mlx-lm#1805)."""
    model, ids = NATIVE[name](), tokens(24)
    whole = forward(model, ids, MAKE[method](model, 512))
    mine = MAKE[method](model, 512)
    parts = [forward(model, part, mine) for part in ids.split([5, 1, 1, 9, 1, 7], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=5e-5, rtol=0)  # logits up to 10, six layers


@by_model
def test_owners_and_bytes(name):
    """Only the owners hold anything, as in the dense cache of the same model, and the full ones hold the budget."""
    model = NATIVE[name]()
    mine, reference = SnapKVCache(model, budget=BUDGET, window=4, reserve=1), dense(model)
    for cache in (mine, reference):
        forward(model, tokens(60), cache)
    assert [layer.layer_idx for layer in mine.sparse_layers] == [1, OWNER]
    assert [reader.layer_idx for reader in mine.sparse_layers[1].readers] == READERS
    assert mine.report().dense_bytes == storage_bytes(tensors_of(reference))
    assert mine.report().kept == BUDGET


def _observed(model, ids, mask):
    """Queries of every full-attention layer and keys of the owners, as the model computes them with its own cache."""
    queries, keys = {}, {}

    def observe(layer, query, key, value, scale, out):
        queries[layer], keys[layer] = query, key

    with observed_attention(model, observe):
        prefill(model, dense(model), ids, mask)
    return queries, keys


def _weights(query, key, mask):
    length = key.shape[2]
    at = torch.arange(length)
    allowed = (at <= at[:, None])[None, None] & mask.bool()[:, None, None] | (at == at[:, None])
    logits = query @ key.repeat_interleave(query.shape[1] // key.shape[1], dim=1).transpose(-1, -2)  # these models scale by 1
    return logits.masked_fill(~allowed, float("-inf")).softmax(-1)


@by_model
def test_scores_see_the_queries_of_all_readers(name):
    """SnapKV's kept tokens and H2O's sums, from the attention of owner and readers as the model's own queries give it."""
    model, pad = NATIVE[name](), 15
    ids, mask = left_pad([tokens(40), tokens(25, seed=2)])
    queries, keys = _observed(model, ids, mask)
    snap, heavy = MAKE["snapkv"](model), MAKE["h2o"](model, 512)
    prefill(model, snap, ids, mask)
    prefill(model, heavy, ids, mask)
    for place, group in enumerate(([1], [OWNER, *READERS])):
        weights = {layer: _weights(queries[layer], keys[group[0]], mask) for layer in group}
        mean = group_mean(weights, group, HEADS)
        layer = heavy.sparse_layers[place]
        rows, _ = layer.store.slots(40)
        torch.testing.assert_close(layer.store.extra["received"][rows][0], mean[0].sum(1), atol=1e-4, rtol=1e-4)
        got = layer.store.extra["received"][rows][1][:, :25]
        torch.testing.assert_close(got, mean[1, :, pad:, pad:].sum(1), atol=1e-4, rtol=1e-4)
        for row, first in ((0, 0), (1, pad)):
            for head in range(HEADS):
                scores = mean[row, head, -4:, first:].sum(0)
                scores[-4:] = float("inf")
                assert kept_in_all_layers(snap)[place][row][head] == sorted(scores.topk(BUDGET).indices.tolist())


@pytest.mark.parametrize("keep", [1, 3, 0])
def test_readers_computed_for_the_newest_tokens_alone(keep):
    """Newer versions compute Gemma 4's readers only for the tokens whose logits are wanted; the logits stay the same."""
    model = gemma4()
    full = forward(model, tokens(20), dense(model))
    for cache in (FullCache(model), dense(model)):
        got = forward(model, tokens(20), cache, logits_to_keep=keep)
        torch.testing.assert_close(got, full[:, -keep:], atol=1e-5, rtol=0)
    mine = FullCache(model)
    forward(model, tokens(20), mine, logits_to_keep=keep)
    got = forward(model, tokens(6, seed=3), mine, logits_to_keep=keep)
    expected = forward(model, torch.cat((tokens(20), tokens(6, seed=3)), dim=1), dense(model))
    torch.testing.assert_close(got, expected[:, -(keep or 6) :], atol=1e-5, rtol=0)
    for method in ("snapkv", "h2o"):
        generate(model, tokens(30), MAKE[method](model), 6)


@by_model
@by_method
def test_compiled_steps(name, method, monkeypatch):
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "handlers", [])
    torch._dynamo.reset()
    model = NATIVE[name]()
    ids, mask = left_pad([tokens(30), tokens(17, seed=2)])
    config = CompileConfig(fullgraph=True, mode=None, backend=aot_eager)
    config._compile_all_devices = True
    expected = generate(model, ids, MAKE[method](model), 24, attention_mask=mask)
    with torch._dynamo.config.patch(error_on_recompile=True):
        got = generate(model, ids, MAKE[method](model), 24, attention_mask=mask, compile_config=config)
    torch._dynamo.reset()
    assert torch.equal(got, expected)


@by_method
def test_files_copies_rows_and_reset(method, tmp_path):
    model = gemma3n()
    ids, mask = left_pad([tokens(30), tokens(17, seed=2)])
    mine = MAKE[method](model)
    first = generate(model, ids, mine, 6, attention_mask=mask)
    mine.save(tmp_path)
    grown = torch.cat((mask, mask.new_ones(2, 5)), dim=1)
    after = tokens(6, 2, seed=3)
    others = [SparseCache.load(tmp_path, model), copy.deepcopy(mine)]
    swapped = copy.deepcopy(mine)
    swapped.reorder_cache(torch.tensor([1, 0]))
    expected = decode(model, mine, after, grown)
    for other in others:
        assert torch.equal(decode(model, other, after, grown), expected)
    got = decode(model, swapped, after[[1, 0]], grown[[1, 0]])
    torch.testing.assert_close(got[[1, 0]], expected, atol=1e-5, rtol=0)
    mine.reset()
    assert torch.equal(generate(model, ids, mine, 6, attention_mask=mask), first)


def test_other_caches_between_our_steps():
    """What a reader was offered belongs to one forward of one cache."""
    model = gemma3n()
    mine, alone, other, reference = MAKE["h2o"](model), MAKE["h2o"](model), dense(model), dense(model)
    expected = [prefill(model, reference, tokens(25)), *(decode(model, reference, tokens(1, seed=s)) for s in range(5))]
    got, ours = [], []
    for step in range(-1, 5):
        feed = tokens(25) if step < 0 else tokens(1, seed=step)
        ours.append(forward(model, feed, mine))
        got.append(forward(model, feed, other))
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert torch.equal(ours[0], prefill(model, alone, tokens(25)))
    for step in range(5):
        assert torch.equal(ours[step + 1], decode(model, alone, tokens(1, seed=step)))


def test_an_interrupted_forward_is_noticed():
    model = gemma3n()
    mine = MAKE["snapkv"](model)
    handle = model.model.layers[READERS[0]].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        forward(model, tokens(30), mine)
    handle.remove()
    with pytest.raises(UnsupportedOperationError, match="interrupted"):
        forward(model, tokens(30), mine)
    mine.reset()
    assert torch.equal(generate(model, tokens(30), mine, 6), generate(model, tokens(30), MAKE["snapkv"](model), 6))


def test_nothing_of_a_prompt_stays_alive():
    """Neither the dense keys that the readers got nor their queries."""
    model = gemma3n()
    mine = MAKE["snapkv"](model)
    forward(model, tokens(300), mine)
    held = storage_bytes(tensors_of(mine))
    assert held <= mine.report().device_bytes + 2048
    assert handoff._slots.readers == ()


def test_models_that_share_in_another_way_are_refused():
    model = gemma4()
    model.config.num_kv_shared_layers = 6  # as assistant models, which read another model's
    with pytest.raises(UnsupportedModelError, match="keys and values"):
        FullCache(model)
    model = gemma3n()
    model.config.n_recurrent_loops = 2  # the same layers run several times over
    with pytest.raises(UnsupportedModelError, match="does not know"):
        FullCache(model)
    for options in (dict(factor=2), dict(groups=[[1, 2]])):
        with pytest.raises(UnsupportedModelError, match="by itself"):
            kvsparse_hf.CLACache(gemma3n(), **options)


@by_model
def test_the_same_architecture_without_sharing(name):
    """Nothing shared is a number of layers as well: some versions then made a cache without layers."""
    model, ids = NATIVE[name](num_kv_shared_layers=0), tokens(20)
    mine = FullCache(model)
    assert [layer.layer_idx for layer in mine.sparse_layers] == [1, 2, 3, 5] and not mine.layer_map.shares
    assert torch.equal(generate(model, ids, mine, 8), generate(model, ids, None, 8, use_cache=False))
