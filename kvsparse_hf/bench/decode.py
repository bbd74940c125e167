"""Milliseconds per decoded token of a whole model, next to Transformers' own caches.

Weights, keys and values are random: decode speed depends on none of them. A check of the dense decode step against
Transformers' DynamicCache on the same keys and values comes first.
"""

import contextlib
import gc
import importlib.util
import signal
import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.progress import Progress
from transformers import DynamicCache, PreTrainedModel, StaticCache

from ..cache import SparseCache
from ..decoding import FastDecode
from ..errors import KVSparseError
from ..hf import compat
from ..hf.attention import detach
from ..methods import FullCache
from ..registry import get_method, list_methods
from .models import fill, random_model, wait_for
from .timing import Results

RESERVE = 512


@dataclass(frozen=True)
class Case:
    """One measurement.

    Attributes:
        system: a method of this library, "transformers-dynamic" or "transformers-static".
        how: "fast_decode", "fast_decode-default", "fast_decode-max-autotune", "fast_decode-freeze",
            "fast_decode-joined" (what is captured), "generate" (compiled by `generate()` itself), "eager" or "compiled" (the
            same for Transformers' caches).
        batch, context, budget: rows, tokens per row, budget per key/value head.
    """

    system: str
    how: str
    batch: int
    context: int
    budget: int = 2048

    @property
    def name(self) -> str:
        return f"{self.system}/{self.how}"

    @classmethod
    def parse(cls, text: str) -> "Case":
        """Reads `system/how:batch:context[:budget]`, as in `snapkv/fast_decode:1:32768:2048`."""
        try:
            name, *numbers = text.split(":")
            system, how = name.split("/")
            return cls(system, how, *map(int, numbers))
        except (ValueError, TypeError) as error:
            raise KVSparseError(f"case {text!r} is not system/how:batch:context[:budget].") from error


GRID = [
    Case.parse(text)
    for text in (
        "snapkv/fast_decode:1:32768",
        "snapkv/fast_decode-joined:1:32768",
        "snapkv/fast_decode-joined:1:131072",
        "full/fast_decode-joined:1:131072",
        "snapkv/fast_decode-joined:8:32768",
        "quest/fast_decode-joined:1:131072",
        "quest/fast_decode-joined:8:32768",
        "snapkv/generate:1:32768",
        "transformers-dynamic/eager:1:32768",
        "transformers-dynamic/eager:1:131072",
        "transformers-static/compiled:1:32768",
        "transformers-static/compiled:1:131072",
        "transformers-static/compiled:8:32768",
        "snapkv/fast_decode-default:1:32768",
        "snapkv/fast_decode:8:32768",
        "full/fast_decode:1:131072",
    )
]


def make_cache(case: Case, model: PreTrainedModel, new_tokens: int, **options):
    """The cache of one case, empty; `options` are those of the method."""
    detach(model)
    if case.system == "transformers-dynamic":
        return DynamicCache(config=model.config)
    if case.system == "transformers-static":
        return StaticCache(config=model.config, max_cache_len=case.context + new_tokens + 1)
    if case.system == "full":
        return FullCache(model, reserve=RESERVE)
    if case.system not in list_methods():
        raise KVSparseError(f"unknown system {case.system!r}.")
    return get_method(case.system)(model, budget=case.budget, reserve=RESERVE, **options)


def _arguments(case: Case, cache) -> dict:
    arguments = {compat.CACHE_ARGUMENT: cache, "disable_compile": case.how == "eager"}
    if case.how.startswith("fast_decode"):
        mode = case.how.removeprefix("fast_decode").removeprefix("-") or "none"
        arguments["custom_generate"] = FastDecode(compile=mode)
    return arguments


class _Stopwatch:
    """A streamer that notes when each token arrives."""

    def __init__(self):
        self.times: list[float] = []

    def put(self, tokens) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        self.times.append(time.perf_counter())


