"""Host memory: exactly what is asked for, bounded, given back; and refusals that leave the cache as it was."""

import contextlib
import gc
import types
import warnings

import pytest
import torch
from helpers import (
    decode,
    forward,
    generate,
    left_pad,
    prefill,
    same_snapshot,
    snapshot,
    storage_bytes,
    tensors_of,
    tokens,
)
from offload_tools import LOKI, QUEST, longer, started
from tiny_models import build

from kvsparse_hf import BudgetError, HiSparseCache, OptionError, QuestCache
from kvsparse_hf.layers import host
from kvsparse_hf.layers.host import HostMemory, mapped_bytes, parse_bytes, registered_bytes

CPU = torch.device("cpu")
PAGE = 2 * 2 * 16 * 4  # bytes of a page of 2 tokens, keys and values of 16 channels in fp32


@pytest.fixture
def base() -> int:
    """Host memory held by caches that are alive; dropped ones are cycles, and go first."""
    gc.collect()
    return mapped_bytes()


def pool(rows: int, tokens_held: int, layers: int = 2) -> int:
    """Bytes of the host pools of that many rows of two heads."""
    return rows * 2 * layers * -(-tokens_held // 2) * PAGE


# --- the allocator -----------------------------------------------------------------------------------------------------


def test_a_tensor_keeps_its_memory_and_nothing_else_does(base):
    memory = HostMemory()
    tensor = memory.zeros(3, 5, dtype=torch.bfloat16, device=CPU)
    assert tensor.shape == (3, 5) and not tensor.any() and memory.held == 30 and mapped_bytes() == base + 30
    view = tensor[1:]
    del tensor
    gc.collect()
    assert memory.held == 30
    view.fill_(2)
    del view
    gc.collect()
    assert (memory.held, mapped_bytes(), registered_bytes()) == (0, base, 0)


def test_the_limit_counts_what_is_alive():
    memory = HostMemory(100)
    first = memory.zeros(60, dtype=torch.uint8, device=CPU)
    with pytest.raises(BudgetError, match="60 held.*host_bytes allows 100"):
        memory.zeros(41, dtype=torch.uint8, device=CPU)
    assert memory.held == 60
    del first
    assert memory.zeros(100, dtype=torch.uint8, device=CPU).numel() == 100


def test_no_more_than_the_machine_has(monkeypatch):
    """Row 23: refused before anything is allocated."""
    monkeypatch.setattr(host, "available_bytes", lambda: 1000)
    memory = HostMemory()
    with pytest.raises(BudgetError, match="901 bytes.*has 900 to give"):
        memory.zeros(901, dtype=torch.uint8, device=CPU)
    assert memory.held == 0 and memory.zeros(900, dtype=torch.uint8, device=CPU).numel() == 900


def test_available_memory_is_read_from_the_machine():
    assert 2**20 < host.available_bytes() < 2**50


def test_tensors_of_inference_mode_may_be_written_outside():
    with torch.inference_mode():
        tensor = HostMemory().zeros(4, dtype=torch.float32, device=CPU)
    tensor.add_(1)
    assert tensor.tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("text, nbytes", [("8GiB", 8 * 2**30), ("1.5kB", 1500), (77, 77), (None, None)])
def test_sizes(text, nbytes):
    assert parse_bytes(text, "host_bytes") == nbytes


@pytest.mark.parametrize("value", ["8 parsecs", "", "-1GiB", 0, -5, 1.5, True, [1]])
def test_no_sizes(value):
    with pytest.raises(OptionError, match="device_bytes=.*8GiB"):
        parse_bytes(value, "device_bytes")


def test_registration_refused_is_said_once(monkeypatch):
    """What a driver that refuses looks like: one warning, CPU tensors, and a cache that is not compiled."""
    driver = types.SimpleNamespace(cudaHostRegister=lambda *args: 2)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(host, "_warned", False)
    memory = HostMemory()
    with pytest.warns(UserWarning, match="refused to register 12 bytes.*ulimit"):
        tensor = memory.zeros(3, dtype=torch.float32, device=torch.device("cuda", 0))
    assert tensor.device == CPU and not memory.pinned and registered_bytes() == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        memory.zeros(3, dtype=torch.float32, device=torch.device("cuda", 0))
    cache = HiSparseCache(build(), **QUEST)
    assert cache.is_compileable
    cache.sparse_layers[0].memory.pinned = False
    assert not cache.is_compileable


def test_registration_is_taken_back(monkeypatch):
    """Row 24: what was registered is unregistered at the same address, once, when the memory goes."""
    calls = []
    driver = types.SimpleNamespace(
        cudaHostRegister=lambda address, nbytes, flags: calls.append(("register", address, nbytes)) or 0,
        cudaHostUnregister=lambda address: calls.append(("unregister", address)) or 0,
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: calls.append(("wait", device)))
    device = torch.device("cuda", 0)
    region = host._Region.of(5000)
    assert region.register(device) and registered_bytes() == 5000
    address = region.address
    assert region.__cuda_array_interface__["data"] == (address, False) and address % 4096 == 0
    del region
    gc.collect()
    assert calls == [("register", address, 5000), ("wait", device), ("unregister", address)] and registered_bytes() == 0


# --- caches ------------------------------------------------------------------------------------------------------------


def test_the_pool_is_as_large_as_the_tokens(base):
    """Row 19: not a power of two, nothing on the side."""
    mine, _, _ = started(build(), rows=(45, 30, 3))
    report = mine.report()
    assert report.host_bytes == pool(3, 45 + 6) == mapped_bytes() - base
    assert storage_bytes(tensors_of(mine)) >= report.host_bytes + report.device_bytes


def test_50_caches_leave_nothing(base):
    """Row 24: made, filled, grown, copied, dropped."""
    model = build()
    for seed in range(50):
        cache = HiSparseCache(model, **QUEST)
        forward(model, tokens(40, seed=seed), cache)
        decode(model, cache, tokens(8))
        copy = cache.fork()
        assert mapped_bytes() - base >= 2 * cache.report().host_bytes > 0
        del cache, copy
        if seed % 10 == 9:
            gc.collect()
            assert mapped_bytes() == base


def test_an_empty_cache_holds_nothing():
    """Row 14: usage of nothing is nothing."""
    report = HiSparseCache(build(), **QUEST).report()
    assert (report.device_bytes, report.host_bytes, report.hits, report.misses, report.swapped_bytes) == (0, 0, 0, 0, 0)


def test_offloading_makes_room_on_the_device():
    """Row 14: under the same bytes on the device more rows fit than with everything there, and the more the longer they are."""
    model = build()

    def device_bytes(cls, rows, length):
        cache = cls(model, **QUEST)
        prefill(model, cache, tokens(length, rows))
        return cache.report().device_bytes

    ratios = [device_bytes(QuestCache, 2, n) / device_bytes(HiSparseCache, 2, n) for n in (100, 400)]
    assert 1 < ratios[0] < ratios[1]
    assert device_bytes(HiSparseCache, 5, 400) < device_bytes(QuestCache, 3, 400)


def test_too_little_host_memory_for_the_prompt(base):
    """Refused before the first pool is allocated, though one layer alone would have fitted; a shorter prompt then runs."""
    model = build()
    cache = HiSparseCache(model, **QUEST, host_bytes=pool(1, 66) - 1)
    with pytest.raises(BudgetError, match="host_bytes allows"):
        forward(model, tokens(60), cache)
    gc.collect()
    assert mapped_bytes() == base
    cache.reset()
    ids = tokens(50)
    assert torch.equal(generate(model, ids, cache, 6), generate(model, ids, QuestCache(model, **QUEST), 6))


def test_growth_that_is_refused_changes_nothing():
    """Row 23: the step that finds no room raises; everything is as before, and what needs no room goes on."""
    model = build()
    mine, twin, mask = started(model, rows=(40, 33), host_bytes=pool(2, 46) + 100)
    decode(model, mine, tokens(6, 2), mask)
    decode(model, twin, tokens(6, 2), mask)
    grown = longer(mask, 6)
    before, report = snapshot(mine), mine.report()
    for _ in range(2):
        with pytest.raises(BudgetError, match="host_bytes allows"):
            decode(model, mine, tokens(1, 2), grown)
        assert same_snapshot(snapshot(mine), before) and mine.report() == report
    with pytest.raises(BudgetError, match="host_bytes allows"):
        forward(model, tokens(9, 2), mine, attention_mask=longer(grown, 9))
    assert same_snapshot(snapshot(mine), before) and mine.report() == report
    with pytest.raises(BudgetError, match="host_bytes allows"):
        mine.batch_repeat_interleave(2)
    assert same_snapshot(snapshot(mine), before) and mine.batch_size == 2
    for cache in (mine, twin):
        cache.crop(-4)
    after = tokens(4, 2, seed=8)
    assert torch.equal(decode(model, mine, after, grown[:, :-4]), decode(model, twin, after, grown[:, :-4]))


def test_a_turn_that_needs_a_larger_buffer_than_given_is_refused():
    model = build()
    mine, _, mask = started(model, rows=(60,), budget=0.3, hot_tokens=26)
    before = snapshot(mine)
    with pytest.raises(BudgetError, match="hot_tokens=26"):
        forward(model, tokens(60), mine)
    assert same_snapshot(snapshot(mine), before) and int(mine.get_seq_length()) == 60
    decode(model, mine, tokens(4), mask)


def test_the_machine_is_asked_for_all_layers_together(monkeypatch):
    model = build(num_hidden_layers=3)
    need = pool(1, 66, layers=3)
    monkeypatch.setattr(host, "available_bytes", lambda: int(need / 0.9) - 2)
    cache = HiSparseCache(model, **QUEST)
    with pytest.raises(BudgetError, match="the machine has"):
        forward(model, tokens(60), cache)
    assert cache.report().host_bytes == 0
    monkeypatch.setattr(host, "available_bytes", lambda: int(need / 0.9) + 2)
    cache.reset()
    forward(model, tokens(60), cache)
    assert cache.report().host_bytes == need


def test_bytes_on_the_device_do_not_grow_with_the_prompt():
    """But for tables and metadata: 4 bytes a page, and Quest's bounds."""
    model, held = build(), []
    for length in (100, 1000):
        cache = HiSparseCache(model, **{**QUEST, "page_size": 4, "budget": 32})
        forward(model, tokens(length), cache)
        metadata = sum(t.nbytes for layer in cache.sparse_layers for t in layer.selector.tensors().values())
        held.append(cache.report().device_bytes - metadata - 2 * 2 * 4 * -(-(length + 6) // 4))
    assert held[0] == held[1]
    cache = HiSparseCache(model, **LOKI)
    forward(model, tokens(100), cache)
    keys = [t for layer in cache.sparse_layers for name, t in layer.tensors().items() if t.shape[-1:] == (16,) and name != "host"]
    assert sum(t.nbytes for t in keys) < 0.5 * cache.report().host_bytes


def test_pages_of_many_rows_stay_in_their_own_memory():
    """Row 4: row numbers beyond 2^31 elements. The pool is virtual: no page of it is touched but the two at its ends."""
    from kvsparse_hf import ops

    pages = 2**31 // 256 + 10
    memory = HostMemory()
    try:
        far = memory.zeros(1, 1, pages, 2, 1, 128, dtype=torch.bfloat16, device=CPU)
    except BudgetError:
        pytest.skip("the machine has no 4.3 GB to map")
    far[0, 0, -1].fill_(3.0)
    near = torch.zeros(1, 1, 4, 2, 1, 128, dtype=torch.bfloat16)
    table = torch.full((1, 1, pages), -1, dtype=torch.int32)
    stamp, slot_page = torch.zeros(1, 1, 4, dtype=torch.int32), torch.full((1, 1, 4), -1, dtype=torch.int32)
    listed = torch.tensor([[[0, pages - 1]]], dtype=torch.int32)
    slots, *misses = ops.hot_plan(listed, table, slot_page, stamp, torch.zeros(1, 1, dtype=torch.int32),
                                  torch.zeros(1, 1, 2, dtype=torch.int64))
    ops.hot_fetch(far, near, *misses)
    first, last = slots[0, 0].tolist()
    assert near[0, 0, last].eq(3).all() and not near[0, 0, first].any()


def test_rows_that_leave_free_their_memory():
    model = build()
    mine, _, mask = started(model)
    before = mine.report().host_bytes
    mine.batch_select_indices(torch.tensor([1]))
    gc.collect()
    assert mine.report().host_bytes == before // 3 == sum(layer.memory.held for layer in mine.sparse_layers[:1])
    ids, _ = left_pad([tokens(5)])
    decode(model, mine, ids, mask[[1]])
