"""`kvsparse demo`: runs the passkey task and shows what each cache held and found.

Where SmolLM2 cannot be had, the recall model of this package is asked for facts instead.
"""

from pathlib import Path
from typing import Annotated

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from typer import Option

from ..demo import METHODS, Outcome, find_model, make_fact_trials, make_trials, run_demo
from ..demo.model import name_of
from ..demo.passkey import ANSWER_BEGINS
from ..errors import KVSparseError
from ..recall.model import FOLDER, NAME
from ..registry import get_method
from ..report import CacheReport
from .loading import choose_device, choose_dtype, load_model, parse_value, tokenize


def demo(
    model: Annotated[
        str | None,
        Option(
            "--model",
            "-m",
            help="Folder or Hub name of a chat model. Default: SmolLM2-135M-Instruct; the recall model where it cannot be had.",
        ),
    ] = None,
    budget: Annotated[
        str, Option(help="Of the two sparse caches: entries per KV head, a share (0.2) or a size (8MiB).")
    ] = "256",
    depths: Annotated[int, Option(min=1, max=50, help="Depths at which the passkey is hidden, evenly spaced.")] = 5,
    seed: Annotated[int, Option(help="Of the passkeys and the order of the text.")] = 0,
    device: Annotated[str, Option(help="auto, cpu, cuda, cuda:1, ...")] = "auto",
    dtype: Annotated[str, Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    save: Annotated[Path | None, Option(help="Folder to whose demo.jsonl the figures are appended.")] = None,
) -> None:
    """Hide a passkey in a long text and ask for it, with the full cache, SnapKV and StreamingLLM."""
    console = Console(highlight=False)
    where = choose_device(device)
    kind = choose_dtype(dtype, where)
    options = {"budget": parse_value(budget)}
    source = model or _find(console)
    facts = source == FOLDER
    loaded, tokenizer = load_model(source, where, kind)

    def make_cache(method: str):
        return get_method(method)(loaded, **({} if method == "full" else options))

    for method in METHODS:
        make_cache(method)  # a bad budget is refused before anything runs
    trials = make_fact_trials(depths, seed) if facts else make_trials(tokenizer, depths, seed)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("asking", total=len(trials) * len(METHODS))
        outcomes = run_demo(
            loaded,
            tokenizer,
            trials,
            make_cache,
            encode=lambda prompt: tokenize(tokenizer, prompt, None, "" if facts else ANSWER_BEGINS).to(where),
            advance=lambda: progress.advance(task),
        )
    name = model or (NAME if facts else name_of(source))
    _show(
        console,
        outcomes,
        "fact" if facts else "passkey",
        f"{name}, {_hardware(where)}, {str(kind).removeprefix('torch.')}, budget {budget}",
    )
    if save is not None:
        _save(save, outcomes, name, where, options["budget"])


def _find(console: Console) -> Path:
    try:
        return find_model(lambda message: console.print(message, style="dim"))
    except KVSparseError as error:
        console.print(
            f"{error} Asking the recall model of this package for facts instead.", style="dim", soft_wrap=True
        )
        return FOLDER


def _hardware(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type}, {torch.get_num_threads()} threads"


def _held(report: CacheReport) -> int:
    return report.device_bytes - report.reserve_bytes


def _show(console: Console, outcomes: list[Outcome], hidden: str, setting: str) -> None:
    trials = len(outcomes[0].answers)
    seen = outcomes[0].mean(lambda report: report.seen[0])
    table = Table(title=f"A {hidden} in {seen:,.0f} tokens\n{setting}")
    table.add_column("cache")
    for header in ("kept", "held", "of dense", "reserve", "found", "tokens/s"):
        table.add_column(header, justify="right")
    for outcome in outcomes:
        table.add_row(
            outcome.method,
            f"{outcome.mean(lambda report: report.kept):,.0f}",
            f"{outcome.mean(_held) / 2**20:.1f} MiB",
            f"{outcome.mean(lambda report: report.share):.1%}",
            f"{outcome.mean(lambda report: report.reserve_bytes) / 2**20:.1f} MiB",
            f"{outcome.found}/{trials}",
            f"{outcome.tokens_per_s:.1f}",
        )
    console.print(table)
    console.print(
        "kept: tokens per KV head after the prompt; held: bytes of their keys, values and positions; reserve: bytes "
        "allocated ahead for decoded tokens, not in held; tokens/s: decode alone.",
        style="dim",
    )
    for outcome in outcomes:
        if outcome.missed_depths:
            missed = ", ".join(f"{depth:.0%}" for depth in outcome.missed_depths)
            console.print(f"{outcome.method} missed it at a depth of {missed}.")


def _save(folder: Path, outcomes: list[Outcome], model: str, device: torch.device, budget) -> None:
    from ..bench.timing import Results

    results = Results(folder, "demo")
    for outcome in outcomes:
        trials = len(outcome.answers)
        shape = {
            "model": model,
            "batch": 1,
            "context": round(outcome.mean(lambda report: report.seen[0])),
            "budget": None if outcome.method == "full" else budget,
            "hardware": _hardware(device),
        }
        for metric, value, unit in (
            ("found", outcome.found, "of n"),
            ("kept", round(outcome.mean(lambda report: report.kept), 2), "entries per KV head"),
            ("held_bytes", round(outcome.mean(_held)), "B"),
            ("dense_bytes", round(outcome.mean(lambda report: report.dense_bytes)), "B"),
            ("reserve_bytes", round(outcome.mean(lambda report: report.reserve_bytes)), "B"),
            ("decode", round(outcome.tokens_per_s, 2), "tokens/s"),
        ):
            results.add(outcome.method, metric, value, unit, shape, trials)
