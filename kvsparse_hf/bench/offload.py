"""Dense attention, selection with everything on the device, and HiSparse, batch by batch under one cap on device memory.

Weights, keys and values are random. What a step selects is not: it follows a trace of a real model (see `bench.traces`), for
selection on the device as for HiSparse, and both also do the selector's work. System "hisparse-random" selects other pages at
every step instead, the worst case; "hisparse-resident" has room on the device for every layer. Every system runs through
`fast_decode`, which replays one CUDA graph a token, because at small batches the host's launches would hide the link.

For each system the batch doubles until it does not fit: neither into the cap (`torch.cuda.set_per_process_memory_fraction`) nor
into host memory. Beside each measurement stands the law of `bench.law` for its batch and hit rate.
"""

import gc
import importlib.util
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.progress import Progress
from transformers import PreTrainedModel

from ..cache import SparseCache
from ..decoding import FastDecode
from ..errors import BudgetError, KVSparseError
from ..hf import compat
from ..hf.attention import detach
from ..layers.offloading import OffloadingLayer
from ..methods import FullCache, HiSparseCache, QuestCache
from .law import Machine, Work, needed_hit_rate, throughput
from .models import fill, random_model, wait_for
from .offload_parts import measure_parts
from .timing import Results
from .traces import ReplayingSelector, Trace

SYSTEMS = ("dense", "quest", "hisparse", "hisparse-resident", "hisparse-random")
_EVERYTHING = 2**50  # bytes on the device: no layer is offloaded


@dataclass(frozen=True)
class Setting:
    """What is measured.

    Attributes:
        context, budget, page_size: tokens of a prompt, of a selection, of a page.
        hot_tokens: per key/value head; None: twice the budget.
        new_tokens, warm_tokens: decoded in a long and a short run.
        repeats: of each measurement, whose median counts.
        hbm: cap on the device's memory in bytes, None for all of it.
        host_bytes: cap on host memory, None for what the machine has.
    """

    context: int = 32768
    budget: int = 2048
    page_size: int = 16
    hot_tokens: int | None = None
    new_tokens: int = 96
    warm_tokens: int = 16
    repeats: int = 3
    hbm: int | None = None
    host_bytes: int | None = None


class _Replays:
    """Selecting caches that choose as a trace did."""

    def __init__(self, model, pages: torch.Tensor, setting: Setting, **options):
        self._pages, self._setting = pages, setting
        common = dict(budget=setting.budget, page_size=setting.page_size, reserve=2 * setting.new_tokens)
        super().__init__(model, **common, dense_layers=0, recent=1, **options)  # the trace says what is read

    def make_selector(self, layer_idx: int) -> ReplayingSelector:
        options = self.options
        common = (options.sinks, options.recent, options.reduce, self._setting.page_size, options.backend)
        pages = self._pages[layer_idx * len(self._pages) // self.binding.layers]
        return ReplayingSelector(*common, pages=pages, first=self._setting.context)


class _Quest(_Replays, QuestCache):
    pass


class _HiSparse(_Replays, HiSparseCache):
    pass


def make_cache(system: str, model: PreTrainedModel, setting: Setting, pages: torch.Tensor) -> SparseCache:
    """The cache of one system, empty. `pages`: `[L, R, T, H, K]` on the device, of the real or of the random trace."""
    detach(model)
    if system == "dense":
        return FullCache(model, reserve=2 * setting.new_tokens)
    if system == "quest":
        return _Quest(model, pages, setting)
    if system not in SYSTEMS:
        raise KVSparseError(f"unknown system {system!r}; known: {', '.join(SYSTEMS)}.")
    room = _EVERYTHING if system == "hisparse-resident" else None
    limits = dict(hot_tokens=setting.hot_tokens, host_bytes=setting.host_bytes, device_bytes=room)
    return _HiSparse(model, pages, setting, **limits)


@torch.no_grad()
def decode_seconds(model: PreTrainedModel, cache: SparseCache, batch: int, setting: Setting, tokens: int) -> float:
    """Seconds that `generate()` takes for so many tokens after a prompt of random keys and values."""
    cache.reset()
    fill(cache, model, batch, setting.context)
    ids = torch.randint(3, model.config.vocab_size, (batch, setting.context + 1), device=model.device)
    wait_for(model)
    begun = time.perf_counter()
    model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=None, do_sample=False,
        eos_token_id=None, pad_token_id=0, custom_generate=FastDecode(), **{compat.CACHE_ARGUMENT: cache},
    )  # fmt: skip
    wait_for(model)
    return time.perf_counter() - begun


