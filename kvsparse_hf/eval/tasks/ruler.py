"""Needles, chains and counts in texts of a given length, after RULER (arXiv 2404.06654).

The generators are this library's own: same kinds of tasks and the same numbers of needles, hops and words as RULER's
`synthetic.yaml`, other sentences, and the haystack of `kvsparse demo` (or a text file), so scores compare with each other and
not with published ones. RULER's own files (`input`, `outputs`) are read with `--data`.
"""

import itertools
import math
import random
import string
from collections.abc import Callable, Iterator
from typing import Any

from pydantic import Field, field_validator

from ...errors import KVSparseError
from ..data import read_rows, read_text
from ..metrics import get_metric
from .base import Answer, Example, Setting, Task, TaskOptions, as_tuple, check_known
from .words import endless, haystack, largest_fit, made_up, number, pairs, vocabulary

_TEMPLATE_TOKENS = 64  # left free for the chat template
_NEEDLE = "One of the access numbers of {key} is {value}."
_REMEMBER = "Some access numbers are hidden in the following text. Remember them; I will ask for them afterwards."
_HOPS, _COMMON, _FREQUENT = 4, 10, 3
_REPEATS, _RARE_REPEATS, _ALPHA = 30, 3, 2.0


class RulerOptions(TaskOptions):
    """Options of the task."""

    tasks: tuple[str, ...] = Field(
        (),
        description="sub-tasks; default: niah_single, niah_multikey, niah_multivalue, niah_multiquery, vt, cwe and fwe",
    )
    lengths: tuple[int, ...] = Field((4096,), min_length=1, description="tokens of prompt and answer together")
    depths: tuple[float, ...] = Field(
        (0.0, 0.25, 0.5, 0.75, 1.0), min_length=1, description="places of the first needle"
    )
    samples: int = Field(4, ge=1, description="examples of each sub-task, length and depth")

    @field_validator("tasks", "lengths", "depths", mode="before")
    @classmethod
    def _lists(cls, value: Any) -> Any:
        return as_tuple(value)

    @field_validator("tasks")
    @classmethod
    def _known(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return check_known(value, _MAKERS, "ruler sub-task")

    @field_validator("depths")
    @classmethod
    def _share(cls, value: tuple[float, ...]) -> tuple[float, ...]:
        if any(not 0 <= depth <= 1 for depth in value):
            raise KVSparseError(f"depths={value}: each must be between 0 and 1.")
        return value


class RulerTask(Task):
    """Share of the expected strings that occur in the answer. `--limit` counts examples of each cell of the grid."""

    name = "ruler"
    primary = "match"
    Options = RulerOptions

    def examples(self, setting: Setting) -> list[Example]:
        if setting.data is not None and setting.data.suffix == ".jsonl":
            return self._published(setting)
        lines = haystack()
        if setting.data is not None:
            lines = tuple(line.strip() for line in read_text(setting.data).splitlines() if line.strip())
            if not lines:
                raise KVSparseError(f"--data {setting.data} is empty.")
        return [
            self._make(setting, lines, name, length, depth, sample)
            for sample in range(setting.count(self.options.samples))
            for name in self.options.tasks or _MAKERS
            for length in self.options.lengths
            for depth in (self.options.depths if name.startswith("niah") else (None,))
        ]

    def _published(self, setting: Setting) -> list[Example]:
        rows = read_rows(setting.data, {"input": str, "outputs": list})
        name = setting.data.name.partition(".")[0]
        return [
            Example(f"{name}/{index}", row["input"], row["outputs"], setting.new_tokens(128), subset=name)
            for index, row in enumerate(rows[: setting.count(len(rows))])
        ]

    def _make(
        self, setting: Setting, lines: tuple[str, ...], name: str, length: int, depth: float | None, sample: int
    ) -> Example:
        maker, default = _MAKERS[name]
        new_tokens = setting.new_tokens(default)
        rng = random.Random(f"{setting.seed}/{name}/{length}/{depth}/{sample}")
        filler = list(itertools.islice(endless(rng, lines), length))
        render, most, references, begins = maker(rng, filler, 0.0 if depth is None else depth)
        room = length - new_tokens - _TEMPLATE_TOKENS
        group: dict[str, Any] = {"length": length} if depth is None else {"length": length, "depth": depth}
        return Example(
            id=f"{name}/{length}/{depth}/{sample}",
            prompt=largest_fit(setting.tokenizer, render, room, 1, most, f"ruler's {name}"),
            references=references,
            max_new_tokens=new_tokens,
            subset=name,
            group=group,
            answer_begins=begins,
        )

    def score(self, example: Example, answer: Answer) -> dict[str, float]:
        metric = "match_part" if example.subset.startswith("qa") else "match_all"
        return {"match": get_metric(metric)(answer.texts[0], example.references)}


# A maker gives: the prompt with n units of filler, the most units, the expected strings, and how the answer begins.
_Made = tuple[Callable[[int], str], int, list[str], str]


def _needles(keys: int, values: int, asked: int) -> Callable[[random.Random, list[str], float], _Made]:
    """`keys` keys with `values` numbers each, of which `asked` keys are asked for. The first needle stands at the depth."""

    def make(rng: random.Random, filler: list[str], depth: float) -> _Made:
        facts = {key: [number(rng, 7) for _ in range(values)] for key in pairs(rng, keys)}
        wanted = list(facts)[:asked]
        needles = [_NEEDLE.format(key=key, value=value) for key, given in facts.items() for value in given]
        places = [depth, *(rng.random() for _ in needles[1:])]
        which = wanted[0] if asked == 1 else f"{', '.join(wanted[:-1])} and {wanted[-1]}"
        what = "is the access number" if values == asked == 1 else "are all the access numbers"
        begins = "The access number of" if values == asked == 1 else "The access numbers of"

        def render(taken: int) -> str:
            text = _scatter(filler[:taken], needles, places)
            return f"{_REMEMBER}\n\n{text}\n\nWhat {what} of {which}?"

        verb = "is" if values == asked == 1 else "are"
        return render, len(filler), [value for key in wanted for value in facts[key]], f"{begins} {which} {verb}"

    return make


def _scatter(filler: list[str], needles: list[str], places: list[float]) -> str:
    """The needles between the lines, each at its share of the lines."""
    text = list(filler)
    order = sorted(range(len(needles)), key=lambda index: (-places[index], -index))
    for index in order:
        text.insert(round(places[index] * len(filler)), needles[index])
    return "\n".join(text)


def _variable_tracking(rng: random.Random, filler: list[str], depth: float) -> _Made:
    """A value handed on through a chain of variables; all of them are asked for."""
    names = ["".join(rng.choices(string.ascii_uppercase, k=5)) for _ in range(_HOPS + 1)]
    value = number(rng, 5)
    needles = [f"VAR {names[0]} = {value}", *(f"VAR {new} = VAR {old}" for old, new in itertools.pairwise(names))]
    places = sorted(rng.random() for _ in needles)

    def render(taken: int) -> str:
        text = _scatter(filler[:taken], needles, places)
        return (
            f"Follow the assignments of variables that are hidden in the following text.\n\n{text}\n\n"
            f"Which {len(names)} variables have the value {value}, directly or through other variables?"
        )

    return render, len(filler), names, f"The {len(names)} variables that have the value {value} are"


def _common_words(rng: random.Random, filler: list[str], depth: float) -> _Made:
    """A numbered list in which ten words stand thirty times each and all others three times."""
    known = vocabulary()
    words = [*rng.sample(known, len(known)), *made_up(rng, max(0, len(filler) - len(known)))]
    common, rare = words[:_COMMON], words[_COMMON:]
    seed = rng.random()

    def render(taken: int) -> str:
        listed = common * _REPEATS + rare[:taken] * _RARE_REPEATS
        random.Random(seed).shuffle(listed)
        text = " ".join(f"{place}. {word}" for place, word in enumerate(listed, start=1))
        return (
            f"Below is a numbered list of words. Some occur more often than others.\n\n{text}\n\n"
            f"What are the {_COMMON} most common words in the list?"
        )

    return render, len(rare), common, f"The {_COMMON} most common words in the list are:"


def _frequent_words(rng: random.Random, filler: list[str], depth: float) -> _Made:
    """Made-up words whose frequency falls with the square of their rank; the three most frequent are asked for."""
    words = made_up(rng, 100)
    weights = [rank**-_ALPHA for rank in range(1, len(words) + 1)]
    seed = rng.random()

    def render(taken: int) -> str:
        total = 10 * taken
        counts = [math.ceil(total * weight / sum(weights)) for weight in weights]
        listed = [word for word, times in zip(words, counts, strict=True) for _ in range(times)]
        random.Random(seed).shuffle(listed)
        return f"Below is a text in code.\n\n{' '.join(listed)}\n\nWhat are the {_FREQUENT} words that occur most often in it?"

    return render, len(filler), words[:_FREQUENT], f"The {_FREQUENT} words that occur most often are:"


def _makers() -> Iterator[tuple[str, tuple[Callable, int]]]:
    """Name, maker and new tokens of each sub-task."""
    yield "niah_single", (_needles(1, 1, 1), 128)
    yield "niah_multikey", (_needles(4, 1, 1), 128)
    yield "niah_multivalue", (_needles(1, 4, 1), 128)
    yield "niah_multiquery", (_needles(4, 1, 4), 128)
    yield "vt", (_variable_tracking, 30)
    yield "cwe", (_common_words, 120)
    yield "fwe", (_frequent_words, 50)


_MAKERS = dict(_makers())
