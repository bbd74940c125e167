"""Launch plans: pure functions of shapes, so they can be checked without a GPU."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsparse_hf.ops.kernels import plan

lengths = st.one_of(st.integers(0, 5000), st.integers(0, 2_000_000))
units = st.integers(1, 3000)
dims = st.sampled_from([16, 64, 128, 256])
sizes = st.sampled_from([2, 4])


@given(lengths, units, dims, sizes, st.sampled_from([8, 108, 132]), st.booleans())
def test_decode_plan_covers_every_key(length, units, dim, itemsize, multiprocessors, paged):
    cut = plan.plan_decode(length, units, dim, itemsize, multiprocessors, paged)
    assert cut.splits >= 1 and cut.tokens % cut.tile.keys == 0
    assert (cut.splits - 1) * cut.tokens < max(length, 1) <= cut.splits * cut.tokens
    assert cut.splits == 1 or cut.splits * units <= 3 * multiprocessors


@given(lengths, st.integers(1, 20000), units, dims, sizes)
def test_chunk_plan_covers_every_key(length, rows, units, dim, itemsize):
    cut = plan.plan_chunk(length, rows, units, dim, itemsize, 132)
    stored = cut.splits - 1 if cut.splits > 1 else 1
    assert cut.splits == 1 or (stored - 1) * cut.tokens < length <= stored * cut.tokens


@given(st.integers(1, 200_000), st.integers(1, 5000), st.integers(1, 80), units, dims, sizes)
def test_scores_plan_covers_every_row_and_key(total, window, group, units, dim, itemsize):
    window = min(window, total)
    cut = plan.plan_scores(total, window, group, units, dim, itemsize, 132)
    assert cut.query_blocks * cut.queries >= window
    assert cut.row_blocks == cut.query_blocks * -(-group // cut.heads)
    assert cut.splits * cut.tokens >= total and cut.tokens % cut.tile.keys == 0


@pytest.mark.parametrize("pages", [1500, 2048, 5000, 8192, 131_584, 9**6])
@pytest.mark.parametrize("k", [1, 128, 2048, 4096])
def test_topk_chunks_leave_fewer_candidates_than_scores(pages, k):
    """However often what remains is cut again."""
    while chunk := plan.topk_chunk(pages, k):
        assert chunk <= plan.TOPK_MOST
        assert (left := -(-pages // chunk) * k) <= pages // 2
        pages = left


def test_rows_of_a_long_context_need_no_sort():
    """131,072 tokens and a reserve, of which 2,048 are chosen."""
    pages = 131_072 + 512
    while chunk := plan.topk_chunk(pages, 2048):
        pages = -(-pages // chunk) * 2048
    assert pages <= plan.TOPK_MOST
