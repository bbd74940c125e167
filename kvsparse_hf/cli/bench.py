"""`kvsparse bench`: measurements, appended to JSON lines with the hardware and versions they were taken on."""

from pathlib import Path
from typing import Annotated

import typer

from ..errors import KVSparseError
from .arguments import Options

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
    case_limit: Annotated[float, typer.Option(help="Seconds after which a case is left unmeasured; 0: never.")] = 0,
    spread: Annotated[float, typer.Option(help="How many times longer the last head's random keys are than the first's.")] = 1.0,
    gpus: Annotated[int, typer.Option(min=1, help="Divide the model among so many GPUs of this host (suite multi_gpu).")] = 1,
    option: Options = None,
) -> None:
    """Check and time whole decode steps on CUDA devices, next to Transformers' own caches."""
    from ..bench import decode as benchmark
    from .loading import parse_options

    cases = [benchmark.Case.parse(text) for text in case] if case else benchmark.GRID
    if gpus > 1:
        from ..bench import parallel

        if option or spread != 1.0 or limit != 1e9:
            raise KVSparseError("--gpus takes neither --option nor --spread nor --limit.")
        parallel.run(cases, gpus, shape, output, case_limit)
        return
    benchmark.run(cases, shape, output, limit, case_limit, spread, parse_options(option or []))


@app.command()
def prefill(
    system: Annotated[list[str] | None, typer.Option(help="A method, or transformers-dynamic; repeat it.")] = None,
    context: Annotated[list[int] | None, typer.Option(help="Prompt length; repeat it.")] = None,
    shape: Annotated[str, typer.Option(help="Shape of the random model.")] = "llama-3.1-8b",
    budget: Annotated[int, typer.Option(help="Entries per key/value head.")] = 2048,
    output: Annotated[Path, typer.Option(help="Folder for prefill.jsonl.")] = Path("examples/results"),
    repeats: Annotated[int, typer.Option(help="Measured runs, after one that warms up.")] = 3,
) -> None:
    """Time and peak memory of reading a prompt on a CUDA device."""
    from ..bench import prefill as benchmark

    systems = system or ["transformers-dynamic", "full", "snapkv", "h2o"]
    benchmark.run(systems, context or [32768], shape, budget, output, repeats)


@app.command()
def trace(
    model: Annotated[str, typer.Option(help="Folder or Hub name of a real model.")],
    text: Annotated[list[Path], typer.Option(help="Text file, one row of the trace; repeat it.")],
    output: Annotated[Path, typer.Option(help="File for the trace.")] = Path("trace.safetensors"),
    context: Annotated[int, typer.Option(help="Tokens of the prompt, whole pages.")] = 4096,
    steps: Annotated[int, typer.Option(help="Tokens that are then read one by one.")] = 256,
    budget: Annotated[int, typer.Option(help="Entries that a step reads per key/value head.")] = 256,
    page_size: Annotated[int, typer.Option(help="Tokens of a page.")] = 16,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, …")] = "auto",
) -> None:
    """Record which pages a real model selects while it reads texts; `bench offload` plays them back."""
    import torch

    from ..bench import traces
    from .loading import choose_device, choose_dtype, load_model

    where = choose_device(device)
    loaded, tokenizer = load_model(model, where, choose_dtype("auto", where))
    rows = [tokenizer(path.read_text(encoding="utf-8"), return_tensors="pt").input_ids[0, : context + steps] for path in text]
    if min(map(len, rows)) < context + steps:
        raise KVSparseError(f"a text has only {min(map(len, rows))} tokens, {context + steps} are needed.")
    recorded = traces.record(loaded, torch.stack(rows).to(where), context, budget, page_size)
    recorded.save(output)
    typer.echo(f"{output}: {recorded.steps} steps of {len(rows)} texts, {tuple(recorded.pages.shape)} page numbers")


@app.command()
def offload(
    trace: Annotated[Path, typer.Option(help="What `kvsparse bench trace` recorded.")],
    hbm: Annotated[str | None, typer.Option(help="Cap on device memory for every system, such as 24GiB.")] = None,
    host: Annotated[str | None, typer.Option(help="Cap on host memory, such as 96GiB.")] = None,
    system: Annotated[list[str] | None, typer.Option(help="dense, quest, hisparse, …; repeat it. Default: all.")] = None,
    batch: Annotated[list[int] | None, typer.Option(help="Rows; repeat it. Default: doubling until it does not fit.")] = None,
    shape: Annotated[str, typer.Option(help="Shape of the random model.")] = "llama-3.1-8b",
    context: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 32768,
    budget: Annotated[int, typer.Option(help="Entries that a step reads per key/value head.")] = 2048,
    output: Annotated[Path, typer.Option(help="Folder for offload.jsonl and offload.png.")] = Path("examples/results"),
    repeats: Annotated[int, typer.Option(help="Of each measurement.")] = 3,
) -> None:
    """Dense, selection on the device and HiSparse under one cap on device memory, batch by batch."""
    from ..bench import offload as benchmark
    from ..bench.traces import Trace
    from ..layers.host import parse_bytes

    recorded = Trace.load(trace)
    limits = {"hbm": parse_bytes(hbm, "hbm"), "host_bytes": parse_bytes(host, "host")}
    setting = benchmark.Setting(context=context, budget=budget, page_size=recorded.page_size, repeats=repeats, **limits)
    extra = {"batches": batch} if batch else {}
    benchmark.run(recorded, setting, shape, system or benchmark.SYSTEMS, output=output, **extra)


@app.command()
def soak(
    preset: Annotated[
        list[str] | None, typer.Option("--preset", "-p", help="NAME or NAME:key=value,…; repeat it. Default: six methods.")
    ] = None,
    steps: Annotated[int, typer.Option(min=4, help="Decoded tokens of one generate().")] = 10_000,
    calls: Annotated[int, typer.Option(min=4, help="Short generate() calls.")] = 500,
    seconds: Annotated[float, typer.Option(help="Time for everything; phases that do not fit end early.")] = 1e9,
    shape: Annotated[str, typer.Option(help="Shape of the random model.")] = "llama-4-layers",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, …")] = "auto",
    output: Annotated[Path, typer.Option(help="Folder for soak.jsonl.")] = Path("examples/results"),
) -> None:
    """Check that memory stays flat over many steps and many calls; fails when it grows."""
    from ..bench import soak as benchmark
    from .loading import choose_device

    plan = benchmark.Plan(steps=steps, calls=calls, seconds=seconds)
    benchmark.run(preset or benchmark.PRESETS, plan, shape, choose_device(device), output)
