"""Offloading changes nothing: dense where everything is reachable, and the selection's own logits bit for bit where not.

The numbers of rows are those of the table of public fault reports that the tests come from.
"""

import pytest
import torch
from helpers import decode, dense, forward, generate, left_pad, prefill, tokens
from offload_tools import IVF, LOKI, QUEST, ROWS, SELECTORS, check, poisoned, started, step_both  # noqa: F401
from tiny_models import build

from kvsparse_hf import HiSparseCache, QuestCache
from kvsparse_hf.layers.hot import PagedStore
from kvsparse_hf.layers.store import RaggedStore

STEPS = 300


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("selector", SELECTORS)
def test_with_everything_reachable_it_is_the_dense_model(selector):
    """Rows 1 and 8: three layers, unequal padded rows, a hot buffer smaller than the prompt, 300 steps, against Transformers' own
    cache. Steps between drafts read everything, from the host in place."""
    model = build(num_hidden_layers=3)
    ids, mask = left_pad([tokens(n, seed=n) for n in ROWS])
    mine, reference = HiSparseCache(model, **{**SELECTORS[selector], "reserve": 512}), dense(model)
    mine.activate_past_recording()
    torch.testing.assert_close(prefill(model, mine, ids, mask), prefill(model, reference, ids, mask), atol=1e-5, rtol=0)
    after = tokens(STEPS, 3, seed=9)
    expected = decode(model, reference, after, mask)
    rounding = 2e-5 if selector == "loki" else 1e-5  # keys in other coordinates are rounded otherwise
    torch.testing.assert_close(decode(model, mine, after, mask), expected, atol=rounding, rtol=1e-5)
    assert all(layer.offloaded and layer.store.slots * layer.store.page_size < 45 for layer in mine.sparse_layers)
    assert mine.report().misses == 0