@torch.no_grad()
def check(shape: str, context: int = 1000, layers: int = 4, device: str = "cuda") -> tuple[float, float]:
    """Errors of one dense decode step in bf16 against fp32, with a few layers of the shape: ours, and Transformers' own.

    Returns:
        Relative errors of the logits, in norm, of `FullCache` and of `DynamicCache`.
    """
    exact = random_model(shape, device, torch.float32, layers)
    half = random_model(shape, device, torch.bfloat16, layers)
    half.load_state_dict(exact.state_dict())
    exact.load_state_dict(half.state_dict())  # the same, rounded, weights
    token = torch.full((1, 1), 7, device=device)
    logits = []
    for model, system in ((exact, "transformers-dynamic"), (half, "full"), (half, "transformers-dynamic")):
        cache = make_cache(Case(system, "eager", 1, context), model, 1)
        fill(cache, model, 1, context)
        logits.append(model(token, **{compat.CACHE_ARGUMENT: cache}).logits.double())
    reference, ours, theirs = logits
    return tuple(float((x - reference).norm() / reference.norm()) for x in (ours, theirs))


@contextlib.contextmanager
def at_most(seconds: float):
    """Raises TimeoutError in the main thread when what runs inside takes longer: compilers have been seen to hang."""
    if not seconds:
        yield
        return

    def late(*_):
        raise TimeoutError(f"longer than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Bench:
    """One model, and the cases that run on it.

    Args:
        new_tokens, warm_tokens: of a measured run and of one before.
        spread: see `fill`.
        options: of the methods.
    """

    def __init__(
        self, model: PreTrainedModel, new_tokens: int = 128, warm_tokens: int = 24, spread: float = 1.0, options: dict | None = None
    ):
        self.model, self.new_tokens, self.warm_tokens = model, new_tokens, warm_tokens
        self.spread, self.options = spread, options or {}

    def run(self, case: Case) -> dict:
        """Measures one case: `ms` per token of every row (median over tokens), `n`, `warmup_s`, `report`."""
        gc.collect()
        torch.cuda.empty_cache()
        torch._dynamo.reset()
        begun = time.perf_counter()
        cache = make_cache(case, self.model, self.new_tokens, **self.options)
        cache, _ = self._generate(case, cache, self.warm_tokens)
        warm = time.perf_counter() - begun
        cache, times = self._generate(case, cache, self.new_tokens)
        # The first tokens hold the capture; the last ones are read together with it.
        steps = [b - a for a, b in zip(times[16:-4], times[17:-3], strict=True)]
        report = cache.report() if isinstance(cache, SparseCache) else None
        return {"ms": statistics.median(steps) * 1e3, "n": len(steps), "warmup_s": warm, "report": report}

    @torch.no_grad()
    def _generate(self, case: Case, cache, tokens: int):
        """One run over a freshly filled cache. Returns the cache and the moments of its start, tokens and end."""
        if case.system == "transformers-dynamic":
            cache = make_cache(case, self.model, tokens)
        else:
            cache.reset()
        fill(cache, self.model, case.batch, case.context, self.spread)
        ids = torch.randint(3, 1000, (case.batch, case.context + 1), device=self.model.device)
        watch = _Stopwatch()
        wait_for(self.model)
        watch.put(None)
        self.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=None, do_sample=False,
            eos_token_id=None, pad_token_id=0, streamer=watch, **_arguments(case, cache),
        )  # fmt: skip
        wait_for(self.model)
        watch.end()
        return cache, watch.times


def add_rows(results: Results, case: Case, figures: dict, facts: dict) -> None:
    """The rows of one measured case; `facts` of its shape besides those of the case."""
    where = {**facts, "batch": case.batch, "context": case.context, "budget": case.budget}
    results.add(case.name, "ms_per_token", round(figures["ms"], 3), "ms", where, figures["n"])
    results.add(case.name, "warmup_s", round(figures["warmup_s"], 1), "s", where)
    if (report := figures["report"]) is not None:
        results.add(case.name, "device_bytes", report.device_bytes, "B", where)
        results.add(case.name, "read_bytes", report.read_bytes, "B", where)
        results.add(case.name, "fewest_entries_of_a_head", min(layer.kept_min for layer in report.layers), "entries", where)
        results.add(case.name, "most_entries_of_a_head", max(layer.kept_max for layer in report.layers), "entries", where)


