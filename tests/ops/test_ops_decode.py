"""decode_attention: flat, paged, and everything that can go wrong at the edges."""

from __future__ import annotations

import math

import pytest
import torch
from ops_oracle import assert_near, decode_oracle, ragged_store

from kvsparse_hf import ops

EDGES = [1, 15, 16, 17, 0, 40]


def _lengths(heads: int, batch: int, values: list[int]) -> torch.Tensor:
    return torch.tensor([values[i % len(values)] for i in range(batch * heads)]).view(batch, heads)


def _check(target, lengths, group, dim, dim_v, dtype, *, paged=None, sinks=False, softcap=0.0, slack=5):
    dtype = target.runnable(dtype)
    k, v, start, length, _ = ragged_store(lengths, dim, dim_v, dtype, target.device, slack=slack)
    batch, heads = lengths.shape
    max_len = int(lengths.max()) + slack
    q = torch.randn(batch, heads * group, dim).to(dtype).to(target.device)
    sink = torch.randn(heads * group, device=target.device) if sinks else None
    pages, page_size, width = None, 0, max_len
    if paged is not None:
        pages, page_size = paged
        pages = pages.to(target.device)
        width = pages.shape[-1] * page_size
    options = dict(scale=dim**-0.5, softcap=softcap, sinks=sink, pages=pages, page_size=page_size)
    out, lse, logits = ops.decode_attention(
        q, k, v, start, length, max_len=max_len, return_lse=True, return_logits=True, backend=target.backend, **options
    )
    expected = decode_oracle(q, k, v, start, length, width=width, **options)
    assert out.dtype == dtype and lse.dtype == logits.dtype == torch.float32
    assert_near(out, expected[0], dtype)
    assert_near(lse, expected[1])
    assert_near(logits, expected[2])
    alone, none, also_none = ops.decode_attention(  # may be cut into other splits than with logits
        q, k, v, start, length, max_len=max_len, backend=target.backend, **options
    )
    assert none is None and also_none is None
    assert_near(alone, expected[0], dtype)
    return out, lse


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads, group", [(1, 1), (3, 4), (2, 7), (8, 3)])
def test_ragged_lengths(target, heads, group, dtype):
    _check(target, _lengths(heads, 1 if heads > 3 else 2, EDGES), group, 64, 64, dtype)


@pytest.mark.parametrize("dim, dim_v", [(80, 80), (96, 96), (128, 128), (256, 256), (96, 64), (16, 40)])
def test_head_sizes(target, dim, dim_v):
    _check(target, _lengths(2, 1, [70, 17]), 2, dim, dim_v, torch.bfloat16)


