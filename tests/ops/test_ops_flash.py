"""backend="flash": what FlashAttention is handed, checked with stand-ins on the CPU and with torch's own on a GPU."""

from __future__ import annotations

import types

import pytest
import torch
from ops_oracle import assert_near, decode_oracle, ragged_store

from kvsparse_hf import ops
from kvsparse_hf.ops import flash


def _attend(q, keys, values, scale, softcap):
    logits = q.float() @ keys.float().T * scale
    logits = torch.tanh(logits / softcap) * softcap if softcap else logits
    return (logits.softmax(-1) @ values.float()).to(q.dtype), logits.logsumexp(-1)


def _varlen(q, k, v, cu_q, cu_k, *, max_seqlen_q, max_seqlen_k, seqused_k, softmax_scale, softcap, num_splits,
            return_attn_probs):
    """What flash_attn_varlen_func computes: [sequences, G, D] queries, first rows cu_k, lse [G, sequences]."""
    assert max_seqlen_q == 1 and return_attn_probs and cu_q.tolist() == list(range(len(q) + 1))
    assert {cu_k.dtype, seqused_k.dtype} == {torch.int32} and seqused_k.max() <= max_seqlen_k
    out, lse = torch.full_like(q, float("nan")), torch.full((q.shape[1], len(q)), float("inf"))
    for i, (first, used) in enumerate(zip(cu_k.tolist(), seqused_k.tolist(), strict=False)):
        if used:
            out[i], lse[:, i] = _attend(q[i], k[first : first + used, 0], v[first : first + used, 0],
                                        softmax_scale, softcap)
    return out, lse


def _with_kvcache(q, k_cache, v_cache, *, cache_seqlens, softmax_scale, softcap, return_softmax_lse, **table):
    (name, pages), = table.items()
    out, lse = torch.full_like(q, float("nan")), torch.full((len(q), q.shape[2], 1), float("inf"))
    for i, used in enumerate(cache_seqlens.tolist()):
        if used:
            keys, values = (x[pages[i].long()].flatten(0, 1)[:used, 0] for x in (k_cache, v_cache))
            out[i, 0], lse[i, :, 0] = _attend(q[i, 0], keys, values, softmax_scale, softcap)
    _with_kvcache.table = name
    return out, lse


@pytest.fixture
def stand_in(monkeypatch):
    """Install stand-ins for the packages; the device check is lifted because they run on the CPU."""
    def install(**modules):
        monkeypatch.setattr(flash, "_module", modules.get)
        check = flash._check
        monkeypatch.setattr(flash, "_check", lambda q, *rest: check(_OnCuda(q), *rest))

    class _OnCuda:
        def __init__(self, x):
            self.device = types.SimpleNamespace(type="cuda")
            self.dtype = x.dtype

    return install


@pytest.mark.parametrize("sinks", [False, True])
def test_ragged_heads_become_sequences(stand_in, sinks):
    stand_in(flash_attn_interface=types.SimpleNamespace(flash_attn_varlen_func=_varlen))
    k, v, start, length, _ = ragged_store(torch.tensor([[9, 0], [17, 4]]), 16, 16, torch.float16, "cpu")
    q = torch.randn(2, 6, 16).half()
    sink = torch.randn(6) if sinks else None
    out, lse, logits = ops.decode_attention(q, k, v, start, length, max_len=20, scale=0.3, softcap=4.0, sinks=sink,
                                            return_lse=True, backend="flash")
    expected = decode_oracle(q, k, v, start, length, width=20, scale=0.3, softcap=4.0, sinks=sink)
    assert logits is None
    assert_near(out, expected[0], torch.float16)
    assert_near(lse, expected[1], factor=10)


