"""`kvsparse calibrate`: one command per method that has something to calibrate."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ..errors import KVSparseError

app = typer.Typer(help="Make a method's own file for one model, from text.", no_args_is_help=True)


@app.callback()
def _main() -> None:
    """Make a method's own file for one model, from text."""


@app.command()
def loki(
    model: Annotated[str, typer.Argument(help="folder or Hub name of the model")],
    text: Annotated[list[Path], typer.Argument(help="text files to read keys from", exists=True, dir_okay=False)],
    output: Annotated[Path, typer.Option("--output", "-o", help="file to write")] = Path("loki-basis.safetensors"),
    length: Annotated[int, typer.Option(min=16, help="tokens that are read at a time")] = 4096,
    tokens: Annotated[int, typer.Option(min=16, help="tokens in all")] = 131072,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, …")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16")] = "auto",
) -> None:
    """Principal components of the keys, for LokiCache(basis=FILE)."""
    from ..cli.loading import choose_device, choose_dtype, load_model
    from .loki import calibrate_loki

    chosen = choose_device(device)
    loaded, tokenizer = load_model(model, chosen, choose_dtype(dtype, chosen))
    with typer.progressbar(length=tokens, label="tokens") as bar:
        windows = text_windows(tokenizer, text, length)
        meta = calibrate_loki(loaded, windows, output, tokens, lambda seen: bar.update(seen - bar.pos))
    typer.echo(
        f"{output}: {meta['tokens']} tokens; a quarter of the components holds {meta['variance_in_quarter']:.1%} of the variance."
    )


_Model = Annotated[str, typer.Argument(help="folder or Hub name of the model")]
_Text = Annotated[list[Path], typer.Argument(help="text files", exists=True, dir_okay=False)]
_Device = Annotated[str, typer.Option(help="auto, cpu, cuda, …")]
_Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16")]


@app.command()
def headkv(
    model: _Model,
    text: _Text,
    output: Annotated[Path, typer.Option("--output", "-o", help="file to write")] = Path("headkv-table.safetensors"),
    samples: Annotated[int, typer.Option(min=1, help="needles to hide, at depths spread over the text")] = 32,
    length: Annotated[int, typer.Option(min=64, help="tokens of a sample")] = 1024,
    needle: Annotated[int, typer.Option(min=2, help="tokens of a needle")] = 24,
    score: Annotated[str, typer.Option(help="mass: attention on the needle (HeadKV-R2); copy: how often it is the top one")] = "mass",
    device: _Device = "auto",
    dtype: _Dtype = "auto",
) -> None:
    """How much each head takes part in copying a needle, for HeadKVCache(table=FILE). An interrupted run goes on."""
    from .headkv import calibrate_headkv

    if score not in ("mass", "copy"):
        raise typer.BadParameter("is mass or copy.", param_hint="--score")
    loaded, tokenizer = _load(model, device, dtype)
    ids = torch.cat(list(text_windows(tokenizer, text, length)))
    with _progress("needles") as advance:
        plan = calibrate_headkv(loaded, ids, output, samples, length, needle, score=score, progress=advance)
    typer.echo(f"{output}: the model copied {plan.facts['copied']:.0%} of the needles' tokens.")


@app.command()
def duo(
    model: _Model,
    text: _Text,
    output: Annotated[Path, typer.Option("--output", "-o", help="file to write")] = Path("duo-pattern.safetensors"),
    windows: Annotated[int, typer.Option(min=1, help="stretches of text to read")] = 50,
    length: Annotated[int, typer.Option(min=16, help="tokens of a stretch")] = 1024,
    device: _Device = "auto",
    dtype: _Dtype = "auto",
) -> None:
    """How far back each head looks, for DuoAttentionCache(pattern=FILE): estimated, not trained. An interrupted run goes on."""
    from .duo import calibrate_duo

    loaded, tokenizer = _load(model, device, dtype)
    stretches = _whole_windows(tokenizer, text, length, windows)
    with _progress("stretches") as advance:
        plan = calibrate_duo(loaded, stretches, output, progress=advance)
    low, high = float(plan.tensors["pattern"].min()), float(plan.tensors["pattern"].max())
    typer.echo(f"{output}: {len(stretches)} stretches of {length} tokens; heads look back {low:.2f} to {high:.2f} (of 1).")


