"""Host pool, hot buffer, tables and metadata through every operation; after each the logits are still Quest's, bit for bit."""

import copy

import pytest
import torch
from helpers import decode, dense, forward, generate, kept_in_all_layers, left_pad, positions, prefill, tokens
from offload_tools import IVF, LOKI, QUEST, SELECTORS, check, longer, poisoned, started, step_both  # noqa: F401
from tiny_models import build

from kvsparse_hf import HiSparseCache, QuestCache, SparseCache


def turn(model, cache, mask, count, seed):
    """A later forward of several tokens, as `generate()` gives it."""
    grown = longer(mask, count)
    return forward(model, tokens(count, len(mask), seed=seed), cache, attention_mask=grown, position_ids=positions(grown)[:, -count:])


@pytest.mark.usefixtures("poisoned")
def test_tables_follow_everything(tmp_path):
    """Rows 6, 8, 12 and 22: also crops over page edges into what the host alone holds, and rows that trade places."""
    model = build(num_hidden_layers=2)
    mine, twin, mask = started(model, reserve=5)
    check(mine, twin)
    for seed, steps in enumerate([1, 3, 4, 9, 14]):
        mask = step_both(model, mine, twin, mask, steps, seed)
        check(mine, twin)
    for seed, removed in enumerate((1, 2, 5, 11)):
        for cache in (mine, twin):
            cache.crop(-removed)
        mask = mask[:, :-removed]
        check(mine, twin)
        mask = step_both(model, mine, twin, mask, 3, seed)
        check(mine, twin)
    for count in (7, 40):
        assert torch.equal(turn(model, mine, mask, count, 7), turn(model, twin, mask, count, 7))
        mask = longer(mask, count)
        check(mine, twin)
        mask = step_both(model, mine, twin, mask, 4, count)
    moves = [([2, 0, 0], "reorder_cache"), ([1, 0, 2], "reorder_cache"), ([0, 0, 1, 1, 2, 2], "batch_repeat_interleave"),
             ([3, 1], "batch_select_indices")]
    for index, name in moves:
        for cache in (mine, twin):
            getattr(cache, name)(2 if "repeat" in name else torch.tensor(index))
        mask = mask[index]
        check(mine, twin)
        mask = step_both(model, mine, twin, mask, 5, 11)
        check(mine, twin)
    mine.save(tmp_path)
    loaded, forked = SparseCache.load(tmp_path, model), copy.deepcopy(mine)
    for other in (loaded, forked):
        check(other, twin)
        assert other.report() == mine.report()
    expected = decode(model, mine, tokens(5, 2), mask)
    for other in (loaded, forked):
        assert torch.equal(decode(model, other, tokens(5, 2), mask), expected)


@pytest.mark.parametrize("selector", ["loki", "ivf"])
def test_the_other_selectors_through_everything(selector):
    """Against themselves with everything on the device."""
    model = build(num_hidden_layers=2)
    options = {**SELECTORS[selector], "reserve": 5}
    far, _, mask = started(model, **options)
    near, _, _ = started(model, **options, device_bytes="1GiB")

    def same(steps, seed):
        after = tokens(steps, len(mask), seed=seed)
        assert torch.equal(decode(model, far, after, mask), decode(model, near, after, mask))
        return longer(mask, steps)

    mask = same(14, 1)
    for removed in (3, 9):
        for cache in (far, near):
            cache.crop(-removed)
        mask = mask[:, :-removed]
    mask = same(5, 2)
    assert torch.equal(turn(model, far, mask, 9, 3), turn(model, near, mask, 9, 3))
    mask = longer(mask, 9)
    mask = same(7, 5)
    for cache in (far, near):
        cache.reorder_cache(torch.tensor([2, 0, 0]))
    mask = mask[[2, 0, 0]]
    same(9, 6)
    assert all(layer.offloaded for layer in far.sparse_layers) and not any(layer.offloaded for layer in near.sparse_layers)


def test_beams_are_quests_beams():
    """Row 22."""
    model = build()
    ids = tokens(50)
    options = dict(num_beams=3, length_penalty=0.0)
    assert torch.equal(generate(model, ids, HiSparseCache(model, **QUEST), 20, **options),
                       generate(model, ids, QuestCache(model, **QUEST), 20, **options))


