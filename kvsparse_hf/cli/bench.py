"""`kvsparse bench`: measurements, appended to JSON lines with the hardware and versions they were taken on."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Measure speed.", no_args_is_help=True)


@app.command()
def kernels(
    output: Annotated[Path, typer.Option(help="Folder for kernels.jsonl and kernels.png.")] = Path("examples/results"),
    quick: Annotated[bool, typer.Option("--quick", help="Only the first shape of each case.")] = False,
    only: Annotated[str, typer.Option(help="Only the cases whose name contains this.")] = "",
) -> None:
    """Check and time the kernels on a CUDA device, next to PyTorch's own attention."""
    from ..bench import kernels as benchmark

    benchmark.run(output, quick=quick, only=only)


@app.command()
def decode(
    case: Annotated[
        list[str] | None,
        typer.Option(help="system/how:batch:context[:budget]; repeat it. Default: the published grid."),
    ] = None,
    shape: Annotated[str, typer.Option(help="Shape of the random model.")] = "llama-3.1-8b",
    output: Annotated[Path, typer.Option(help="Folder for decode.jsonl and decode.png.")] = Path("examples/results"),
    limit: Annotated[float, typer.Option(help="Seconds after which no further case is started.")] = 1e9,
) -> None:
    """Check and time whole decode steps on a CUDA device, next to Transformers' own caches."""
    from ..bench import decode as benchmark

    cases = [benchmark.Case.parse(text) for text in case] if case else benchmark.GRID
    benchmark.run(cases, shape, output, limit)


@app.command()
def prefill(
    system: Annotated[list[str] | None, typer.Option(help="A method, or transformers-dynamic; repeat it.")] = None,
    context: Annotated[list[int] | None, typer.Option(help="Prompt length; repeat it.")] = None,
    shape: Annotated[str, typer.Option(help="Shape of the random model.")] = "llama-3.1-8b",
    budget: Annotated[int, typer.Option(help="Entries per key/value head.")] = 2048,
    output: Annotated[Path, typer.Option(help="Folder for prefill.jsonl.")] = Path("examples/results"),
) -> None:
    """Time and peak memory of reading a prompt on a CUDA device."""
    from ..bench import prefill as benchmark

    systems = system or ["transformers-dynamic", "full", "snapkv", "h2o"]
    benchmark.run(systems, context or [32768], shape, budget, output)