@dataclass(frozen=True)
class Figures:
    """One system at one batch: milliseconds of a step, hit rate (None without a hot buffer), bytes from the host per step, and
    bytes held."""

    ms: float
    n: int
    hit_rate: float | None
    swapped: float
    device_bytes: int
    host_bytes: int


def measure(model: PreTrainedModel, cache: SparseCache, batch: int, setting: Setting) -> Figures:
    """Milliseconds a token from the difference of a long and a short run, so that prompt and capture cancel out. A run before
    compiles the kernels and pins the memory."""
    steps = []
    decode_seconds(model, cache, batch, setting, setting.warm_tokens)
    for _ in range(setting.repeats):
        short, long = (decode_seconds(model, cache, batch, setting, n) for n in (setting.warm_tokens, setting.new_tokens))
        steps.append((long - short) / (setting.new_tokens - setting.warm_tokens))
    report = cache.report()
    offloaded = [layer for layer in cache.sparse_layers if isinstance(layer, OffloadingLayer) and layer.offloaded]
    planned = int(offloaded[0].store.tick[0, 0]) - 1 if offloaded else 1
    hit_rate = report.hits / max(report.hits + report.misses, 1) if offloaded else None
    return Figures(statistics.median(steps) * 1e3, setting.repeats, hit_rate, report.swapped_bytes / planned, report.device_bytes, report.host_bytes)


def work_of(system: str, model: PreTrainedModel, setting: Setting, listed: float = 1.0) -> Work:
    """Bytes of a step by the law's names, where so much of the budget is listed."""
    config = model.config
    heads, dim = config.num_key_value_heads, config.hidden_size // config.num_attention_heads
    layers, size = config.num_hidden_layers, torch.empty(0, dtype=model.dtype).element_size()
    token = 2 * heads * dim * size * layers
    weights = sum(parameter.nbytes for parameter in model.parameters())
    if not config.tie_word_embeddings:
        weights -= model.get_input_embeddings().weight.nbytes  # of which a step reads a few rows
    if system == "dense":
        return Work(weights, setting.context * token, 0, 0)
    metadata = setting.context // setting.page_size * token
    swapping = layers if system in ("hisparse", "hisparse-random") else 0
    return Work(weights, listed * setting.budget * token, metadata, swapping)


def sweep(
    model: PreTrainedModel, system: str, batches: Iterable[int], setting: Setting, pages: torch.Tensor, add: Callable
) -> tuple[int, str]:
    """Measures a system at growing batches, as long as it fits; calls `add(batch, figures)` for each.

    Returns:
        The largest batch that ran, and what stopped the next one ("" for none).
    """
    largest = 0
    for batch in batches:
        gc.collect()
        if model.device.type == "cuda":
            torch.cuda.empty_cache()
        cache = make_cache(system, model, setting, pages)
        try:
            add(batch, measure(model, cache, batch, setting))
        except (torch.OutOfMemoryError, BudgetError) as error:
            return largest, str(error).strip().splitlines()[0].partition(". ")[0]
        largest = batch
        del cache
    return largest, ""


