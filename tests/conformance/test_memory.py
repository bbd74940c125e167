"""Bytes are measured from storages: what a cache holds after a prompt, and what a prompt needs at its peak."""

import copy
import gc

import pytest
import torch
from helpers import (
    decode,
    dense,
    forward,
    generate,
    kept_in_all_layers,
    left_pad,
    prefill,
    storage_bytes,
    tensors_of,
    tokens,
)
from methods import BUDGET, CORE, EVICTING, METHODS, only, quick_where
from tiny_models import build
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvsparse_hf import SparseCache

by_method = pytest.mark.parametrize("case", METHODS, ids=lambda case: case.id)
evicting = pytest.mark.parametrize("case", EVICTING, ids=lambda case: case.id)

LAYERS, HEADS, DIM = 8, 2, 16
ENTRY = 2 * DIM * 4  # bytes of one key and value, fp32
TABLES = 64  # bytes per head of start, length, capacity, … at most; plus a position of 4 bytes per entry
LENGTH = 600


def _model(**options):
    return build(num_hidden_layers=LAYERS, **options)


def _entries(cache) -> int:
    return sum(len(head) for layer in kept_in_all_layers(cache) for row in layer for head in row)


class LiveBytes(TorchDispatchMode):
    """Follows every storage that an operation returns, and the largest sum of those alive at one time."""

    def __init__(self):
        super().__init__()
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.device.type != "meta":
                storage = leaf.untyped_storage()
                self.alive.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        self.alive = {key: item for key, item in self.alive.items() if not item[0].expired()}
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self.alive.values()))
        return out


def _peak(model, ids, cache=None) -> int:
    gc.collect()
    with LiveBytes() as live:
        options = {"use_cache": False} if cache is None else {}
        forward(model, ids, cache, logits_to_keep=1, **options)
    return live.peak


@pytest.mark.parametrize("case, family", [
    pytest.param(case, family, id=f"{family}-{case.id}") for family in ("llama-gqa2", "gemma3") for case in METHODS
    if case.hybrids or family == "llama-gqa2"
])
def test_report_states_the_storages(case, family):
    """The bytes are everything the layers keep alive, found by walking the object, not by asking it."""
    model = build(family)
    ids, mask = left_pad([tokens(50), tokens(33, seed=2)])
    mine = case.make(model, reserve=10)
    prefill(model, mine, ids, mask)
    for _ in range(2):
        held = storage_bytes(tensors_of(mine))
        small = 2048  # clocks, padding and host-side tables, which the report leaves out
        assert held - small <= mine.report().device_bytes + mine.report().host_bytes <= held
        decode(model, mine, tokens(3, 2), mask)
        mask = torch.cat((mask, mask.new_ones(2, 3)), dim=1)


@evicting
def test_bytes_fall_to_the_budget(case):
    model = _model()
    budget = 48
    mine = case.make(model, budget, reserve=1)
    forward(model, tokens(LENGTH), mine)
    held = storage_bytes(tensors_of(mine))
    owners = case.owners(LAYERS)
    needed = budget * owners * HEADS * (ENTRY + 4 + case.memory)
    # 2 %, the tables, one entry of reserve per head, and the unrotated keys of `positions="cache"`
    reserve = owners * HEADS * max(1, case.every) * (ENTRY + 4)  # a cache that compresses every n tokens reserves n
    slack = 0.02 * needed + owners * HEADS * TABLES + reserve + _unrotated_keys(mine) + _newest_queries(mine)
    assert needed <= held <= needed + slack
    report = mine.report()
    assert _entries(mine) == budget * owners * HEADS
    assert report.dense_bytes == LENGTH * LAYERS * HEADS * ENTRY
    assert report.reserve_bytes <= reserve
    reference = dense(model)
    forward(model, tokens(LENGTH), reference)
    assert storage_bytes(tensors_of(reference)) == report.dense_bytes
    assert held < 0.2 * report.dense_bytes


def _newest_queries(cache) -> int:
    """What a cache that compresses while it decodes keeps of the newest queries."""
    return sum(t.untyped_storage().nbytes() for layer in cache.sparse_layers for name, t in layer.tensors().items() if "queries" in name)


def _unrotated_keys(cache) -> int:
    """What `positions="cache"` may hold beside the budget: the keys of the slots that move, as the model rotated them."""
    return sum(t.untyped_storage().nbytes() for layer in cache.sparse_layers for name, t in layer.tensors().items() if "raw" in name)


@evicting
@pytest.mark.parametrize("budget", ["40KiB", "123456B"])
def test_a_byte_budget_is_that_of_the_whole_cache(case, budget):
    model = build(num_hidden_layers=2)
    allowed = {"40KiB": 40 * 1024, "123456B": 123456}[budget]
    for rows in ((700,), (700, 350)):
        ids, mask = left_pad([tokens(length, seed=length) for length in rows])
        mine = case.make(model, budget, reserve=1)
        prefill(model, mine, ids, mask)
        report = mine.report()
        tables = len(rows) * 2 * HEADS * TABLES
        assert report.device_bytes - report.reserve_bytes <= allowed + tables
        assert report.device_bytes - report.reserve_bytes >= 0.5 * allowed


