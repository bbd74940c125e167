"""What a task is: examples, how they are asked, and how an answer is scored."""

import hashlib
import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel, ConfigDict
from transformers import PreTrainedTokenizerBase

from ...errors import KVSparseError, suggest
from ...options import parse_options

if TYPE_CHECKING:
    from ...cache import SparseCache
    from ..engine import Engine


class TaskOptions(BaseModel):
    """Options of a task: its `-t key=value` on the command line."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def as_tuple(value: Any) -> tuple:
    """An option that takes several values, as the command line gives them: "a,b", a list, or one value."""
    if isinstance(value, str):
        return tuple(value.split(","))
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


def check_known(names: tuple, known: Collection[str], kind: str) -> tuple:
    """The names themselves.

    Raises:
        KVSparseError: one is not among `known`; with the nearest that is.
    """
    for name in names:
        if name not in known:
            raise KVSparseError(f"unknown {kind} {name!r}.{suggest(str(name), known)}")
    return names


@dataclass(frozen=True)
class Example:
    """One thing to ask.

    Attributes:
        id: unique within the task.
        prompt: the user's message (or the whole prompt where `chat` is false).
        references: what a right answer is made of; the task knows how to read it.
        max_new_tokens: of each answer.
        subset: the part of the task that it belongs to; scores are averaged per part first.
        group: further marks, such as {"length": 4096, "depth": 0.5}.
        chat: whether the chat template is used where there is one.
        answer_begins: text that the answer is made to begin with.
        stop: strings that end the answer; they are cut off.
        end_text: a text whose last token ends the answer, except as its first token.
        turns: `(question, answer_begins)` of later turns of the conversation.
        ids: token ids instead of a prompt.
    """

    id: str
    prompt: str
    references: Any
    max_new_tokens: int
    subset: str = ""
    group: dict[str, Any] = field(default_factory=dict)
    chat: bool = True
    answer_begins: str = ""
    stop: tuple[str, ...] = ()
    end_text: str = ""
    turns: tuple[tuple[str, str], ...] = ()
    ids: tuple[int, ...] = ()

    def mark(self) -> str:
        """A hash of what is asked: an answer kept from an earlier run counts only for the same question."""
        asked = [
            self.prompt,
            self.references,
            self.max_new_tokens,
            self.chat,
            self.answer_begins,
            self.stop,
            self.end_text,
        ]
        text = json.dumps([*asked, self.turns, self.ids], ensure_ascii=False, default=list)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Setting:
    """What a task needs to make its examples.

    Attributes:
        tokenizer: of the model.
        positions: tokens that the model was made for.
        limit: examples at most (of each part, where a task has parts); None: all. A smaller limit gives the first ones of a
            larger.
        seed: of generated examples.
        data: a local file or folder instead of the Hub.
        max_new_tokens: replaces the task's own number.
    """

    tokenizer: PreTrainedTokenizerBase
    positions: int
    limit: int | None = None
    seed: int = 0
    data: Path | None = None
    max_new_tokens: int | None = None

    def new_tokens(self, default: int) -> int:
        return self.max_new_tokens or default

    def count(self, default: int) -> int:
        return default if self.limit is None else min(self.limit, default)

    def no_data(self, task: str) -> None:
        """Refuses --data for a task that makes its own."""
        if self.data is not None:
            raise KVSparseError(f"{task} makes its own examples and reads no --data.")


@dataclass(frozen=True)
class Answer:
    """What came back for one example.

    Attributes:
        texts: one a turn.
        prompt_tokens, new_tokens: read and generated.
        bytes: held by the cache at the end, this example's part of the batch: "held" (on the device, without the reserve),
            "host", "dense" (what a dense cache of the same tokens holds); and "read" by the next decode step.
        values: figures that are no text, such as a loss.
    """

    texts: list[str]
    prompt_tokens: int
    new_tokens: int
    bytes: dict[str, float]
    values: dict[str, float] = field(default_factory=dict)


class Task:
    """Base of all tasks.

    Attributes:
        name: on the command line.
        primary: the metric that stands in the row and the plot.
        unit: of all metrics; a share is shown in percent.
        needs_template: whether the task was written for a chat template, so that its absence is worth a word.
        has_model: whether the recall model of this package can answer, so that no model need be named.
    """

    name: ClassVar[str]
    primary: ClassVar[str]
    unit: ClassVar[str] = "%"
    needs_template: ClassVar[bool] = True
    has_model: ClassVar[bool] = False
    Options: ClassVar[type[TaskOptions]] = TaskOptions

    def __init__(self, options: dict[str, Any]):
        self.options = parse_options(self.Options, f"task {self.name}", options)

    def examples(self, setting: Setting) -> list[Example]:
        """All examples, in an order whose beginning is a fair sample."""
        raise TypeError(f"{type(self).__name__} is abstract; choose one of kvsparse_hf.eval.list_tasks().")

    def score(self, example: Example, answer: Answer) -> dict[str, float]:
        """Metrics of one answer, the primary one among them; shares from 0 to 1."""
        raise TypeError(f"{type(self).__name__} is abstract; choose one of kvsparse_hf.eval.list_tasks().")

    def ask(
        self, engine: "Engine", examples: Sequence[Example], make_cache: Callable[[], "SparseCache"]
    ) -> list[Answer]:
        """Answers to a batch of examples, with one fresh cache."""
        return engine.answer(examples, make_cache())
