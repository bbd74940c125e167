"""chunk_attention: stored entries plus causal new tokens."""

from __future__ import annotations

import math

import pytest
import torch
from ops_oracle import assert_near, chunk_oracle, ragged_store

from kvsparse_hf import ops


def _check(target, lengths, group, dim, dim_v, tokens, dtype, *, pad=None, sinks=False, softcap=0.0, slack=5):
    dtype = target.runnable(dtype)
    k, v, start, length, _ = ragged_store(lengths, dim, dim_v, dtype, target.device, slack=slack)
    batch, heads = lengths.shape

    def new(count, size):  # laid out as a model's projections are: [B, T, heads, size]
        return torch.randn(batch, tokens, count, size).to(dtype).to(target.device).transpose(1, 2)

    q, k_new, v_new = new(heads * group, dim), new(heads, dim), new(heads, dim_v)
    if pad is not None:
        pad = torch.tensor(pad, dtype=torch.int32)
        for b, count in enumerate(pad.tolist()):  # what stands on padding must not matter
            for x in (q, k_new, v_new):
                x[b, :, :count] = float("nan")
        pad = pad.to(target.device)
    sink = torch.randn(heads * group, device=target.device) if sinks else None
    options = dict(scale=dim**-0.5, pad=pad, softcap=softcap, sinks=sink)
    args = (q, k, v, start, length, k_new, v_new)
    out, lse = ops.chunk_attention(
        *args, max_len=int(lengths.max()) + slack, return_lse=True, backend=target.backend, **options
    )
    expected = chunk_oracle(*args, **options)
    assert out.dtype == dtype and lse.dtype == torch.float32
    assert_near(out, expected[0], dtype)
    assert_near(lse, expected[1])
    only_out = ops.chunk_attention(*args, max_len=int(lengths.max()) + slack, backend=target.backend, **options)
    assert torch.equal(only_out, out)
    return out, lse


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [1, 5, 17, 70])
def test_chunk(target, tokens, dtype):
    _check(target, torch.tensor([[33, 0], [16, 70]]), 2, 32, 32, tokens, dtype)


@pytest.mark.parametrize("heads, group", [(1, 1), (3, 4), (1, 7)])
def test_groups(target, heads, group):
    lengths = torch.tensor([[1, 15, 17][:heads]])
    _check(target, lengths, group, 64, 64, 19, torch.bfloat16)


@pytest.mark.parametrize("dim, dim_v", [(80, 80), (128, 128), (96, 64), (256, 256)])
def test_head_sizes(target, dim, dim_v):
    _check(target, torch.tensor([[40]]), 2, dim, dim_v, 9, torch.bfloat16)


@pytest.mark.parametrize("tokens, pad", [(9, [0, 4]), (40, [0, 33]), (70, [64, 1]), (12, [12, 0])])
def test_padding(target, tokens, pad):
    out, lse = _check(target, torch.tensor([[33, 2], [0, 17]]), 2, 32, 32, tokens, torch.float32, pad=pad)
    for b, count in enumerate(pad):
        assert (out[b, :, :count] == 0).all() and (lse[b, :, :count] == -math.inf).all()


@pytest.mark.parametrize("softcap", [0.0, 4.0])
def test_sinks_and_softcap(target, softcap):
    _check(target, torch.tensor([[33, 0]]), 2, 32, 32, 6, torch.float32, sinks=True, softcap=softcap, pad=[2])


def test_split_over_stored_entries(target):
    """A few draft tokens over a long store: the store is split, the new tokens are one split of their own."""
    _check(target, torch.tensor([[1000, 3]]), 2, 32, 32, 4, torch.float32, pad=[1], sinks=True)


def test_nothing_stored_is_plain_causal_attention(target):
    q, k, v = (torch.randn(1, 2, 21, 32, device=target.device) for _ in range(3))
    none = torch.zeros(1, 2, dtype=torch.int64, device=target.device)
    empty = torch.zeros(0, 32, device=target.device)
    out = ops.chunk_attention(q, empty, empty, none, none.int(), k, v, max_len=0, scale=32**-0.5,
                              backend=target.backend)
    expected = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=True)
    assert_near(out, expected)