@pytest.mark.usefixtures("poisoned")
def test_selection_and_offload_is_the_selection():
    """Row 2: bit for bit Quest's logits over 300 steps; pages written while decoding are evicted and come back."""
    model = build(num_hidden_layers=3)
    mine, twin, mask = started(model)
    returned, away = set(), set()
    for block in range(STEPS // 4):
        mask = step_both(model, mine, twin, mask, 4, seed=block)
        table = mine.sparse_layers[1].store.page_table[0, 0].tolist()
        here = {page for page, slot in enumerate(table) if slot >= 0}
        returned |= away & here
        away = {page for page in range(23, max(here)) if page not in here}  # the prompt of row 0 has 23 pages
    check(mine, twin)
    assert len(returned) > 10
    report, elsewhere = mine.report(), twin.report()
    assert report.misses > 1000 and report.hits > report.misses
    assert (report.evicted, report.layers, report.read_bytes) == (0, elsewhere.layers, elsewhere.read_bytes)
    page = 2 * 2 * 16 * 4
    assert report.swapped_bytes == report.misses * page


@pytest.mark.parametrize("options", [
    dict(hot_tokens=16), dict(hot_tokens=18), dict(hot_tokens=40), dict(hot_tokens=64), dict(page_size=4, budget=20, sinks=5),
    dict(page_size=1, budget=7), dict(budget=0.3), dict(budget="4KiB"), dict(reduce="max"), dict(sinks=0, recent=1), dict(prefetch=3),
    dict(dense_layers=1),
], ids=str)
def test_any_setting_is_quest(options):
    """Row 10: also with the smallest buffer there can be, and some larger than short rows."""
    model = build(num_hidden_layers=2)
    mine, twin, mask = started(model, rows=(70, 41, 9, 1), **options)
    assert mine.sparse_layers[-1].offloaded
    step_both(model, mine, twin, mask, 30)


@pytest.mark.parametrize("selector", ["loki", "ivf"])
def test_offloaded_layers_equal_resident_ones(selector):
    """The other selectors have no twin that never offloads but themselves, with room on the device."""
    model, options = build(num_hidden_layers=3), SELECTORS[selector]
    near, _, mask = started(model, **{**options, "device_bytes": "1GiB"})
    far, _, _ = started(model, **options)
    assert not any(layer.offloaded for layer in near.sparse_layers) and all(layer.offloaded for layer in far.sparse_layers)
    after = tokens(60, 3, seed=2)
    assert torch.equal(decode(model, near, after, mask), decode(model, far, after, mask))
    assert near.report().host_bytes == 0 < far.report().host_bytes


def test_loki_pages_rank_by_their_best_token():
    """From the maths: the mean over the group of the softmax of low-rank logits, the largest of a page."""
    model = build(num_hidden_layers=1)
    mine, _, _ = started(model, rows=(50,), **{**LOKI, "sinks": 0, "recent": 1})
    layer = mine.sparse_layers[0]
    selector, store = layer.selector, layer.store
    keys = store.span(0, 50)[0]
    query = torch.randn(1, 4, 16, generator=torch.Generator().manual_seed(0))
    from kvsparse_hf.layers.base import AttentionCall

    chosen = selector.select(query, store, AttentionCall(0.25)).pages
    for head in range(2):
        logits = query[0, 2 * head:2 * head + 2, :8] @ keys[0, head, :, :8].T * 0.25
        pages = logits.softmax(-1).mean(0).view(25, 2).amax(-1)
        pages[24] = 2.0  # the newest is always read
        assert chosen[0, head].tolist() == sorted(pages.topk(6).indices.tolist())


@pytest.mark.parametrize("lengths", [(120, 5, 64, 33, 90), (24, 25, 23, 26, 1), (200, 2)], ids=str)
def test_rows_of_unlike_length(lengths):
    """Row 11: several long requests beside short ones; each as if alone. Around the hot buffer of 24 tokens, too."""
    model = build(num_hidden_layers=2)
    mine, twin, mask = started(model, rows=lengths)
    step_both(model, mine, twin, mask, 12)
    after = tokens(12, len(lengths), seed=0)
    together, _, mask = started(model, rows=lengths)
    got = decode(model, together, after, mask)
    for row, n in enumerate(lengths):
        alone = HiSparseCache(model, **QUEST)
        prefill(model, alone, tokens(n, seed=20 + n))
        expected = decode(model, alone, after[row:row + 1])
        torch.testing.assert_close(got[row:row + 1], expected, atol=1e-5, rtol=0)


def test_a_prompt_longer_than_the_buffer_generates_all_tokens():
    """Row 15, over the reserve and its doublings."""
    model = build()
    ids = tokens(100)
    got = generate(model, ids, HiSparseCache(model, **QUEST), 80)
    assert got.shape == (1, 80) and torch.equal(got, generate(model, ids, QuestCache(model, **QUEST), 80))


# --- layers that stay on the device ------------------------------------------------------------------------------------


def _sizes(model, **options) -> tuple[int, int, HiSparseCache]:
    """Device bytes of a resident and of an offloaded layer, selector's metadata left out."""
    out = []
    for limit in ("1GiB", None):
        cache, _, _ = started(model, **{**QUEST, **options, "device_bytes": limit})
        layer = cache.sparse_layers[0]
        out.append(layer.device_bytes() - sum(t.nbytes for t in layer.selector.tensors().values()))
    return (*out, cache)


def test_what_fits_stays_whole():
    """Row 16: as many layers as `device_bytes` holds are plain selecting layers, which never enter the code that offloads."""
    model = build(num_hidden_layers=4)
    dense_layer, hot_layer, _ = _sizes(model)
    for whole in range(5):
        limit = 4 * hot_layer + whole * (dense_layer - hot_layer)
        mine, twin, mask = started(model, device_bytes=limit)
        assert [isinstance(layer.store, RaggedStore) for layer in mine.sparse_layers] == [i < whole for i in range(4)]
        metadata = sum(t.nbytes for layer in mine.sparse_layers for t in layer.selector.tensors().values())
        assert mine.report().device_bytes - metadata <= limit
        step_both(model, mine, twin, mask, 5)
    fewer, _, _ = started(model, device_bytes=limit - 1)
    assert [layer.offloaded for layer in fewer.sparse_layers] == [False, False, False, True]


def test_a_short_prompt_needs_no_pool():
    """Whatever fits into the hot buffer is not offloaded, until it grows out of it."""
    model = build()
    mine, twin, mask = started(model, rows=(9, 4))
    assert not any(layer.offloaded for layer in mine.sparse_layers) and mine.report().host_bytes == 0
    moves = []
    for seed in range(5):
        mask = step_both(model, mine, twin, mask, 6, seed)
        moves.append(isinstance(mine.sparse_layers[0].store, PagedStore))
    assert moves[0] is False and moves[-1] is True and sorted(moves) == moves
    check(mine, twin)


def test_growth_demotes_between_steps():
    """Buffers move outside the step, and whoever replays a graph hears of it."""
    model = build(num_hidden_layers=3)
    dense_layer, hot_layer, _ = _sizes(model)
    mine, twin, mask = started(model, device_bytes=3 * hot_layer + 2 * (dense_layer - hot_layer))
    assert [layer.offloaded for layer in mine.sparse_layers] == [False, False, True]
    seen, announced = [], 0
    for seed in range(60):
        announced += mine.fork().prepare_decode()
        mask = step_both(model, mine, twin, mask, 1, seed)
        seen.append([layer.offloaded for layer in mine.sparse_layers])
    assert seen[0] == [False, False, True] and seen[-1][1] is True and announced >= 2


# --- fetching early ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("selector", ["quest", "loki"])
def test_prefetch_changes_bytes_and_nothing_else(selector):
    model = build()
    plain, _, mask = started(model, **SELECTORS[selector], hot_tokens=36)
    early, _, _ = started(model, **SELECTORS[selector], hot_tokens=36, prefetch=4)
    after = tokens(60, 3, seed=5)
    assert torch.equal(decode(model, plain, after, mask), decode(model, early, after, mask))
    a, b = plain.report(), early.report()
    assert a.hits + a.misses == b.hits + b.misses  # only the steps' own lists count
    assert b.swapped_bytes > b.misses * 256 and a.swapped_bytes == a.misses * 256


def test_without_registered_memory_copies_are_staged(monkeypatch):
    """The path for a host pool that the device cannot read; here both are on the CPU."""
    model = build()
    monkeypatch.setattr(PagedStore, "staged", True)
    mine, twin, mask = started(model)
    step_both(model, mine, twin, mask, 40)
    mine, _, _ = started(model)
    mine.activate_past_recording()
    ids, mask = left_pad([tokens(n, seed=20 + n) for n in ROWS])
    reference, after = dense(model), tokens(20, 3, seed=1)
    prefill(model, reference, ids, mask)
    torch.testing.assert_close(decode(model, mine, after, mask), decode(model, reference, after, mask), atol=1e-5, rtol=0)


def test_more_than_one_token_at_once_reads_everything():
    """Row 5: no row of a step with several queries can lose what another one reads: they are attended densely."""
    model = build(num_hidden_layers=3)
    mine, reference = HiSparseCache(model, **QUEST), dense(model)
    for length, seed in ((60, 1), (2, 2), (9, 3), (40, 4)):
        ids = tokens(length, 2, seed=seed)
        torch.testing.assert_close(forward(model, ids, mine), forward(model, ids, reference), atol=1e-5, rtol=0)


def test_drafts_are_verified_against_everything():
    model = build()
    ids = tokens(10).repeat(1, 5)
    got = generate(model, ids, HiSparseCache(model, **QUEST), 40, prompt_lookup_num_tokens=4)
    assert torch.equal(got, generate(model, ids, dense(model), 40))


def test_clusters_follow_pages_of_one_token():
    model = build()
    cache, _, _ = started(model, **IVF)
    assert {layer.store.page_size for layer in cache.sparse_layers} == {1}