def test_group_larger_than_one_matrix_tile(target):
    _check(target, _lengths(1, 1, [33]), 20, 32, 32, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_many_splits(target, dtype):
    _check(target, _lengths(2, 1, [1023, 129]), 4, 64, 64, dtype)


@pytest.mark.parametrize("lengths", [[1500, 0], [40, 1400], [700, 700], [2, 1]], ids=str)
def test_splits_follow_the_lengths(target, lengths):
    """The device cuts the walks by what all heads hold: even, uneven, and nearly nothing of a large reserve."""
    _check(target, torch.tensor([lengths]), 2, 32, 32, torch.float32, slack=1500 - max(lengths))


def test_reserve_far_larger_than_what_is_stored(target):
    _check(target, _lengths(2, 1, [3, 0]), 2, 32, 32, torch.float32, slack=700)


@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("lengths", [[17, 0], [600, 0]], ids=["one split", "many splits"])
def test_sinks_and_softcap(target, lengths, softcap):
    out, lse = _check(target, _lengths(2, 1, lengths), 2, 32, 32, torch.float32, sinks=True, softcap=softcap)
    assert (out[:, 2:] == 0).all() and lse[:, 2:].isfinite().all()


def test_softcap_of_huge_logits_does_not_overflow(target):
    k, v, start, length, _ = ragged_store(torch.tensor([[9]]), 16, 16, torch.float32, target.device)
    q = torch.full((1, 1, 16), 1e18, device=target.device)
    out, lse, _ = ops.decode_attention(
        q, k, v, start, length, max_len=9, scale=1.0, softcap=30.0, return_lse=True, backend=target.backend
    )
    assert out.isfinite().all() and lse.isfinite().all() and lse.abs().max() < 30 + math.log(9) + 1e-3


@pytest.mark.parametrize("page_size", [1, 8, 16, 24])
def test_pages(target, page_size):
    lengths = _lengths(2, 2, [100, 17, 0, 96])
    pages = torch.full((2, 2, 9), -1, dtype=torch.int32)
    for b in range(2):
        for h in range(2):
            count = -(-int(lengths[b, h]) // page_size)
            chosen = torch.randperm(count)[:7]
            pages[b, h, : len(chosen)] = chosen.int()
    pages = pages[..., torch.randperm(9)]
    _check(target, lengths, 3, 64, 64, torch.bfloat16, paged=(pages, page_size))


def test_pages_over_many_splits(target):
    lengths = _lengths(1, 1, [1000])
    pages = torch.arange(0, 60).int().view(1, 1, 60)
    pages[..., 40:44] = -1
    _check(target, lengths, 4, 32, 32, torch.float32, paged=(pages, 16), sinks=True)


def test_no_page_at_all_gives_zero(target):
    pages = torch.full((1, 2, 50), -1, dtype=torch.int32)
    out, lse = _check(target, _lengths(2, 1, [90, 3]), 2, 32, 32, torch.float32, paged=(pages, 16))
    assert (out == 0).all() and (lse == -math.inf).all()


def test_all_pages_equal_the_whole_segment(target):
    k, v, start, length, _ = ragged_store(torch.tensor([[77, 33]]), 32, 32, torch.float32, target.device)
    q = torch.randn(1, 4, 32, device=target.device)
    options = dict(max_len=77, scale=0.2, return_lse=True, backend=target.backend)
    pages = torch.arange(5, device=target.device).int().expand(1, 2, 5).contiguous()
    whole = ops.decode_attention(q, k, v, start, length, **options)
    paged = ops.decode_attention(q, k, v, start, length, pages=pages, page_size=16, **options)
    assert_near(paged[0], whole[0])
    assert_near(paged[1], whole[1])


def test_order_within_a_segment_does_not_matter(target):
    k, v, start, length, _ = ragged_store(torch.tensor([[50]]), 32, 32, torch.float32, target.device)
    q = torch.randn(1, 2, 32, device=target.device)
    first = ops.decode_attention(q, k, v, start, length, max_len=50, scale=0.2, backend=target.backend)[0]
    order = torch.randperm(50, device=target.device) + start.flatten()
    k[start[0, 0] : start[0, 0] + 50], v[start[0, 0] : start[0, 0] + 50] = k[order], v[order]
    assert_near(ops.decode_attention(q, k, v, start, length, max_len=50, scale=0.2, backend=target.backend)[0], first)


def test_query_with_strides(target):
    k, v, start, length, _ = ragged_store(torch.tensor([[20, 9]]), 32, 32, torch.float32, target.device)
    q = torch.randn(1, 1, 4, 96, device=target.device).transpose(1, 2)[:, :, 0, 32:64]  # of a fused projection
    args = (k, v, start, length)
    got = ops.decode_attention(q, *args, max_len=25, scale=0.2, backend=target.backend)[0]
    assert_near(got, ops.decode_attention(q.contiguous(), *args, max_len=25, scale=0.2, backend="torch")[0])


def test_tables_may_be_expanded(target):
    """Shared lengths, page lists and sinks are natural to write as expanded tensors, which own less than they show."""
    k, v, start, _, _ = ragged_store(torch.tensor([[80, 80, 80]]), 32, 32, torch.float32, target.device)
    q = torch.randn(1, 6, 32, device=target.device)
    length = torch.tensor(70, dtype=torch.int32, device=target.device)
    pages = torch.tensor([0, 3, 4], dtype=torch.int32, device=target.device)
    sinks = torch.tensor(0.5, device=target.device)
    options = dict(max_len=85, scale=0.2, page_size=16, backend=target.backend)
    tables = length.expand(1, 3), dict(pages=pages.expand(1, 3, 3), sinks=sinks.expand(6))
    got = ops.decode_attention(q, k, v, start, tables[0], **tables[1], **options)[0]
    own = tables[0].contiguous(), {name: x.contiguous() for name, x in tables[1].items()}
    assert torch.equal(got, ops.decode_attention(q, k, v, start, own[0], **own[1], **options)[0])


def test_store_must_be_contiguous(target):
    if target.backend == "torch":
        pytest.skip("the reference takes any strides")
    k, v, start, length, _ = ragged_store(torch.tensor([[80]]), 32, 16, torch.float32, target.device)
    with pytest.raises(ValueError, match="k must be contiguous"):
        ops.decode_attention(v[:1, None], k[:, :16], v, start, length, max_len=80, scale=0.2, backend="triton")


def test_query_dtype_may_differ_from_the_store(target):
    k, v, start, length, _ = ragged_store(
        torch.tensor([[20, 9]]), 32, 32, target.runnable(torch.bfloat16), target.device
    )
    q = torch.randn(1, 4, 32, device=target.device)
    out = ops.decode_attention(q, k, v, start, length, max_len=25, scale=0.2, backend=target.backend)[0]
    assert out.dtype == torch.float32
    assert_near(out, decode_oracle(q, k, v, start, length, width=25, scale=0.2)[0], torch.bfloat16)