@pytest.mark.parametrize("name, page_size, argument", [
    ("flash_attn_interface", 16, "page_table"), ("flash_attn", 256, "block_table"),
])
def test_pages_become_a_table_with_the_partial_page_last(stand_in, name, page_size, argument):
    stand_in(**{name: types.SimpleNamespace(flash_attn_with_kvcache=_with_kvcache)})
    rows = 6 * page_size
    k, v = torch.randn(4 * rows, 16).half(), torch.randn(4 * rows, 16).half()
    start = (torch.arange(4) * rows).view(2, 2)
    length = torch.tensor([[5 * page_size + 3, 2 * page_size], [0, 7]], dtype=torch.int32)
    pages = torch.tensor([[[5, -1, 1, 3], [0, 1, 5, -1]], [[0, 1, 2, 3], [-1, -1, 0, 4]]], dtype=torch.int32)
    q = torch.randn(2, 4, 16).half()
    options = dict(scale=0.3, pages=pages, page_size=page_size)
    out, lse, _ = ops.decode_attention(q, k, v, start, length, max_len=rows, return_lse=True, backend="flash",
                                       **options)
    expected = decode_oracle(q, k, v, start, length, width=4 * page_size, **options)
    assert _with_kvcache.table == argument
    assert_near(out, expected[0], torch.float16)
    assert_near(lse, expected[1], factor=10)


@pytest.mark.parametrize("change, message", [
    (dict(dtype=torch.float32), "float16 and bfloat16"),
    (dict(dim_v=8), "same head size"),
    (dict(dim=12, dim_v=12), "multiple of 8"),
    (dict(return_logits=True), "logits"),
    (dict(softcap=3.0), "softcap"),
    (dict(page_size=16), "flash_attn_interface"),
])
def test_what_it_cannot_do_is_a_clear_error(stand_in, change, message):
    stand_in()
    dim, dim_v = change.get("dim", 16), change.get("dim_v", 16)
    k, v, start, length, _ = ragged_store(torch.tensor([[9]]), dim, dim_v, change.get("dtype", torch.float16), "cpu")
    options = {name: change[name] for name in ("return_logits", "softcap", "page_size") if name in change}
    if "page_size" in options:
        options["pages"] = torch.zeros(1, 1, 1, dtype=torch.int32)
    with pytest.raises(ops.BackendError, match=message):
        ops.decode_attention(torch.randn(1, 1, dim).to(k.dtype), k, v, start, length, max_len=9, scale=1.0,
                             backend="flash", **options)


def test_page_size_of_flash_attention_2(stand_in):
    stand_in(flash_attn=types.SimpleNamespace(flash_attn_with_kvcache=_with_kvcache))
    store = torch.randn(64, 16).half()
    one = torch.zeros(1, 1, dtype=torch.int64)
    with pytest.raises(ops.BackendError, match="multiples of 256"):
        ops.decode_attention(torch.randn(1, 1, 16).half(), store, store, one, one.int(), max_len=64, scale=1.0,
                             pages=torch.zeros(1, 1, 1, dtype=torch.int32), page_size=16, backend="flash")


def test_needs_a_gpu():
    x = torch.randn(4, 16).half()
    one = torch.zeros(1, 1, dtype=torch.int64)
    with pytest.raises(ops.BackendError, match="CUDA"):
        ops.decode_attention(torch.randn(1, 1, 16).half(), x, x, one, one.int(), max_len=4, scale=1.0, backend="flash")


@pytest.mark.gpu
@pytest.mark.parametrize("group", [1, 4, 7])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_flash_attention_inside_torch(cuda, group, dim):
    lengths = torch.tensor([[1, 0, 17], [1023, 2000, 16]])
    k, v, start, length, _ = ragged_store(lengths, dim, dim, torch.bfloat16, cuda)
    q = torch.randn(2, 3 * group, dim, dtype=torch.bfloat16, device=cuda)
    sinks = torch.randn(3 * group, device=cuda)
    for sink in (None, sinks):
        out, lse, _ = ops.decode_attention(q, k, v, start, length, max_len=2005, scale=dim**-0.5, sinks=sink,
                                           return_lse=True, backend="flash")
        expected = decode_oracle(q, k, v, start, length, width=2005, scale=dim**-0.5, sinks=sink)
        assert_near(out, expected[0], torch.bfloat16)
        assert_near(lse, expected[1], factor=10)
