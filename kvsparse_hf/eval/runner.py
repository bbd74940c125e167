"""A run: one task, one contender. Resumable, and shared between processes."""

import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ..bench.timing import environment
from ..errors import KVSparseError
from ..hf import compat
from .contenders import Contender
from .engine import Engine
from .jsonl import JsonLines
from .parallel import World
from .tasks import Answer, Example, Task

_VERSIONS = ("torch", "transformers")


@dataclass(frozen=True)
class Run:
    """What a run is made of.

    Attributes:
        facts: everything that its answers depend on; they name its folder. "ranks" is among them where the model is divided
            among processes.
        folder: where its answers are kept, one JSON line per finished example.
    """

    contender: Contender
    facts: dict[str, Any]
    folder: Path

    @classmethod
    def plan(cls, task: Task, contender: Contender, engine: Engine, model_name: str, seed: int, output: Path) -> "Run":
        versions, ranks = environment()["versions"], compat.processes_of(engine.model).size
        facts = {
            "task": task.name,
            "options": task.options.model_dump(mode="json"),
            "cache": contender.content(engine.model),
            "model": model_name,
            "weights": fingerprint(engine.model),
            "dtype": str(engine.model.dtype).removeprefix("torch."),
            "device": engine.device.type,
            "chat": engine.chat,
            "fast": engine.fast,
            "seed": seed,
            **({"ranks": ranks} if ranks > 1 else {}),
            "versions": {**{name: versions.get(name) for name in _VERSIONS}, "kvsparse_hf": own_version()},
        }
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:10]
        label = re.sub(r"[^\w.=-]+", "-", contender.label).strip("-")[-60:]
        return cls(contender, facts, output / "runs" / f"{task.name}-{label}-{digest}")

    @property
    def key(self) -> str:
        return self.folder.name


def own_version() -> str:
    from .. import __version__

    return __version__


def fingerprint(model: PreTrainedModel) -> str:
    """A hash of the first values of every parameter: another checkpoint under the same name is another model. Of a model that is
    divided among processes, that of the first, which holds the first rows and columns."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(name.encode())
        first = compat.local_part(parameter.detach()).flatten()[:4]
        digest.update(first.to("cpu", torch.float32).numpy().tobytes())
    return compat.processes_of(model).first(digest.hexdigest()[:16])


def perform(
    run: Run,
    task: Task,
    engine: Engine,
    examples: list[Example],
    batch_size: int,
    world: World,
    advance: Callable[[int], None] = lambda count: None,
) -> list[dict[str, Any]]:
    """Asks what is not answered yet, and returns the records of all examples, in their order.

    Args:
        advance: told how many answers were found or came in.

    Raises:
        KVSparseError: answers of other processes are missing.
    """
    marks = {example.id: example.mark() for example in examples}
    if world.is_main:
        run.folder.mkdir(parents=True, exist_ok=True)
        (run.folder / "facts.json").write_text(json.dumps(run.facts, indent=2, default=str) + "\n", encoding="utf-8")
        for file in _files(run.folder):
            JsonLines(file).read()  # repairs what an interruption left
    world.wait()
    done = _known(run.folder, marks)
    world.wait()  # nobody writes before everybody has read
    advance(len(done))
    open_ = [example for example in examples if example.id not in done]
    world.agree((example.id for example in open_), "what is answered; all must see one output folder")
    file = JsonLines(run.folder / f"answers-{world.rank}.jsonl")
    for batch in itertools.islice(_batches(open_, engine, batch_size), world.worker, None, world.workers):
        answers = task.ask(engine, batch, lambda: run.contender.make(engine.model))
        for example, answer in zip(batch, answers, strict=True) if world.writes else ():
            file.append(record(task, example, answer))
        advance(len(batch) * world.workers)
    world.wait()
    if not world.is_main:
        return []
    done = _known(run.folder, marks)
    missing = len(examples) - len(done)
    if missing:
        raise KVSparseError(
            f"{missing} answers are missing in {run.folder}; all processes must share one output folder."
        )
    return [done[example.id] for example in examples]


def record(task: Task, example: Example, answer: Answer) -> dict[str, Any]:
    """What is kept of an answer."""
    return {
        "id": example.id,
        "mark": example.mark(),
        "subset": example.subset,
        "group": example.group,
        "answers": answer.texts,
        "expected": example.references,
        "scores": task.score(example, answer),
        "prompt_tokens": answer.prompt_tokens,
        "new_tokens": answer.new_tokens,
        "bytes": answer.bytes,
    }


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("answers-*.jsonl"))


def _known(folder: Path, marks: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Kept records of these very questions, by id."""
    rows = (row for file in _files(folder) for row in JsonLines(file).read(repair=False))
    return {row["id"]: row for row in rows if marks.get(row["id"]) == row["mark"]}


def _batches(examples: list[Example], engine: Engine, size: int) -> Iterator[list[Example]]:
    """Batches of examples that are generated alike, the longest prompts first: what does not fit shows at once."""

    def kind(example: Example) -> tuple:
        return example.max_new_tokens, example.stop, example.end_text

    ordered = sorted(examples, key=lambda example: (kind(example), -engine.length(example)))
    for _, alike in itertools.groupby(ordered, key=kind):
        alike = list(alike)
        for at in range(0, len(alike), size):
            yield alike[at : at + size]
