"""Caches on two levels beside the same selection with everything on the device, poisoned memory, and what must hold of a store."""

import pytest
import torch
from helpers import decode, left_pad, prefill, tokens

from kvsparse_hf import HiSparseCache, QuestCache
from kvsparse_hf.layers import host, hot

QUEST = dict(budget=12, page_size=2, sinks=2, recent=2, dense_layers=0, reserve=6)
LOKI = {**QUEST, "selector": "loki", "d_f": 0.5}
IVF = dict(selector="ivf", budget=12, sinks=2, recent=3, update_every=4, per_cluster=2, segment=64, reserve=6)
SELECTORS = {"quest": QUEST, "loki": LOKI, "ivf": IVF}
ROWS = (45, 30, 3)


@pytest.fixture
def poisoned(monkeypatch):
    """Host pools and hot buffers are full of NaN before anything is written (rows 1 and 2 of the fault reports)."""

    def nan(original):
        def make(*args, **kwargs):
            tensor = original(*args, **kwargs)
            return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

        return make

    monkeypatch.setattr(hot, "static_zeros", nan(hot.static_zeros))
    monkeypatch.setattr(host.HostMemory, "zeros", nan(host.HostMemory.zeros))


def started(model, rows=ROWS, **options):
    """A `HiSparseCache` that read padded prompts, the same as `QuestCache` where Quest selects, and the mask."""
    ids, mask = left_pad([tokens(n, seed=20 + n) for n in rows])
    options = {**SELECTORS[options.get("selector", "quest")], **options}
    mine = HiSparseCache(model, **options)
    prefill(model, mine, ids, mask)
    twin = None
    if options.get("selector", "quest") == "quest":
        names = ("budget", "page_size", "sinks", "recent", "dense_layers", "reserve", "reduce")
        twin = QuestCache(model, **{name: options[name] for name in names if name in options})
        prefill(model, twin, ids, mask)
    return mine, twin, mask


def longer(mask, steps):
    return torch.cat((mask, mask.new_ones(len(mask), steps)), dim=1)


def step_both(model, mine, twin, mask, steps, seed=0):
    """Feeds both the same tokens; the logits must be equal bit for bit. Returns the new mask."""
    after = tokens(steps, len(mask), seed=seed)
    assert torch.equal(decode(model, mine, after, mask), decode(model, twin, after, mask))
    return longer(mask, steps)


def check(mine, twin) -> None:
    """Every table says what is where, and every page is what the twin's dense store holds."""
    for layer, other in zip(mine.sparse_layers, twin.sparse_layers, strict=True):
        store, truth = layer.store, other.store
        assert layer.offloaded and torch.equal(store.length, truth.length)
        keys, values = truth.span(0, int(truth.length.max()))
        size, slots = store.page_size, store.slots
        for row in range(store.batch):
            for head in range(store.heads):
                _check_unit(store, keys[row, head], values[row, head], row, head, size, slots)


def _check_unit(store, keys, values, row, head, size, slots) -> None:
    length = int(store.length[row, head])
    newest = (length - 1) // size
    held = store.slot_page[row, head].tolist()
    table = store.page_table[row, head].tolist()
    assert held[-1] == newest and sorted(page for page in held if page >= 0) == sorted(p for p, s in enumerate(table) if s >= 0)
    assert all(held[slot] == page for page, slot in enumerate(table) if slot >= 0)
    assert int(store.visible[row, head]) == (slots - 1) * size + (length - 1) % size + 1
    for page in range(min(store.pinned, newest)):
        assert held[page] in (page, -1)  # -1: it was the newest before a crop
    for page in range(newest + 1):
        end = min(length, page * size + size)
        expected = torch.stack((keys[page * size:end], values[page * size:end]))
        if page < newest:
            assert torch.equal(store.host[row, head, page], expected)
        if table[page] >= 0:
            assert torch.equal(store.hot[row, head, table[page]][:, : end - page * size], expected)