def _label(row: dict) -> str:
    return row["case"] + (", unequal heads" if "spread" in row["shape"] else "")


def plot(rows: list[dict], path: Path) -> None:
    """Bars of milliseconds per token of one model: a panel for each batch and context, a bar for each row. Needs matplotlib (extra `eval`)."""
    from matplotlib.figure import Figure

    panels: dict[tuple[int, int], list[dict]] = {}
    for row in sorted(rows, key=lambda row: (row["shape"]["batch"], row["shape"]["context"], -row["value"])):
        panels.setdefault((row["shape"]["batch"], row["shape"]["context"]), []).append(row)
    figure = Figure(figsize=(4.8 * len(panels), 0.28 * max(map(len, panels.values())) + 1.4), layout="constrained")
    longest = max(row["value"] for row in rows)
    for axes, ((batch, context), bars) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        colors = ["tab:gray" if row["case"].startswith("transformers") else "tab:blue" for row in bars]
        drawn = axes.barh([_label(row) for row in bars], [row["value"] for row in bars], color=colors)
        axes.bar_label(drawn, fmt=" %.2f")
        axes.set(xlabel="ms per token", xscale="log", title=f"{batch} x {context // 1024}K")
        axes.set_xlim(1, 5 * longest)  # room for the last label
        axes.invert_yaxis()
        axes.margins(y=0.01)
    figure.suptitle(f"{rows[0]['shape']['model']} on {rows[0]['gpu']}")
    figure.savefig(path, dpi=110)


def run(
    cases: Iterable[Case],
    shape: str = "llama-3.1-8b",
    output: str | Path = "examples/results",
    limit_s: float = 1e9,
    case_s: float = 0,
    spread: float = 1.0,
    options: dict | None = None,
) -> list[dict]:
    """Checks, then measures the cases in order (as long as `limit_s` allows) and appends rows of suite `decode`.

    Args:
        limit_s: no case is begun later.
        case_s: a case that takes longer is left, as one that fails; 0: none is.
        spread, options: see `Bench`.

    Raises:
        KVSparseError: the decode step is not right; nothing is timed then.
    """
    cases, begun = list(cases), time.perf_counter()
    ours, theirs = check(shape)
    if not ours < 1.5 * theirs + 1e-3:
        raise KVSparseError(f"decode logits are off by {ours:.3g} from fp32, Transformers' by {theirs:.3g}; nothing was timed.")
    bench = Bench(random_model(shape), spread=spread, options=options)
    special = {**({"spread": spread} if spread != 1.0 else {}), **(options or {})}
    results = Results(output, "decode")
    with Progress() as progress:
        task = progress.add_task("decode", total=len(cases))
        for case in cases:
            if time.perf_counter() - begun > limit_s:
                progress.console.print(f"{case.name}: no time left")
                continue
            try:
                with at_most(case_s):
                    figures = bench.run(case)
            except (RuntimeError, TimeoutError) as error:
                progress.console.print(f"{case.name}: not measured, {str(error).strip().splitlines()[0]}")
                progress.advance(task)
                continue
            add_rows(results, case, figures, {"model": shape, **special})
            progress.console.print(
                f"{case.name:<34} B={case.batch:<3} {case.context:>7}  {figures['ms']:8.3f} ms  "
                f"(warm-up {figures['warmup_s']:.0f} s, {figures['n']} values)"
            )
            progress.advance(task)
    if importlib.util.find_spec("matplotlib") and results.rows:
        plot([row for row in results.newest("ms_per_token") if row["shape"]["model"] == shape], Path(output) / "decode.png")
    return results.rows
