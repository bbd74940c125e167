"""Benchmark of the kernels: each is checked against the fp32 reference in the same run, then timed cold.

Suite ``kernels``, cases ``<op>/<mode>/<backend>``, metrics ``us`` and ``TB_per_s`` (bytes it must move, once each).
"""

from __future__ import annotations

import contextlib
import functools
import pathlib
from collections.abc import Callable, Iterator

import torch

from .. import ops
from .kernel_cases import Case, decode_cases, linear_cases, prompt_cases, store_cases
from .selection_cases import selection_cases
from .timing import Results, cold_copies, time_graph

ERROR_LIMIT = 1e-2  # relative, in norm: bf16 operands and outputs, fp32 sums


def _label(shape: dict) -> str:
    return " ".join(f"{name}={shape[name]}" for name in ("batch", "context", "pages", "tokens") if name in shape)


def _run_backend(case: Case, name: str, results: Results, log: Callable[[str], None]) -> None:
    function, label = case.backends[name], f"{case.name}/{name}"
    try:
        copies = [case.make() for _ in range(cold_copies(case.footprint))]
        error = case.check(copies[0], function(copies[0]))
        if not error <= ERROR_LIMIT:
            raise AssertionError(f"{label} {case.shape}: relative error {error:.3g} against the reference")
        timing = time_graph([functools.partial(function, inputs) for inputs in copies])
    except (RuntimeError, ops.BackendError) as problem:  # what cannot run here is said and left out
        log(f"{label:36s} {_label(case.shape):28s} not run: {str(problem).splitlines()[0][:80]}")
        return
    results.add_timing(label, timing, case.nbytes, case.shape)
    speed = f"{timing.bandwidth(case.nbytes):5.2f} TB/s" if case.nbytes else " " * 10
    log(f"{label:36s} {_label(case.shape):28s} {timing.us:10.2f} us  {speed}  error {error:.1e}")


@contextlib.contextmanager
def _progress(total: int) -> Iterator[tuple[Callable[[str], None], Callable[[], None]]]:
    """A function that prints a line above the progress bar and one that advances it; just print without rich."""
    try:
        from rich.progress import Progress
    except ImportError:
        yield functools.partial(print, flush=True), lambda: None
        return
    with Progress() as progress:
        task = progress.add_task("kernels", total=total)
        yield (functools.partial(progress.console.print, highlight=False, soft_wrap=True),
               lambda: progress.advance(task))


def _plot(rows: list[dict], path: pathlib.Path) -> None:
    """Bandwidth of dense decode attention by backend, where matplotlib is installed."""
    dense = [r for r in rows if r["metric"] == "TB_per_s" and r["case"].startswith("decode_attention/dense/")]
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    if not dense:
        return
    where = {(r["case"].rsplit("/", 1)[1], r["shape"]["batch"], r["shape"]["context"]): r["value"] for r in dense}
    names = list(dict.fromkeys(name for name, *_ in where))
    shapes = list(dict.fromkeys((batch, context) for _, batch, context in where))
    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(names)
    for i, name in enumerate(names):
        left = [x + (i - (len(names) - 1) / 2) * width for x in range(len(shapes))]
        axes.bar(left, [where.get((name, *shape), 0) for shape in shapes], width, label=name)
    axes.set_xticks(range(len(shapes)), [f"{context // 1024}K\nB={batch}" for batch, context in shapes])
    axes.set_ylabel("TB/s")
    axes.set_title(f"Decode attention, {dense[0]['gpu']}: 32 query and 8 KV heads of 128, bf16, L2-cold")
    axes.legend()
    figure.savefig(path, dpi=130)


def run(output: str | pathlib.Path = "examples/results", quick: bool = False, only: str = "") -> list[dict]:
    """Check and time the kernels; append rows to ``<output>/kernels.jsonl`` and draw ``kernels.png`` beside it.

    Args:
        quick: the first shape of each case only.
        only: run only the cases whose name contains this.

    Returns:
        The rows of this run.

    Raises:
        BackendError: there is no CUDA device.
        AssertionError: a kernel disagrees with its reference.
    """
    if not torch.cuda.is_available():
        raise ops.BackendError("the kernel benchmark needs a CUDA device")
    every = (*decode_cases(), *selection_cases(), *prompt_cases(), *store_cases(), *linear_cases())
    cases = [case for case in every if only in case.name]
    if quick:
        cases = list({case.name: case for case in reversed(cases)}.values())[::-1]
    results = Results(output, "kernels")
    with torch.no_grad(), _progress(len(cases)) as (log, advance):
        for case in cases:
            torch.manual_seed(0)
            for name in case.backends:
                _run_backend(case, name, results, log)
                torch.cuda.empty_cache()
            advance()
    _plot(results.rows, pathlib.Path(output) / "kernels.png")
    return results.rows
