"""Bytes are those of the budget, measured from storages; a prompt's peak is the compressed cache and two dense layers."""

import gc

import pytest
import torch
from head_cases import CASES, make, rules_for
from helpers import decode, dense, forward, kept_in_all_layers, left_pad, prefill, storage_bytes, tensors_of, tokens
from tiny_models import build
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

LAYERS, HEADS, DIM = 8, 2, 16
ENTRY = 2 * DIM * 4 + 4  # key, value and position, fp32
ROWS = {"one": (600,), "unequal": (600, 450, 300, 90)}


def entries(name: str, rows, cache) -> int:
    """What the method's rule says is held over all rows, layers and heads."""
    total = LAYERS * HEADS
    if name.startswith(("adakv", "headkv")):
        return sum(min(48, n) for n in rows) * total
    if name == "duo-attention":
        streaming = sum(map(sum, cache.plan))
        return sum(n * (total - streaming) + min(8, n) * streaming for n in rows)
    spans = 0
    for n in rows:
        for layer, betas in zip(*rules_for(cache.binding.config).values(), strict=True):
            plain = [min(int(a + b * (n + 30)), n + 30) for a, b in zip(layer, betas, strict=True)]
            for head in range(HEADS):
                mean = max(sum(plain[2 * head : 2 * head + 2]) / 2, 4)
                spans += min(n, int(-(-mean // 2) * 2))
    return spans


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", [name for name in CASES if name not in ("kvzip", "adakv-official", "adakv-periodic", "adakv-cachepos")])
def test_bytes_are_those_of_the_budget(name, rows):
    """Within 2 %, besides the tables of 64 bytes a head."""
    rows = ROWS[rows]
    model = build(num_hidden_layers=LAYERS)
    ids, mask = left_pad([tokens(n, seed=n) for n in rows])
    cache = make(name, model, budget=48, reserve=1)
    prefill(model, cache, ids, mask)
    needed, tables = entries(name, rows, cache) * ENTRY, len(rows) * LAYERS * HEADS * 64
    report = cache.report()
    held = storage_bytes(tensors_of(cache)) - report.reserve_bytes
    assert needed <= held <= 1.02 * needed + tables
    assert report.reserve_bytes <= len(rows) * LAYERS * HEADS * ENTRY
    assert sum(len(h) for layer in kept_in_all_layers(cache) for row in layer for h in row) * ENTRY == needed


class Live(TorchDispatchMode):
    """The largest sum of the storages alive at one time."""

    def __init__(self):
        super().__init__()
        self.alive, self.peak = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.device.type != "meta":
                storage = leaf.untyped_storage()
                self.alive.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        self.alive = {key: item for key, item in self.alive.items() if not item[0].expired()}
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self.alive.values()))
        return out


def peak(model, ids, cache=None) -> int:
    gc.collect()
    with Live() as live:
        forward(model, ids, cache, logits_to_keep=1, **({} if cache else {"use_cache": False}))
    return live.peak


@pytest.mark.parametrize("name", ["adakv", "adakv-pyramid", "headkv", "moa", "duo-attention"])
def test_peak_of_a_prompt(name):
    """KVzip is not among them: it reads the prompt into a full cache, because it must repeat it."""
    model = build(num_hidden_layers=LAYERS)
    ids = tokens(600)
    layer = 2 * 600 * HEADS * DIM * 4
    floor = peak(model, ids)
    cache = make(name, model, budget=48, reserve=1)
    mine = peak(model, ids, cache)
    held = storage_bytes(tensors_of(cache))
    assert mine <= floor + held + 2 * layer
    if name != "duo-attention":  # whose retrieval heads hold half of what a dense cache does
        assert peak(model, ids, dense(model)) > floor + held + 2 * layer


def test_no_entry_is_lost_when_shares_change_inside_the_buffers():
    """A second prompt shares out the same rows anew: same storages, other segments, the same answers as a fresh cache."""
    model = build(num_hidden_layers=LAYERS)
    cache = make("adakv", model, budget=48, reserve=20)
    forward(model, tokens(600), cache)
    before = [(layer.store.keys.data_ptr(), layer.store.allocated.clone()) for layer in cache.sparse_layers]
    cache.reset()
    forward(model, tokens(500, seed=7), cache)
    after = [(layer.store.keys.data_ptr(), layer.store.allocated) for layer in cache.sparse_layers]
    assert [pointer for pointer, _ in before] == [pointer for pointer, _ in after]
    assert any(not torch.equal(old, new) for (_, old), (_, new) in zip(before, after, strict=True))
    fresh = make("adakv", model, budget=48, reserve=20)
    forward(model, tokens(500, seed=7), fresh)
    assert kept_in_all_layers(cache) == kept_in_all_layers(fresh)
    assert torch.equal(decode(model, cache, tokens(30, seed=3)), decode(model, fresh, tokens(30, seed=3)))


def test_two_caches_and_a_dense_one_do_not_meet():
    """Two Ada-KV caches decode in turns, and a plain DynamicCache between them keeps every bit of its keys."""
    model = build(num_hidden_layers=2)
    prompts = [tokens(80, seed=5), tokens(120, seed=6)]
    after = tokens(20, seed=9)

    def alone(cache, ids):
        forward(model, ids, cache)
        return decode(model, cache, after)

    want = [alone(make("adakv", model), ids) for ids in prompts]
    want_dense = alone(dense(model), prompts[1])
    caches, plain = [make("adakv", model) for _ in prompts], dense(model)
    forward(model, prompts[1], plain)
    keys = [layer.keys.clone() for layer in plain.layers]
    got = [[], [], []]
    for cache, ids in zip(caches, prompts, strict=True):
        forward(model, ids, cache)
    for step in range(20):
        for index, cache in enumerate((*caches, plain)):
            got[index].append(forward(model, after[:, step : step + 1], cache))
    for mine, other in zip(got, [*want, want_dense], strict=True):
        assert torch.equal(torch.cat(mine, 1), other)
    assert all(torch.equal(layer.keys[:, :, :120], old) for layer, old in zip(plain.layers, keys, strict=True))