@app.command()
def moa(
    model: _Model,
    text: _Text,
    output: Annotated[Path, typer.Option("--output", "-o", help="file to write")] = Path("moa-rules.safetensors"),
    length: Annotated[list[int] | None, typer.Option(help="length to profile at; repeatable. Default: 2048, 4096, 8192")] = None,
    samples: Annotated[int, typer.Option(min=1, help="texts of each length")] = 8,
    density: Annotated[float, typer.Option(help="largest share of the text inside the spans")] = 0.5,
    device: _Device = "auto",
    dtype: _Dtype = "auto",
) -> None:
    """Span rules of a given density that harm the loss least, for MoACache(rules=FILE). Needs scipy. An interrupted run goes on."""
    from .moa import calibrate_moa

    loaded, tokenizer = _load(model, device, dtype)
    texts = {n: _whole_windows(tokenizer, text, n, samples) for n in sorted(length or (2048, 4096, 8192))}
    with _progress("texts") as advance:
        plan = calibrate_moa(loaded, texts, output, density, progress=advance)
    reached = ", ".join(f"{share:.3f} at {n}" for n, share in plan.facts["reached"].items())
    typer.echo(f"{output}: {plan.facts['masked']:.1%} of the influence is masked; density {reached}.")


@app.command()
def kvsharer(
    model: _Model,
    text: _Text,
    output: Annotated[Path, typer.Option("--output", "-o", help="file to write")] = Path("kvsharer-plan.safetensors"),
    shared: Annotated[float, typer.Option(min=0.0, help="layers to give up, or (below 1) their share of all")] = 0.25,
    windows: Annotated[int, typer.Option(min=1, help="stretches of text to read")] = 30,
    length: Annotated[int, typer.Option(min=2, help="tokens of a stretch")] = 64,
    cosine: Annotated[float, typer.Option(help="a pair must keep the last hidden states' cosine above this")] = 0.5,
    divergence: Annotated[float | None, typer.Option(help="and the logits' KL up to this, in nats per token. Default: not asked")] = None,
    order: Annotated[str, typer.Option(help="pairs to try first: dissimilar (as published), similar or random")] = "dissimilar",
    seed: Annotated[int, typer.Option(help="of the random order")] = 0,
    device: _Device = "auto",
    dtype: _Dtype = "auto",
) -> None:
    """Which layers can read another's keys and values, for KVSharerCache(plan=FILE). An interrupted run goes on."""
    from .kvsharer import calibrate_kvsharer

    if order not in ("dissimilar", "similar", "random"):
        raise typer.BadParameter("is dissimilar, similar or random.", param_hint="--order")
    loaded, tokenizer = _load(model, device, dtype)
    stretches = _whole_windows(tokenizer, text, length, windows)
    wanted = shared if shared < 1 else int(shared)
    with _progress("layers") as advance:
        plan = calibrate_kvsharer(loaded, stretches, output, wanted, cosine, divergence, order, seed, progress=advance)
    pairs = ", ".join(f"{reader} reads {source}" for reader, source in plan.tensors["pairs"].tolist())
    typer.echo(f"{output}: {pairs or 'no pair'}; cosine {plan.facts['cosine_reached'][-1:]}, KL {plan.facts['divergence_reached'][-1:]}.")


def _load(model: str, device: str, dtype: str):
    from ..cli.loading import choose_device, choose_dtype, load_model

    chosen = choose_device(device)
    return load_model(model, chosen, choose_dtype(dtype, chosen))


@contextmanager
def _progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar that is told how many of how many are done."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def _whole_windows(tokenizer, files: list[Path], length: int, count: int) -> list[torch.Tensor]:
    """The first `count` windows of full length."""
    windows = [window for window in text_windows(tokenizer, files, length) if len(window) == length][:count]
    if not windows:
        raise KVSparseError(f"the text has no stretch of {length} tokens.")
    return windows


def text_windows(tokenizer, files: list[Path], length: int):
    """The files' tokens, `length` at a time; a rest of a file is a window of its own."""
    for file in files:
        ids = torch.tensor(tokenizer(file.read_text(encoding="utf-8"), add_special_tokens=False).input_ids, dtype=torch.long)
        yield from ids.split(length)
