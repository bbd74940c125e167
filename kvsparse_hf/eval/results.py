"""Rows, tables and figures of finished runs."""

import importlib.metadata
import re
import shlex
import sys
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..bench.timing import environment
from ..errors import KVSparseError
from .extras import need
from .jsonl import JsonLines
from .runner import Run, own_version
from .summary import Mean, Summary
from .tasks import Task

Outcome = tuple[Run, Summary]


def save_row(output: Path, task: Task, run: Run, summary: Summary, batch_size: int) -> None:
    """Appends the run's row to `eval.jsonl`; a run that added nothing to its last row appends nothing."""
    file = JsonLines(output / "eval.jsonl")
    row = make_row(task, run, summary, batch_size)
    same = ("run", "value", "n", "se", "scores")
    if not any(all(old.get(key) == row[key] for key in same) for old in file.read()):
        file.append(row)


def make_row(task: Task, run: Run, summary: Summary, batch_size: int) -> dict[str, Any]:
    """One run as a JSON object: the primary metric as value, and beside it all metrics, parts and bytes."""
    facts, main = run.facts, summary.scores[task.primary]
    around = environment()
    return {
        "suite": "eval",
        "case": run.contender.label,
        "metric": f"{task.name}/{task.primary}",
        "value": _rounded(main.value),
        "unit": task.unit,
        "n": main.n,
        "se": _rounded(main.se),
        "minus_full": None if summary.difference is None else _plain(summary.difference),
        "scores": {name: _plain(mean) for name, mean in summary.scores.items()},
        "subsets": {
            part: {name: _plain(mean) for name, mean in found.items()} for part, found in summary.subsets.items()
        },
        "cells": [[length, depth, _rounded(value)] for (length, depth), value in sorted(summary.cells.items())],
        "bytes": {name: round(value) for name, value in summary.bytes.items()},
        "shape": {
            "model": facts["model"],
            "batch": batch_size,
            "context": round(summary.prompt_tokens),
            "new_tokens": round(summary.new_tokens),
            "budget": facts["cache"].get("budget"),
            "ranks": facts.get("ranks", 1),
            **{name: facts[name] for name in ("cache", "options", "dtype", "device", "chat", "fast", "seed")},
        },
        "gpu": around["gpu"],
        "versions": {**around["versions"], **_own_versions()},
        "commit": around["commit"],
        "command": shlex.join(["kvsparse", *sys.argv[1:]]),
        "date": around["date"],
        "run": run.key,
    }


def _own_versions() -> dict[str, str]:
    versions = {"kvsparse_hf": own_version()}
    for name in ("datasets", "rapidfuzz", "rouge"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _plain(mean: Mean) -> dict[str, Any]:
    return {"value": _rounded(mean.value), "se": _rounded(mean.se), "n": mean.n}


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def show(console: Console, task: Task, outcomes: list[Outcome]) -> None:
    """The summary table, and one row per part where the task has parts."""
    facts, first = outcomes[0][0].facts, outcomes[0][1]
    where = f"{facts['model']}, {facts['device']}, {facts['dtype']}"
    where += f", divided among {facts['ranks']} ranks" if "ranks" in facts else ""
    n = first.scores[task.primary].n
    title = (
        f"{task.name}: {n} example{'s' if n != 1 else ''} of {first.prompt_tokens:,.0f} tokens, scores in {task.unit}"
    )
    title = f"{title}\n{escape(where)}"
    labels = [escape(run.contender.label) for run, _ in outcomes]
    table = _scores(task, outcomes, title, labels)
    wanted = console.measure(table, options=console.options.update_width(10_000)).maximum
    if wanted > console.width:  # long labels would be folded letter by letter
        numbers = [str(number) for number, _ in enumerate(labels, start=1)]
        for number, label in zip(numbers, labels, strict=True):
            console.print(f"{number:>3}  {label}", soft_wrap=True)
        labels, table = numbers, _scores(task, outcomes, title, numbers)
    console.print(table)
    if first.subsets:
        console.print(_parts(task, outcomes, labels))
    if task.unit == "%" and first.scores[task.primary].value == 0:
        console.print(
            "note: the full cache scores 0, so the others cannot lose anything: take another model or an easier task.",
            style="yellow",
        )
    console.print(
        "held: bytes of the cache per example when its answer is complete, without the reserve for further tokens, host memory "
        "included; read: of it by the next token; minus full: paired by example; ±: standard error of the mean over examples.",
        style="dim",
    )


def _scores(task: Task, outcomes: list[Outcome], title: str, labels: list[str]) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD)
    table.add_column("cache", no_wrap=True)
    names = [task.primary, *(name for name in outcomes[0][1].scores if name != task.primary)]
    for header in ("held\nMiB", "of\ndense", "read\nMiB", names[0], "minus\nfull", *names[1:]):
        table.add_column(header.replace("_", "\n"), justify="right", no_wrap=True)
    for label, (_, summary) in zip(labels, outcomes, strict=True):
        held = summary.bytes["held"] + summary.bytes["host"]
        scores = [_with_error(summary.scores[name], task.unit) for name in names]
        scores.insert(1, "–" if summary.difference is None else _with_error(summary.difference, task.unit, "+"))
        sizes = (f"{size / 2**20:.1f}" for size in (held, summary.bytes["read"]))
        table.add_row(label, next(sizes), f"{summary.share:.1%}", next(sizes), *scores)
    return table


