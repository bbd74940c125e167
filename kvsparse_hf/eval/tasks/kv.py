"""Exact retrieval of one of many key/value pairs of UUIDs (Lost in the Middle, arXiv 2307.03172)."""

import json
import random

from pydantic import Field

from ...errors import KVSparseError
from ..data import find_file, read_rows
from ..metrics import get_metric
from .base import Answer, Example, Setting, Task, TaskOptions
from .words import make_uuid, spread

_PROMPT = 'Here is a JSON object.\n\n{data}\n\nReply with the value of the key "{key}", and nothing else.'
_BEGINS = 'The value of the key "{key}" is "'
_EXAMPLES = 100


class KVOptions(TaskOptions):
    """Options of the task."""

    pairs: int = Field(75, ge=1, description="pairs in a prompt (50 to 90 tokens each)")


class KVTask(Task):
    """A right answer contains the value. Generated, or from files of the paper (`ordered_kv_records`, `key`, `value`)."""

    name = "kv"
    primary = "accuracy"
    Options = KVOptions

    def examples(self, setting: Setting) -> list[Example]:
        if setting.data is None:
            rows = [self._make(setting.seed, index) for index in range(setting.count(_EXAMPLES))]
        else:
            file = find_file(setting.data, "kv.jsonl")
            rows = read_rows(file, {"ordered_kv_records": list, "key": str, "value": str})
            rows = rows[: setting.count(len(rows))]
        return [self._example(setting, index, row) for index, row in enumerate(rows)]

    def _make(self, seed: int, index: int) -> dict:
        rng = random.Random(f"{seed}/kv/{index}")
        records = [[make_uuid(rng), make_uuid(rng)] for _ in range(self.options.pairs)]
        key, value = records[int(spread(index) * len(records))]
        return {"ordered_kv_records": records, "key": key, "value": value}

    def _example(self, setting: Setting, index: int, row: dict) -> Example:
        records, key = row["ordered_kv_records"], row["key"]
        body = ",\n".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in records)
        at = next((place for place, (name, _) in enumerate(records) if name == key), None)
        if at is None:
            raise KVSparseError(f"row {index + 1} asks for the key {key!r}, which is not among its records.")
        return Example(
            id=str(index),
            prompt=_PROMPT.format(data=f"{{{body}}}", key=key),
            references=row["value"],
            max_new_tokens=setting.new_tokens(48),
            group={"depth": round((at + 0.5) / len(records), 3)},
            answer_begins=_BEGINS.format(key=key),
            stop=('"', "\n"),
        )

    def score(self, example: Example, answer: Answer) -> dict[str, float]:
        return {"accuracy": get_metric("contains")(answer.texts[0], example.references)}