@by_method
def test_many_turns_do_not_reserve_ever_more(case, tmp_path):
    """However often a cache grew, what waits for tokens stays in proportion to those that came, as a saved one says too."""
    model = build("llama-gqa2")
    mine = case.make(model, 12, reserve=16)
    forward(model, tokens(24), mine)
    for turn in range(12):
        forward(model, tokens(2, seed=turn), mine)
    report = mine.report()
    assert report.device_bytes + report.host_bytes < 3.5 * report.dense_bytes
    mine.save(tmp_path)
    assert SparseCache.load(tmp_path, model).report().evicted == report.evicted


@by_method
def test_no_prompt_tensor_stays_alive(case):
    """Neither the keys nor the values of the prompt, nor a view of them, nor the queries."""
    model = build()
    mine = case.make(model)
    seen = []
    original = mine.update

    def update(keys, values, *args, **kwargs):
        seen.extend(StorageWeakRef(t.untyped_storage()) for t in (keys, values))
        return original(keys, values, *args, **kwargs)

    mine.update = update
    forward(model, tokens(200), mine)
    gc.collect()
    assert len(seen) == 2 * case.layers and all(reference.expired() for reference in seen)
    forward(model, tokens(30), mine)
    decode(model, mine, tokens(2))
    gc.collect()
    assert len(seen) == 8 * case.layers and all(reference.expired() for reference in seen)


ROWS = {"one": (LENGTH,), "padded": (LENGTH, 250)}


@pytest.mark.parametrize(
    "case, rows", only(EVICTING, quick_where(lambda case, rows: case in CORE or rows == "one" and not case.variant and case.id != "rkv", list(ROWS)))
)
def test_peak_of_a_prompt(case, rows):
    """Over a forward without a cache, a prompt needs the compressed cache and two dense layers; a dense cache needs all eight."""
    model, rows = _model(), ROWS[rows]
    ids, mask = left_pad([tokens(length, seed=length) for length in rows])
    layer = 2 * len(rows) * LENGTH * HEADS * DIM * 4
    floor = _peak(model, ids)
    mine, reference = case.make(model, 32, reserve=1), dense(model)
    mine_peak = _peak(model, ids, mine)
    held = storage_bytes(tensors_of(mine))
    assert mine_peak <= floor + held + (2 + case.queries) * layer
    assert _peak(model, ids, reference) > floor + held + 2 * layer  # the measurement can fail


@pytest.mark.parametrize("case", only(EVICTING, quick_where(lambda case: case in CORE)))
def test_peak_of_a_second_prompt_after_reset(case):
    model = _model()
    mine = case.make(model, 32, reserve=1)
    ids = tokens(LENGTH)
    first = _peak(model, ids, mine)
    held = storage_bytes(tensors_of(mine))
    mine.reset()
    assert _peak(model, ids, mine) <= first + held
    assert storage_bytes(tensors_of(mine)) == held


@evicting
def test_500_steps(case):
    """Bounded caches hold their budget at every step, and allocate nothing; protected tokens survive."""
    model = build()
    mine = case.make(model, reserve=16)
    forward(model, tokens(40), mine)
    after = tokens(500, seed=3)
    addresses = {t.data_ptr() for layer in mine.sparse_layers for t in layer.tensors().values()}
    for step in range(0, 500, 50):
        decode(model, mine, after[:, step:step + 50])
        layers = kept_in_all_layers(mine)
        assert case.held(mine) == {case.kept_after_decode(40, step + 50)}
        for head in (head for layer in layers for head in layer[0]):
            assert len(head) == len(set(head))
            assert head[-1] == 40 + step + 49
            if case.bounded:
                assert head[:case.sinks] == list(range(case.sinks))
            if case.streaming:
                assert head == [0, 1, 2, 3, *range(40 + step + 50 - (BUDGET - 4), 40 + step + 50)]
    if case.bounded:
        assert {t.data_ptr() for layer in mine.sparse_layers for t in layer.tensors().values()} == addresses
    assert mine.report().seen == [540]


@by_method
def test_a_dropped_cache_is_freed_at_once(case):
    """Not when Python happens to look for circular references: the next cache may not fit before that."""
    model = build()
    mine = case.make(model, reserve=8)
    generate(model, tokens(40), mine, 4)
    fork = copy.deepcopy(mine)
    held = [[StorageWeakRef(t.untyped_storage()) for t in tensors_of(cache) if t.numel()] for cache in (mine, fork)]
    gc.collect()
    gc.disable()
    try:
        del mine
        assert all(reference.expired() for reference in held[0])
        assert not any(reference.expired() for reference in held[1])
        del fork
        assert all(reference.expired() for reference in held[1])
    finally:
        gc.enable()


@by_method
def test_many_runs_leak_nothing(case):
    """Eight `generate()` calls on one cache with `reset()` hold what the first one held; dropped caches are freed."""
    model = build()
    mine = case.make(model, reserve=8)
    sizes = set()
    for _ in range(4):
        generate(model, tokens(60), mine, 6)
        sizes.add(storage_bytes(tensors_of(mine)))
        mine.reset()
    assert len(sizes) == 1
    references = [StorageWeakRef(t.untyped_storage()) for t in tensors_of(mine) if t.numel()]
    del mine
    gc.collect()
    assert all(reference.expired() for reference in references)
