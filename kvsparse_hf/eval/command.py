"""What `kvsparse eval` does."""

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ..cli.loading import choose_device, choose_dtype, load_model, parse_options
from ..errors import KVSparseError
from ..recall.model import FOLDER as RECALL_FOLDER
from ..recall.model import NAME as RECALL_NAME
from .contenders import parse_contenders
from .engine import Engine
from .parallel import World
from .results import Outcome, draw_if_possible, save_row, show
from .runner import Run, perform
from .summary import summarise
from .tasks import Example, Setting, Task, get_task


@dataclass(frozen=True)
class Request:
    """The command's arguments (see `kvsparse eval --help`)."""

    task: str = "recall"
    model: str | None = None
    presets: tuple[str, ...] = ()
    limit: int | None = None
    batch_size: int = 8
    max_new_tokens: int | None = None
    data: Path | None = None
    task_options: tuple[str, ...] = ()
    chat: bool | None = None
    fast: bool | None = None
    seed: int = 0
    device: str = "auto"
    dtype: str = "auto"
    tensor_parallel: bool = False
    output: Path = Path("eval-results")


def run(request: Request, console: Console | None = None) -> list[Outcome]:
    """Runs a task with every preset. In several processes (`accelerate launch`) each takes its share of the batches, or, with
    `tensor_parallel` (`torchrun`), its share of the model; the first one merges, prints and writes.

    Args:
        console: where progress and the table are shown; `Console(quiet=True)` shows nothing.

    Returns:
        One `(run, summary)` a preset, the full cache first; in other processes than the first, nothing.

    Raises:
        KVSparseError: a bad argument, bad data, or a model that cannot be served; before anything runs.
    """
    world = World.current(request.device, request.tensor_parallel)
    console = (console or Console(highlight=False)) if world.is_main else Console(quiet=True)
    task = get_task(request.task, **parse_options(list(request.task_options)))
    contenders = parse_contenders(list(request.presets))
    if request.data is not None and not request.data.exists():
        raise KVSparseError(f"--data {request.data}: no such file or folder.")
    own = world.device if request.device in ("auto", "cuda") else None
    where = own or choose_device(request.device)
    name, source = _find_model(request.model, task)
    loaded, tokenizer = load_model(source, where, choose_dtype(request.dtype, where), request.tensor_parallel)
    fast = where.type == "cuda" if request.fast is None else request.fast
    engine = Engine(loaded, tokenizer, request.chat, fast)
    setting = Setting(tokenizer, engine.positions, request.limit, request.seed, request.data, request.max_new_tokens)
    examples = task.examples(setting)
    world.agree((example.mark() for example in examples), "the examples; give all the same data")
    runs = [Run.plan(task, contender, engine, name, request.seed, request.output) for contender in contenders]
    world.agree((run.key for run in runs), "the versions of what they run, or in a preset")
    _warn(console, task, engine, examples, world)
    outcomes: list[Outcome] = []
    baseline = None
    with _progress(console) as bar:
        for planned in runs:
            advance = bar(planned.contender.label, len(examples))
            records = perform(planned, task, engine, examples, request.batch_size, world, advance)
            if world.is_main:
                outcomes.append((planned, summarise(records, task.primary, task.unit, baseline)))
                baseline = baseline or records
                save_row(request.output, task, *outcomes[-1], request.batch_size)
    if world.is_main:
        show(console, task, outcomes)
        console.print(
            f"rows: {request.output / 'eval.jsonl'}; answers: {request.output / 'runs'}", style="dim", soft_wrap=True
        )
        draw_if_possible(console, request.output, task, outcomes)
    world.close()
    return outcomes


def _find_model(model: str | None, task: Task) -> tuple[str, str | Path]:
    """What the model is called, and where it is; without a name it is the recall model."""
    if model is not None:
        return (Path(model).resolve().name if Path(model).is_dir() else model), model
    if not task.has_model:
        raise KVSparseError(
            f"the task {task.name} needs --model, a folder or Hub name: the recall model, which answers without it, knows the "
            "words of the task recall alone."
        )
    return RECALL_NAME, RECALL_FOLDER


def _warn(console: Console, task: Task, engine: Engine, examples: list[Example], world: World) -> None:
    """Says what makes a score, or a run, less than it seems."""
    if world.note():
        console.print(f"note: {world.note()}", style="yellow", soft_wrap=True)
    if task.needs_template and not engine.tokenizer.chat_template and any(example.chat for example in examples):
        console.print(
            "note: the tokenizer has no chat template, so prompts are given as plain text; a model that was trained on one "
            "may answer worse.",
            style="yellow",
            soft_wrap=True,
        )
    longest = max(examples, key=lambda example: len(example.prompt) + len(example.ids))
    needed = engine.length(longest) + longest.max_new_tokens
    if needed > engine.positions:
        console.print(
            f"note: the longest prompt and its answer have {needed:,} tokens, the model has {engine.positions:,} positions.",
            style="yellow",
            soft_wrap=True,
        )


@contextmanager
def _progress(console: Console) -> Iterator[Callable[[str, int], Callable[[int], None]]]:
    """A bar for each run: `bar(label, total)` gives the function that moves it on."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    # In a notebook a bar is a widget; without the package every bar would be a warning.
    no_widgets = console.is_jupyter and importlib.util.find_spec("ipywidgets") is None
    with Progress(*columns, console=console, disable=console.quiet or no_widgets) as progress:

        def bar(label: str, total: int) -> Callable[[int], None]:
            line = progress.add_task(escape(label), total=total)

            def advance(count: int) -> None:
                progress.update(line, advance=min(count, total - progress.tasks[line].completed))

            return advance

        yield bar
