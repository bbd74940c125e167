"""Facts to find and chains of sums to solve, in the words of this package's own recall model, which answers without --model.

A fact is found by a decode step, wherever it stood: what was evicted, or is not read, is not found. Every step of a chain needs
its definition and the result of an earlier step.
"""

from typing import Any

from pydantic import Field, field_validator

from ...errors import KVSparseError
from ...recall.model import LENGTH, STEPS
from ...recall.tasks import STEP, TASKS, Question, make_questions
from .base import Answer, Example, Setting, Task, TaskOptions, as_tuple, check_known

_PARTS = 4  # of a text, for the share of facts found by depth


class RecallOptions(TaskOptions):
    """Options of the task."""

    tasks: tuple[str, ...] = Field(TASKS, min_length=1, description="facts, chains or both")
    lengths: tuple[int, ...] = Field(
        (LENGTH // 2,), min_length=1, description=f"tokens of the texts of facts; at most {LENGTH:,} in training"
    )
    steps: int = Field(STEPS // 4, ge=1, le=400, description=f"steps of a chain; at most {STEPS} in training")
    samples: int = Field(64, ge=1, description="questions of each kind and length")

    @field_validator("tasks", "lengths", mode="before")
    @classmethod
    def _lists(cls, value: Any) -> Any:
        return as_tuple(value)

    @field_validator("tasks")
    @classmethod
    def _known(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return check_known(value, TASKS, "recall sub-task")

    @field_validator("lengths")
    @classmethod
    def _room_for_facts(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if min(value) < 24:
            raise KVSparseError(f"lengths={list(value)}: a text of facts has 24 tokens or more.")
        return value


class RecallTask(Task):
    """`exact` is the share of answers that are right word for word, `words` that of right words in their places.

    The heat map shows texts of facts by length and by the quarter in which the fact stands.
    """

    name = "recall"
    primary = "exact"
    needs_template = False
    has_model = True
    Options = RecallOptions

    def examples(self, setting: Setting) -> list[Example]:
        setting.no_data(self.name)
        made = []
        for name in self.options.tasks:
            for size in self.options.lengths if name == "facts" else (self.options.steps,):
                asked = make_questions(name, self.options.samples, size, setting.seed)
                asked = asked[: setting.count(len(asked))]
                made += [_example(setting, name, size, index, question) for index, question in enumerate(asked)]
        _check_words(setting, made[0].prompt)
        return made

    def score(self, example: Example, answer: Answer) -> dict[str, float]:
        given, wanted = answer.texts[0].split(), example.references.split()
        right = [one == other for one, other in zip(given, wanted, strict=False)]
        return {"exact": float(given == wanted), "words": sum(right) / len(wanted)}


def _example(setting: Setting, name: str, size: int, index: int, question: Question) -> Example:
    group: dict[str, Any] = {"steps": size}
    if question.depth is not None:
        quarter = min(int(question.depth * _PARTS), _PARTS - 1)
        group = {"length": size, "depth": (quarter + 0.5) / _PARTS}
    return Example(
        id=f"{name}/{size}/{index}",
        prompt=question.prompt,
        references=question.answer,
        max_new_tokens=setting.new_tokens(2 if name == "facts" else STEP * size),
        subset=name,
        group=group,
        chat=False,
    )


def _check_words(setting: Setting, prompt: str) -> None:
    """Refuses a tokenizer that does not have one token for each word."""
    words, tokens = len(prompt.split()), setting.tokenizer(prompt).input_ids
    if setting.tokenizer.unk_token_id in tokens or len(tokens) != words + 1:
        raise KVSparseError(
            "the task recall asks in the words of the recall model, which this model's tokenizer does not have; leave --model "
            "out, or give a model that examples/train_recall_model.py has trained."
        )
