"""Line retrieval (LongEval, LMSYS 2023): the number that stands in one of many lines."""

import random

from pydantic import Field

from ..data import find_file, read_rows
from ..metrics import get_metric
from .base import Answer, Example, Setting, Task, TaskOptions
from .words import number, pairs, spread

_PROMPT = (
    "Below is a register. Each line has a name and a number.\n\n{lines}\n\n"
    "What is the number in the line {name}? Reply with the number alone."
)
_EXAMPLES = 100


class LinesOptions(TaskOptions):
    """Options of the task."""

    lines: int = Field(200, ge=1, le=100_000, description="lines in a prompt (about 20 tokens each)")


class LinesTask(Task):
    """A right answer's first number is the line's. Generated, or from LongEval's files (`prompt`, `expected_number`).

    LongEval itself takes the answer's last number, which a model that goes on talking spoils.
    """

    name = "lines"
    primary = "accuracy"
    Options = LinesOptions

    def examples(self, setting: Setting) -> list[Example]:
        new_tokens = setting.new_tokens(24)
        if setting.data is not None:
            rows = read_rows(find_file(setting.data, "lines.jsonl"), {"prompt": str, "expected_number": (int, str)})
            return [
                Example(
                    str(index),
                    row["prompt"],
                    str(row["expected_number"]),
                    new_tokens,
                    answer_begins="The number is <",
                    stop=("\n",),
                )
                for index, row in enumerate(rows[: setting.count(len(rows))])
            ]
        return [self._make(setting.seed, index, new_tokens) for index in range(setting.count(_EXAMPLES))]

    def _make(self, seed: int, index: int, new_tokens: int) -> Example:
        rng = random.Random(f"{seed}/lines/{index}")
        names = pairs(rng, self.options.lines)
        numbers = [number(rng, 5) for _ in names]
        depth = spread(index)
        at = int(depth * len(names))
        text = "\n".join(f"line {name}: the number is <{value}>" for name, value in zip(names, numbers, strict=True))
        return Example(
            id=str(index),
            prompt=_PROMPT.format(lines=text, name=names[at]),
            references=numbers[at],
            max_new_tokens=new_tokens,
            group={"depth": round(depth, 3)},
            answer_begins=f"line {names[at]}: the number is <",
            stop=(">", "\n"),
        )

    def score(self, example: Example, answer: Answer) -> dict[str, float]:
        return {"accuracy": get_metric("number_match")(answer.texts[0], example.references)}