def test_a_longer_turn_needs_a_larger_buffer():
    """A share of what was seen grows with each turn, and the hot buffer with it; counters go on."""
    model = build()
    mine, twin, mask = started(model, rows=(40, 30), budget=0.3)
    mask = step_both(model, mine, twin, mask, 10)
    before, slots = mine.report(), mine.sparse_layers[0].store.slots
    assert torch.equal(turn(model, mine, mask, 60, 3), turn(model, twin, mask, 60, 3))
    mask = longer(mask, 60)
    step_both(model, mine, twin, mask, 10)
    assert mine.sparse_layers[0].store.slots > slots and mine.report().hits > before.hits
    check(mine, twin)


def test_reset_keeps_the_buffers_and_forgets_the_counts():
    model = build()
    cache = HiSparseCache(model, **{**QUEST, "reserve": 64})
    first = generate(model, tokens(60), cache, 30)
    report, addresses = cache.report(), [layer.store.host.data_ptr() for layer in cache.sparse_layers]
    cache.reset()
    assert torch.equal(generate(model, tokens(60), cache, 30), first)
    assert cache.report() == report
    assert [layer.store.host.data_ptr() for layer in cache.sparse_layers] == addresses


def test_the_hot_buffer_begins_with_what_the_prompt_chose():
    """The pages that the last query of the prompt would read are there before the first step, and the sinks in their own slots."""
    model = build(num_hidden_layers=1)
    queries = []
    from kvsparse_hf.layers import offloading

    original = offloading.OffloadingLayer._votes

    def votes(self, query, call):
        chosen = self.selector.select(query[:, :, -1], self.store, call).pages
        queries.append(chosen)
        return original(self, query, call)

    offloading.OffloadingLayer._votes = votes
    try:
        mine, _, _ = started(model)
    finally:
        offloading.OffloadingLayer._votes = original
    store = mine.sparse_layers[0].store
    for row in range(3):
        for head in range(2):
            here = set(store.slot_page[row, head].tolist())
            assert {page for page in queries[0][row, head].tolist() if page >= 0} <= here
    assert store.slot_page[:2, :, 0].eq(0).all()
    assert kept_in_all_layers(mine)[0][0][0] == list(range(45))


def test_what_was_read_last_is_reread_cheaply():
    """Locality is what the buffer lives from: the same query again misses nothing."""
    model = build(num_hidden_layers=1)
    mine, _, _ = started(model, rows=(90,))
    layer = mine.sparse_layers[0]
    pages = torch.tensor([[[0, 5, 9, 20, 33, 44]] * 2], dtype=torch.int32)
    layer.store.bring(pages, layer.store.counters, "auto")
    before = mine.report().misses
    layer.store.bring(pages, layer.store.counters, "auto")
    assert mine.report().misses == before


def test_a_second_answer_in_the_same_conversation():
    """What `generate()` does over two turns, against a dense cache that is read in the same way at the turn."""
    model = build()
    mine, twin = HiSparseCache(model, **QUEST), QuestCache(model, **QUEST)
    first = generate(model, tokens(70), mine, 12)
    assert torch.equal(first, generate(model, tokens(70), twin, 12))
    whole = torch.cat((tokens(70), first, tokens(20, seed=4)), dim=1)
    assert torch.equal(generate(model, whole, mine, 12), generate(model, whole, twin, 12))


def test_a_loaded_cache_goes_on_with_the_selection_of_pages(tmp_path):
    """Row 13: nothing that only the host knew is missing after a file, for every selector."""
    model = build()
    for number, options in enumerate((QUEST, LOKI, IVF)):
        mine = HiSparseCache(model, **options)
        answer = generate(model, tokens(60), mine, 9)
        mine.save(tmp_path / str(number))
        whole = torch.cat((tokens(60), answer, tokens(9, seed=8)), dim=1)
        expected = generate(model, whole, mine, 9)
        loaded = SparseCache.load(tmp_path / str(number), model)
        assert torch.equal(generate(model, whole, loaded, 9), expected)


def test_two_caches_on_one_model_do_not_meet():
    model = build()
    ids, mask = left_pad([tokens(60), tokens(40, seed=2)])
    caches = [HiSparseCache(model, **QUEST) for _ in range(2)]
    logits = [prefill(model, cache, ids, mask) for cache in caches]
    assert torch.equal(*logits)
    after = tokens(20, 2, seed=3)
    out = [[], []]
    for i in range(20):
        for cache, got in zip(caches, out, strict=True):
            got.append(decode(model, cache, after[:, i:i + 1], longer(mask, i)))
    assert all(torch.equal(a, b) for a, b in zip(*out, strict=True))
    reference = dense(model)
    torch.testing.assert_close(prefill(model, reference, ids, mask), logits[0], atol=0, rtol=0)
