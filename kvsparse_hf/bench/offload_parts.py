"""What a step of HiSparse consists of, each part timed alone in one layer."""

import time
from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from .. import ops
from ..layers.host import HostMemory
from ..layers.hot import PagedStore
from ..layers.hot_attention import attend_slots
from .timing import Results, time_graph

_MISSES = (0, 64, 256, 1024)  # pages of one layer


def measure_parts(
    model: PreTrainedModel, sizes: tuple[int, int, int, int], batch: int, results: Results, where: dict
) -> None:
    """Adds microseconds of plan, fetch and attention in one layer, by pages missed.

    Args:
        sizes: tokens of a prompt, of a selection, of a hot buffer, of a page.
        where: shape of the rows.
    """
    config, (context, budget, hot_tokens, size) = model.config, sizes
    heads, dim = config.num_key_value_heads, config.hidden_size // config.num_attention_heads
    listed, slots = budget // size, hot_tokens // size
    like = torch.zeros(1, dim, dtype=model.dtype, device=model.device)
    store = PagedStore(HostMemory(), (batch, heads, context // size, slots), size, 1, like)
    store.length.fill_(context)
    store.truncate(torch.full((batch,), context, device=model.device))
    wanted = torch.arange(listed, dtype=torch.int32, device=model.device).expand(batch, heads, -1).contiguous()
    slot = store.bring(wanted, store.counters, "auto")
    tables = (store.page_table, store.slot_page, store.stamp, store.tick, store.counters)
    query = torch.randn(batch, config.num_attention_heads, dim, dtype=model.dtype, device=model.device)
    options = dict(scale=dim**-0.5, softcap=0.0, sinks=None, return_lse=False, backend="auto")
    timings = {"plan": lambda: ops.hot_plan(wanted, *tables, 1), "attention": lambda: attend_slots(store, query, slot, options)}
    for name, launch in timings.items():
        results.add(name, "us_per_layer", round(_microseconds(launch, model), 3), "us", where)
    for missed in _MISSES:
        each = min(-(-missed // (batch * heads)), listed)
        page = torch.randint(store.pages, (batch, heads, listed), dtype=torch.int32, device=model.device)
        count = torch.full((batch, heads), each, dtype=torch.int32, device=model.device)
        spent = _microseconds(lambda page=page, count=count: ops.hot_fetch(store.host, store.hot, page, slot, count), model)
        moved, here = each * batch * heads * store.host[0, 0, 0].nbytes, {**where, "pages": each * batch * heads}
        results.add("fetch", "us_per_layer", round(spent, 3), "us", here)
        if moved:
            results.add("fetch", "GB_per_s", round(moved / spent / 1e3, 2), "GB/s", here)


def _microseconds(launch: Callable[[], object], model: PreTrainedModel) -> float:
    if model.device.type == "cuda":
        return time_graph([launch] * 8).us
    begun = time.perf_counter()
    launch()
    return (time.perf_counter() - begun) * 1e6
