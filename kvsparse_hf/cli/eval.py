"""`kvsparse eval`: what caches cost in quality, side by side."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from .arguments import Chat, Device, Dtype


def evaluate(
    task: Annotated[
        str,
        Argument(help="gsm8k, kv, lines, longbench, longgen, multiturn, passkey, ppl, recall or ruler."),
    ] = "recall",
    model: Annotated[
        str | None,
        Option(
            "--model",
            "-m",
            help="Folder or Hub name of a causal language model. Default, for the task recall: the recall model of this package.",
        ),
    ] = None,
    preset: Annotated[
        list[str] | None,
        Option(
            "--preset",
            "-p",
            help="Preset or YAML file; options after a colon replace its own (snapkv-512:budget=256). Repeatable; the full "
            "cache is always first.",
        ),
    ] = None,
    limit: Annotated[int | None, Option(min=1, help="Examples at most, of each part of the task.")] = None,
    batch_size: Annotated[int, Option("--batch-size", "-b", min=1, help="Examples generated together.")] = 8,
    max_new_tokens: Annotated[int | None, Option(min=1, help="Tokens of an answer. Default: the task's own.")] = None,
    data: Annotated[Path | None, Option(help="Local file or folder instead of the Hub.")] = None,
    task_option: Annotated[
        list[str] | None,
        Option("--task-option", "-t", help="key=value, an option of the task (see `kvsparse tasks`); repeatable."),
    ] = None,
    chat: Chat = None,
    fast: Annotated[
        bool | None, Option("--fast/--no-fast", help="Decode with fast_decode. Default: on a CUDA device.")
    ] = None,
    seed: Annotated[int, Option(help="Of generated examples.")] = 0,
    device: Device = "auto",
    dtype: Dtype = "auto",
    tensor_parallel: Annotated[
        bool,
        Option("--tensor-parallel", help="Under torchrun: divide the model among the processes, not the examples."),
    ] = False,
    output: Annotated[Path, Option("--output", "-o", help="Folder for eval.jsonl, figures and the answers.")] = Path(
        "eval-results"
    ),
) -> None:
    """Score presets on a task, next to the full cache, and show what each held. An interrupted run goes on where it was."""
    from ..eval.command import Request, run

    run(
        Request(
            task=task,
            model=model,
            presets=tuple(preset or ()),
            limit=limit,
            batch_size=batch_size,
            max_new_tokens=max_new_tokens,
            data=data,
            task_options=tuple(task_option or ()),
            chat=chat,
            fast=fast,
            seed=seed,
            device=device,
            dtype=dtype,
            tensor_parallel=tensor_parallel,
            output=output,
        )
    )