def run(
    trace: Trace,
    setting: Setting,
    shape: str = "llama-3.1-8b",
    systems: Iterable[str] = SYSTEMS,
    batches: Iterable[int] = (1, 2, 4, 8, 16, 32, 64, 128),
    output: str | Path = "examples/results",
    machine: Machine | None = None,
    model: PreTrainedModel | None = None,
) -> list[dict]:
    """Measures, and appends rows of suite `offload`.

    Args:
        trace: of a real model; its page size must be the setting's.
        machine: bandwidths of the law.
        model: instead of one with random weights in a named shape.

    Raises:
        KVSparseError: a trace that does not fit the setting.
    """
    if trace.page_size != setting.page_size:
        raise KVSparseError(f"the trace has pages of {trace.page_size} tokens, the setting {setting.page_size}.")
    if trace.steps < setting.new_tokens + 8:  # fast_decode runs a few steps ahead
        raise KVSparseError(f"the trace has {trace.steps} steps, {setting.new_tokens + 8} are needed; record a longer one.")
    machine = machine or Machine()
    model = model or random_model(shape)
    if setting.hbm is not None and model.device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(setting.hbm / torch.cuda.get_device_properties(0).total_memory)
    real = trace.for_shape(setting.context, setting.budget).to(model.device)
    noise = Trace.random(setting.context, setting.page_size, setting.budget, trace.steps).pages.to(model.device)
    results = Results(output, "offload")
    facts = {"model": shape, "context": setting.context, "budget": setting.budget, "page_size": setting.page_size,
             "hot_tokens": setting.hot_tokens or 2 * setting.budget, "hbm": setting.hbm}  # fmt: skip
    best, fitted, systems = 0.0, {}, list(systems)
    with Progress() as progress:
        task = progress.add_task("offload", total=len(systems))
        for system in systems:
            pages = noise if system == "hisparse-random" else real
            listed = round(float((pages >= 0).float().mean()), 3)
            where = {**facts, "trace": "random" if system == "hisparse-random" else trace.source, "listed": listed}

            def add(batch: int, figures: Figures, system: str = system, where: dict = where) -> None:
                nonlocal best
                speed = batch / figures.ms * 1e3
                best = max(best, speed if system == "quest" else 0.0)
                work = work_of(system, model, setting, where["listed"])
                _add_rows(results, system, figures, speed, work, machine, {**where, "batch": batch})
                progress.console.print(f"{system:<18} B={batch:<4} {speed:9.1f} tok/s  hit rate {figures.hit_rate}")

            fitted[system], reason = sweep(model, system, batches, setting, pages, add)
            results.add(system, "largest_batch", fitted[system], "rows", {**where, "stopped": reason})
            progress.advance(task)
    if best:
        needed = needed_hit_rate(best, work_of("quest", model, setting).selected, machine)
        results.add("law", "needed_hit_rate", round(needed, 4), "", facts)
    for batch in sorted({1, min(8, max(fitted.get("hisparse", 8), 1))}):
        sizes = (setting.context, setting.budget, facts["hot_tokens"], setting.page_size)
        measure_parts(model, sizes, batch, results, {**facts, "batch": batch})
    if importlib.util.find_spec("matplotlib"):
        plot(results.rows, Path(output) / "offload.png")
    return results.rows


def _add_rows(results: Results, system: str, figures: Figures, speed: float, work: Work, machine: Machine, where: dict) -> None:
    rate = 1.0 if figures.hit_rate is None else figures.hit_rate
    results.add(system, "tokens_per_s", round(speed, 2), "tok/s", where, figures.n)
    for name, overlapped in (("law_serial", False), ("law_overlapped", True)):
        results.add(system, name, round(throughput(work, where["batch"], rate, machine, overlapped), 2), "tok/s", where)
    results.add(system, "device_bytes", figures.device_bytes, "B", where)
    if figures.hit_rate is not None:
        results.add(system, "host_bytes", figures.host_bytes, "B", where)
        results.add(system, "hit_rate", round(figures.hit_rate, 5), "", where)
        results.add(system, "swapped_bytes_per_step", round(figures.swapped), "B", where)


def plot(rows: list[dict], path: Path) -> None:
    """Tokens per second over the batch, a line for each system, the law dotted. Needs matplotlib (extra `eval`)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for number, system in enumerate(SYSTEMS):
        for metric, style in (("tokens_per_s", "o-"), ("law_serial", ":")):
            points = [(row["shape"]["batch"], row["value"]) for row in rows if (row["case"], row["metric"]) == (system, metric)]
            if points:
                label = system if metric == "tokens_per_s" else None
                axes.plot(*zip(*points, strict=True), style, color=f"C{number}", label=label)
    facts = rows[0]["shape"]
    cap = "" if facts["hbm"] is None else f", {facts['hbm'] / 2**30:.0f} GiB of device memory"
    title = f"{facts['model']}, {facts['context']:,} tokens, {facts['budget']:,} selected{cap}\n(dotted: the law, from bandwidths alone)"
    batches = sorted({row["shape"]["batch"] for row in rows if row["metric"] == "tokens_per_s"})
    axes.set(xlabel="batch", ylabel="tokens per second", xscale="log", yscale="log")
    axes.set_xticks(batches, batches)
    axes.set_xticks([], minor=True)
    axes.set_title(title, fontsize=10)
    axes.legend()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
