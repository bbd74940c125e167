"""Many GSM8K questions answered in one go (LongGenBench, arXiv 2410.04199): thousands of tokens are decoded, each answer
from a question far back, while a bounded cache evicts."""

import re

from pydantic import Field

from ..data import find_file, read_rows
from ..metrics.gsm8k import INVALID, extract_flexible, normalize_number
from .base import Answer, Example, Setting, Task, TaskOptions
from .gsm8k import load_split

_INSTRUCTION = (
    "Answer all of the following questions, one after another. Begin each answer with Answer_1:, Answer_2: and so on, reason "
    "briefly, and end it with: The answer is N.\n\n"
)
_TOKENS_PER_QUESTION = 136  # 4,080 tokens for 30 questions; LongGenBench allows about 4,096


class LongGenOptions(TaskOptions):
    """Options of the task."""

    questions: int = Field(30, ge=1, description="questions in a prompt (where the data are GSM8K's own)")


class LongGenTask(Task):
    """`accuracy` is the share of all questions answered right; `answered` the share that got a number at all.

    Data: GSM8K's test split, `questions` at a time, or LongGenBench's files (`prompt`, `questions`, `answers`).
    """

    name = "longgen"
    primary = "accuracy"
    Options = LongGenOptions

    def examples(self, setting: Setting) -> list[Example]:
        if setting.data is not None:
            file = find_file(setting.data, "test.jsonl", "gsm8k_30.jsonl")
            rows = read_rows(file, {})
            if "questions" in rows[0]:
                rows = read_rows(file, {"prompt": str, "questions": list, "answers": list})
                return [
                    self._published(setting, index, row) for index, row in enumerate(rows[: setting.count(len(rows))])
                ]
        rows = load_split(setting, "test")
        size = min(self.options.questions, len(rows))
        starts = range(0, len(rows) - size + 1, size)
        return [
            self._make(setting, index, rows[at : at + size])
            for index, at in enumerate(starts[: setting.count(len(starts))])
        ]

    def _make(self, setting: Setting, index: int, rows: list[dict]) -> Example:
        text = "\n\n".join(f"Question_{place}:\n{row['question']}" for place, row in enumerate(rows, start=1))
        return self._example(setting, index, _INSTRUCTION + text, [row["answer"] for row in rows], 1)

    def _published(self, setting: Setting, index: int, row: dict) -> Example:
        last = max(
            (int(found) for found in re.findall(r"Question_(\d+):", row["prompt"])), default=len(row["answers"])
        )
        return self._example(setting, index, row["prompt"], row["answers"], last - len(row["answers"]) + 1)

    def _example(self, setting: Setting, index: int, prompt: str, answers: list[str], first: int) -> Example:
        return Example(
            id=str(index),
            prompt=prompt,
            references=[answer.rpartition("#### ")[2].strip() for answer in answers],
            max_new_tokens=setting.new_tokens(_TOKENS_PER_QUESTION * len(answers)),
            group={"first": first},
            answer_begins=f"Answer_{first}:",
        )

    def score(self, example: Example, answer: Answer) -> dict[str, float]:
        found = split_answers(example.answer_begins + answer.texts[0])
        first = example.group["first"]
        given = [found.get(first + place, INVALID) for place in range(len(example.references))]
        right = [
            normalize_number(number) == normalize_number(gold)
            for number, gold in zip(given, example.references, strict=True)
        ]
        return {
            "accuracy": sum(right) / len(right),
            "answered": sum(number != INVALID for number in given) / len(given),
        }


def split_answers(text: str) -> dict[int, str]:
    """The number of each "Answer_i:", as the last number after "answer is", else the last one at all. A later one counts."""
    parts = re.split(r"Answer[_ ](\d+):", text)
    found = {}
    for label, body in zip(parts[1::2], parts[2::2], strict=True):
        body = body.partition("Question_")[0]
        stated = re.findall(r"answer is:? *\**(-?[$0-9.,]*\d)", body)
        found[int(label)] = stated[-1] if stated else extract_flexible(body)
    return found
