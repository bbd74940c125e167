"""Quest: the bound, the choice against brute force, and page summaries through everything that changes a store."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from select_tools import EDGES, call_of, chosen, make_query, make_store, quest_pages, ready, segment

from kvsparse_hf import ops
from kvsparse_hf.layers.selectors.base import dense_view
from kvsparse_hf.layers.selectors.pages import PageSelector


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 70), min_size=1, max_size=3),
    page=st.sampled_from([1, 2, 4, 16]),
    scale=st.sampled_from([1e-3, 1.0, 30.0]),
    seed=st.integers(0, 10**6),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_bound_dominates_every_true_logit(lengths, page, scale, seed, dtype):
    """The score of a page, for one query head, is at least the largest logit of its tokens."""
    store = make_store(lengths, page=page, seed=seed, scale=scale)
    store.keys = store.keys.to(dtype)
    selector = ready(PageSelector(0, 1, "none", page), store, 10**4)
    query = make_query(store, group=1, seed=seed + 1).to(dtype)
    bounds = ops.page_scores(query, selector.bounds, store.length, page_size=page, scale=1.0, group_reduce="max")
    logits = query.double().unsqueeze(2) @ dense_view(store, store.keys).double().transpose(-1, -2)
    slot = torch.arange(store.max_capacity)
    logits = torch.where(slot < store.length.unsqueeze(-1), logits.squeeze(2), float("-inf"))
    largest = logits.unflatten(-1, (-1, page)).amax(-1)
    slack = 1e-5 * logits[logits.isfinite()].abs().max()  # rounding of the fp32 product
    assert bool((bounds.double() >= largest - slack).all())
    assert bool((bounds.isfinite() == largest.isfinite()).all())


@pytest.mark.parametrize("reduce", ["softmax_mean", "max", "mean", "none"])
@pytest.mark.parametrize("sinks, recent", [(0, 1), (4, 1), (16, 16), (17, 18)])
def test_choice_equals_brute_force(reduce, sinks, recent):
    store = make_store(EDGES)
    selector = ready(PageSelector(sinks, recent, reduce, 16), store, 6 * 16)
    query, call = make_query(store), call_of(store)
    pages = chosen(selector.select(query, store, call).pages)
    grouped = query.view(store.batch, store.heads, -1, query.shape[-1]).double().numpy()
    for row in range(store.batch):
        expected = []
        for head in range(store.heads):
            keys, _ = segment(store, row, head)
            expected += quest_pages(grouped[row, head], keys, call.scale, 16, sinks, recent, reduce, 6)
        assert pages[row] == expected


def test_rows_with_budgets_of_their_own():
    """Share budgets of rows of unlike length: each row reads what it would read alone."""
    lengths = [100, 64, 33]
    store = make_store(lengths)
    together = ready(PageSelector(4, 1, "softmax_mean", 16), store, [96, 64, 48])
    query, call = make_query(store), call_of(store)
    pages = chosen(together.select(query, store, call).pages)
    for row, budget in enumerate([96, 64, 48]):
        alone = ready(PageSelector(4, 1, "softmax_mean", 16), store, budget)
        assert chosen(alone.select(query, store, call).pages)[row] == pages[row]


def test_recent_tokens_are_read_wherever_the_page_ends():
    for recent in (1, 2, 16, 17, 20):
        store = make_store(EDGES)
        selector = ready(PageSelector(0, recent, "max", 16), store, 3 * 16)
        for row, heads in enumerate(chosen(selector.select(make_query(store), store, call_of(store)).pages)):
            read = {slot for page in heads[0] for slot in range(page * 16, page * 16 + 16)}
            assert set(range(max(EDGES[row] - recent, 0), EDGES[row])) <= read


def test_incremental_summaries_equal_rebuilt_ones():
    store = make_store([1, 15, 16, 17])
    selector = ready(PageSelector(0, 1, "max", 16), store, 64)
    for step in range(14):
        key = torch.randn(store.batch, store.heads, 8, generator=torch.Generator().manual_seed(step))
        ops.store_token(store.keys, store.values, store.positions, key, key, store.length[:, 0].clone(), store.start,
                        store.capacity, store.length, store.pinned, store.cursor, summary=selector.bounds, page_size=16)
        rebuilt = ready(PageSelector(0, 1, "max", 16), store, 64)
        valid = torch.arange(selector.bounds.shape[2]) < -(-store.length // 16).unsqueeze(-1)
        assert torch.equal(selector.bounds[valid], rebuilt.bounds[valid])


@pytest.mark.parametrize("since", [0, 5, 16, 17, 31, 32])
def test_refresh_from_any_slot(since):
    """Only pages from `since` on are rebuilt; a crop to there leaves exactly the summaries of what is left."""
    store = make_store([64, 50])
    selector = ready(PageSelector(0, 1, "max", 16), store, 64)
    store.length.copy_(store.length.clamp(max=since))
    selector.refresh(store, since)
    rebuilt = ready(PageSelector(0, 1, "max", 16), store, 64)
    valid = torch.arange(selector.bounds.shape[2]) < -(-store.length // 16).unsqueeze(-1)
    assert torch.equal(selector.bounds[valid], rebuilt.bounds[valid])
    assert selector.bounds.isfinite().all()
