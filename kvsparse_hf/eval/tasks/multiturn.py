"""Several questions about one text, asked one after another with the cache kept (the setting of SCBench, arXiv 2412.10319).

A method that keeps what the first question needs has thrown away what the later ones ask for. `first` and `later` are the
shares of right answers to the first question and to the others: a cache that is not prefix-safe shows its loss between them.
"""

import itertools
import random
from collections.abc import Callable, Sequence

from pydantic import Field

from ..metrics import get_metric
from .base import Answer, Example, Setting, Task, TaskOptions
from .words import endless, haystack, largest_fit, number, spread, vocabulary

_INTRODUCTION = "Read the text and remember the locker number of each person. I will ask for several of them."
_FACT = "The locker number of {name} is {number}. Remember: {name} has locker {number}."
_QUESTION = "What is the locker number of {name}?"
_BEGINS = "The locker number of {name} is"
_EXAMPLES = 20


class MultiTurnOptions(TaskOptions):
    """Options of the task."""

    questions: int = Field(4, ge=2, le=50, description="questions about one text")
    length: int = Field(1500, ge=100, description="tokens of the text")


class MultiTurnTask(Task):
    """Conversations run one at a time whatever the batch size: rows that end at different steps cannot go on together."""

    name = "multiturn"
    primary = "accuracy"
    Options = MultiTurnOptions

    def examples(self, setting: Setting) -> list[Example]:
        setting.no_data(self.name)
        return [self._make(setting, index) for index in range(setting.count(_EXAMPLES))]

    def _make(self, setting: Setting, index: int) -> Example:
        rng = random.Random(f"{setting.seed}/multiturn/{index}")
        count = self.options.questions
        names = [name.capitalize() for name in rng.sample(vocabulary(), count)]
        facts = {name: number(rng, 5) for name in names}
        depths = [(spread(index) + place / count) % 1.0 for place in range(count)]
        lines = list(itertools.islice(endless(rng, haystack()), self.options.length))

        def render(taken: int) -> str:
            text = list(lines[:taken])
            for name, depth in sorted(zip(names, depths, strict=True), key=lambda item: -item[1]):
                text.insert(round(depth * taken), _FACT.format(name=name, number=facts[name]))
            return "\n".join((_INTRODUCTION, "", *text))

        text = largest_fit(setting.tokenizer, render, self.options.length, 1, len(lines), "a text with all facts")
        questions = [(_QUESTION.format(name=name), _BEGINS.format(name=name)) for name in names]
        return Example(
            id=str(index),
            prompt=f"{text}\n\n{questions[0][0]}",
            references=[facts[name] for name in names],
            max_new_tokens=setting.new_tokens(16),
            group={"questions": count},
            answer_begins=questions[0][1],
            turns=tuple(questions[1:]),
        )

    def ask(self, engine, examples: Sequence[Example], make_cache: Callable) -> list[Answer]:
        return [engine.converse(example, make_cache()) for example in examples]

    def score(self, example: Example, answer: Answer) -> dict[str, float]:
        right = [
            get_metric("number_match")(text, number)
            for text, number in zip(answer.texts, example.references, strict=True)
        ]
        later = right[1:]
        return {"accuracy": sum(right) / len(right), "first": right[0], "later": sum(later) / len(later)}
