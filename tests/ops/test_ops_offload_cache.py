"""A whole cache on two levels: every kernel of its steps in the interpreter, or on a GPU, against the references."""

from __future__ import annotations

import gc

import pytest
import torch
from helpers import decode, generate, left_pad, prefill, tokens
from tiny_models import build

from kvsparse_hf import HiSparseCache, QuestCache, fast_decode
from kvsparse_hf.layers.host import registered_bytes

QUEST = dict(budget=12, page_size=2, sinks=2, recent=2, dense_layers=0, reserve=6)
OPTIONS = {
    "quest": QUEST,
    "prefetch": {**QUEST, "prefetch": 2},
    "loki": {**QUEST, "selector": "loki", "d_f": 0.5},
    "ivf": dict(selector="ivf", budget=12, sinks=2, recent=3, update_every=4, per_cluster=2, segment=64, reserve=6),
}


def _started(model, backend, device="cpu", rows=(40, 9), **options):
    ids, mask = (part.to(device) for part in left_pad([tokens(n, seed=n) for n in rows]))
    cache = HiSparseCache(model, backend=backend, **options)
    prefill(model, cache, ids, mask)
    return cache, mask


@pytest.mark.usefixtures("interpreter_only")
@pytest.mark.parametrize("name", ["prefetch", "ivf", *[pytest.param(name, marks=pytest.mark.slow) for name in ("quest", "loki")]])
def test_the_kernels_give_the_same_cache(name):
    model = build(num_hidden_layers=1)
    caches = [_started(model, backend, **OPTIONS[name]) for backend in ("torch", "triton")]
    after = tokens(9, 2, seed=3)
    logits = [decode(model, cache, after, mask) for cache, mask in caches]
    torch.testing.assert_close(*logits, atol=1e-5, rtol=0)
    stores = [cache.sparse_layers[0].store for cache, _ in caches]
    for table in ("page_table", "slot_page", "stamp", "length", "visible", "counters", "early"):
        assert torch.equal(*(getattr(store, table) for store in stores)), table


@pytest.mark.usefixtures("interpreter_only")
def test_steps_between_drafts_read_the_pool():
    model = build(num_hidden_layers=1)
    out = []
    for backend in ("torch", "triton"):
        cache, mask = _started(model, backend, **QUEST)
        cache.activate_past_recording()
        out.append(decode(model, cache, tokens(5, 2, seed=3), mask))
    torch.testing.assert_close(*out, atol=1e-5, rtol=0)


# --- on a GPU ----------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPTIONS)
def test_replayed_graphs_on_a_gpu(cuda, name):
    """Row 2: host writes inside a replayed graph are there when the page comes back. 400 tokens over many doublings of the reserve."""
    model = build(num_hidden_layers=3, dtype=torch.bfloat16).to(cuda)
    ids = tokens(90, 3).to(cuda)
    far = generate(model, ids, HiSparseCache(model, **OPTIONS[name]), 400, custom_generate=fast_decode)
    near = generate(model, ids, HiSparseCache(model, **OPTIONS[name], device_bytes="1GiB"), 400, disable_compile=True)
    assert torch.equal(far, near)
    if name == "quest":
        assert torch.equal(far, generate(model, ids, QuestCache(model, **QUEST), 400, disable_compile=True))


@pytest.mark.gpu
def test_registered_memory_on_a_gpu(cuda):
    """Rows 19, 20 and 24: exact sizes, no copy, and everything given back."""
    gc.collect()
    assert registered_bytes() == 0
    model = build(dtype=torch.bfloat16).to(cuda)
    for _ in range(50):
        cache, _ = _started(model, "auto", cuda, **QUEST)
        store = cache.sparse_layers[0].store
        assert store.host.is_cuda and not store.staged
        assert registered_bytes() == cache.report().host_bytes == 2 * store.host.nbytes
        del cache, store
        gc.collect()
        assert registered_bytes() == 0


@pytest.mark.gpu
def test_bandwidth_on_a_gpu(cuda):
    """Row 17: one row with many misses uses as much of the link as many rows."""
    from kvsparse_hf import ops
    from kvsparse_hf.layers.host import HostMemory

    host = HostMemory().zeros(1, 8, 4096, 2, 16, 128, dtype=torch.bfloat16, device=torch.device(cuda, 0))
    hot = torch.zeros(1, 8, 256, 2, 16, 128, dtype=torch.bfloat16, device=cuda)
    page = torch.randperm(4096, device=cuda)[:1024].view(1, 8, 128).int()
    slot = torch.arange(128, device=cuda, dtype=torch.int32).expand(1, 8, 128).contiguous()
    count = torch.full((1, 8), 128, dtype=torch.int32, device=cuda)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for repeat in range(12):
        if repeat == 2:
            begin.record()
        ops.hot_fetch(host, hot, page, slot, count)
    end.record()
    end.synchronize()
    gigabytes = 10 * 1024 * 8192 / begin.elapsed_time(end) / 1e6
    assert gigabytes > 35