def _parts(task: Task, outcomes: list[Outcome], labels: list[str]) -> Table:
    table = Table(title=f"{task.primary} by part ({task.unit})", box=box.SIMPLE_HEAD)
    table.add_column("part")
    for label in labels:
        table.add_column(label, justify="right", overflow="fold")
    for part in outcomes[0][1].subsets:
        table.add_row(part, *(_with_error(summary.subsets[part][task.primary], task.unit) for _, summary in outcomes))
    return table


def _with_error(mean: Mean, unit: str, sign: str = "") -> str:
    digits = 1 if unit == "%" else 3
    error = "" if mean.se is None else f" ± {mean.se:.{digits}f}"
    return f"{mean.value:{sign}.{digits}f}{error}"


def draw(output: Path, task: Task, outcomes: list[Outcome]) -> list[Path]:
    """Score against bytes held, and a heat map per cache where the task has a grid. Needs matplotlib.

    Raises:
        KVSparseError: matplotlib is not installed.
    """
    need("matplotlib", "the plot of an evaluation")
    from matplotlib.figure import Figure  # no window, no global state

    model = re.sub(r"[^\w.-]+", "-", outcomes[0][0].facts["model"])
    output.mkdir(parents=True, exist_ok=True)
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    _scatter(figure.subplots(), task, outcomes)
    paths = [output / f"{task.name}-{model}.png"]
    figure.savefig(paths[0], dpi=150)
    if outcomes[0][1].cells:
        figure = Figure(figsize=(4.2 * len(outcomes), 3.6), layout="constrained")
        _heat_maps(figure, task, outcomes)
        paths.append(output / f"{task.name}-{model}-grid.png")
        figure.savefig(paths[1], dpi=150)
    return paths


def _scatter(axes, task: Task, outcomes: list[Outcome]) -> None:
    for run, summary in outcomes:
        mean = summary.scores[task.primary]
        held = (summary.bytes["held"] + summary.bytes["host"]) / 2**20
        axes.errorbar(held, mean.value, yerr=mean.se, fmt="o", capsize=3, label=run.contender.label)
    full = outcomes[0][1].scores[task.primary]
    axes.axhline(full.value, color="0.6", linestyle="--", linewidth=1, zorder=0)
    axes.set_xlim(left=0)
    if task.unit == "%":
        axes.set_ylim(bottom=-0.04 * axes.get_ylim()[1])  # a score of 0 is a whole dot too
    axes.set_xlabel("bytes held per example (MiB)")
    axes.set_ylabel(f"{task.primary} ({task.unit})")
    axes.set_title(f"{task.name}, {outcomes[0][0].facts['model']}, n = {full.n}", fontsize=10)
    axes.legend(fontsize=8)


def _heat_maps(figure, task: Task, outcomes: list[Outcome]) -> None:
    lengths = sorted({length for length, _ in outcomes[0][1].cells})
    depths = sorted({depth for _, depth in outcomes[0][1].cells})
    panels = figure.subplots(1, len(outcomes), squeeze=False, sharey=True)[0]
    for axes, (run, summary) in zip(panels, outcomes, strict=True):
        grid = [[summary.cells.get((length, depth), float("nan")) for length in lengths] for depth in depths]
        image = axes.imshow(grid, vmin=0, vmax=100, cmap="RdYlGn", aspect="auto")
        axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
        axes.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
        axes.set_xlabel("tokens")
        axes.set_title(run.contender.label, fontsize=9)
        for row, values in enumerate(grid):
            for column, value in enumerate(values):
                color = "black" if 20 < value < 90 else "white"
                axes.text(column, row, f"{value:.0f}", ha="center", va="center", fontsize=8, color=color)
    panels[0].set_ylabel("depth of the needle")
    figure.colorbar(image, ax=list(panels), label=f"{task.primary} ({task.unit})")


def draw_if_possible(console: Console, output: Path, task: Task, outcomes: list[Outcome]) -> None:
    """`draw`, or one line that says why there is no figure."""
    try:
        for path in draw(output, task, outcomes):
            console.print(f"figure: {path}", style="dim", soft_wrap=True)
    except KVSparseError as error:
        console.print(f"no figure: {error}", style="dim", markup=False, soft_wrap=True)
