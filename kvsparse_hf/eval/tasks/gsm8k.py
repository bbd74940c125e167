"""GSM8K: grade-school arithmetic in words (arXiv 2110.14168)."""

from typing import Literal

from pydantic import Field

from ...errors import KVSparseError
from ..data import find_file, load_hub, read_rows
from ..metrics.gsm8k import INVALID, extract_flexible, flexible_extract, is_invalid, strict_match, without_calculations
from .base import Answer, Example, Setting, Task, TaskOptions

_FIELDS = {"question": str, "answer": str}
_HUB = ("openai/gsm8k", "main")
_STOP = ("Question:", "</s>", "<|im_end|>")  # lm-eval's `until`
INSTRUCTION = "Think step by step. Write the final answer as a single number on the last line."


class GSM8KOptions(TaskOptions):
    """Options of the task."""

    shots: int = Field(
        0,
        ge=0,
        le=64,
        description="worked examples; they show the #### N that strict_match needs; 8 is usual for base models",
    )
    instruction: str = Field(INSTRUCTION, description="what stands after a zero-shot question; may be empty")
    split: Literal["test", "train"] = Field("test", description="the questions that are asked")


class GSM8KTask(Task):
    """Zero-shot through the chat template, or few-shot as plain text ("Question: …\\nAnswer: …", as lm-eval's `gsm8k`).

    Few-shot examples are the first rows of the training split, without their `<<…>>` marks. With `--data` they come from
    `train.jsonl` in the folder. Scored by `score_answer`.
    """

    name = "gsm8k"
    primary = "flexible_extract"
    Options = GSM8KOptions

    def examples(self, setting: Setting) -> list[Example]:
        rows = load_split(setting, self.options.split)
        shots = self._shots(setting)
        made = []
        for index, row in enumerate(rows[: setting.count(len(rows))]):
            if self.options.shots:
                text = f"{shots}Question: {row['question']}\nAnswer:"
            else:
                text = "\n\n".join(filter(None, (row["question"], self.options.instruction)))
            made.append(
                Example(
                    id=str(index),
                    prompt=text,
                    references=row["answer"].rpartition("#### ")[2].strip(),
                    max_new_tokens=setting.new_tokens(400),
                    chat=not self.options.shots,
                    stop=_STOP,
                )
            )
        return made

    def _shots(self, setting: Setting) -> str:
        count = self.options.shots
        if not count:
            return ""
        if self.options.split == "train":
            raise KVSparseError("few-shot examples come from the training split; ask questions of the test split.")
        if setting.data is not None and not setting.data.is_dir():
            raise KVSparseError(
                f"{count} shots come from the training split: give --data a folder with test.jsonl and train.jsonl, not a file."
            )
        rows = load_split(setting, "train")[:count]
        if len(rows) < count:
            raise KVSparseError(f"the training split has {len(rows)} rows, {count} shots are asked for.")
        return "".join(
            f"Question: {row['question']}\nAnswer: {without_calculations(row['answer'])}\n\n" for row in rows
        )

    def score(self, example: Example, answer: Answer) -> dict[str, float]:
        return score_answer(answer.texts[0], example.references, few_shot=self.options.shots > 0)


def score_answer(text: str, reference: str, few_shot: bool = False) -> dict[str, float]:
    """lm-eval's `flexible_extract` and `strict_match` of one answer, and `invalid`; 0 or 1 each.

    The strict rule wants "#### N", which few-shot examples show and the zero-shot instruction does not ask for. So an answer
    is invalid if that rule finds no number in it (few-shot, as in lm-eval), or if the flexible one finds none (zero-shot).
    """
    no_number = is_invalid(text) if few_shot else float(extract_flexible(text) == INVALID)
    return {
        "flexible_extract": flexible_extract(text, reference),
        "strict_match": strict_match(text, reference),
        "invalid": no_number,
    }


def load_split(setting: Setting, split: str) -> list[dict]:
    """Questions and answers of one split; every answer ends in "#### N"."""
    if setting.data is None:
        return load_hub(*_HUB, split, _FIELDS)
    return read_rows(find_file(setting.data, f"{split}.jsonl"), _FIELDS)
