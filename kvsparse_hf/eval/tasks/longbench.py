"""LongBench (arXiv 2308.14508): its 16 English tasks, with the official prompts, lengths, truncation and metrics."""

import importlib.resources
import json
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from ...errors import KVSparseError, suggest
from ..data import load_hub, read_rows
from ..metrics import longbench
from .base import Answer, Example, Setting, Task, TaskOptions, as_tuple, check_known

_FIELDS = {"input": str, "context": str, "answers": list, "all_classes": (list, type(None))}
# The data set is a zip of JSON lines.
_FILE = "zip://data/{name}.jsonl::hf://datasets/THUDM/LongBench/data.zip"
_WITHOUT_CHAT = ("trec", "triviaqa", "samsum", "lcc", "repobench-p")
_MARGIN = 100  # tokens that the chat template may add


def _prompts() -> dict[str, dict[str, Any]]:
    """Prompt and new tokens of each task (THUDM/LongBench, `LongBench/config`, MIT licence)."""
    text = importlib.resources.files(__package__).joinpath("longbench.json").read_text(encoding="utf-8")
    return json.loads(text)


class LongBenchOptions(TaskOptions):
    """Options of the task."""

    tasks: tuple[str, ...] = Field(
        (), description="such as hotpotqa,qasper; default: all 16, or those that --data holds"
    )
    max_length: int = Field(
        0, ge=0, description="prompt tokens beyond which the middle is left out; 0: what the model has positions for"
    )

    @field_validator("tasks", mode="before")
    @classmethod
    def _known(cls, value: Any) -> Any:
        return check_known(as_tuple(value), longbench.METRICS, "LongBench task")


class LongBenchTask(Task):
    """The score of a task is the mean over its rows, that of the run the mean over the tasks.

    `--data`: a folder with `<task>.jsonl` files, or one such file. `--limit` counts rows of each task. Published scores were
    made with a `max_length` of the model's positions less 500 (31,500 for Mistral-7B-Instruct-v0.2): give it to compare.
    """

    name = "longbench"
    primary = "score"
    Options = LongBenchOptions

    def examples(self, setting: Setting) -> list[Example]:
        prompts = _prompts()
        made = []
        for name, file in self._sources(setting.data):
            if file is not None:
                rows = read_rows(file, _FIELDS)
            else:
                rows = load_hub("json", None, "train", _FIELDS, data_files=_FILE.format(name=name))
            shape = prompts[name]
            for index, row in enumerate(rows[: setting.count(len(rows))]):
                made.append(self._example(setting, name, index, row, shape))
        return made

    def _sources(self, data: Path | None) -> list[tuple[str, Path | None]]:
        """Tasks and their local files."""
        if data is None:
            return [(name, None) for name in self.options.tasks or longbench.METRICS]
        if data.is_file():
            name = self.options.tasks[0] if len(self.options.tasks) == 1 else data.stem
            if name not in longbench.METRICS:
                raise KVSparseError(
                    f"--data {data}: a file must be named after its task, or -t tasks=NAME say which it is."
                    f"{suggest(name, longbench.METRICS)}"
                )
            return [(name, data)]
        if not data.is_dir():
            raise KVSparseError(f"--data {data}: no such file or folder.")
        present = [name for name in longbench.METRICS if (data / f"{name}.jsonl").is_file()]
        missing = [name for name in self.options.tasks if name not in present]
        if missing or not present:
            raise KVSparseError(f"--data {data}: the folder holds no {missing[0] if missing else 'TASK'}.jsonl.")
        return [(name, data / f"{name}.jsonl") for name in self.options.tasks or present]

    def _example(self, setting: Setting, name: str, index: int, row: dict, shape: dict) -> Example:
        new_tokens = setting.new_tokens(shape["max_new_tokens"])
        prompt = shape["prompt"].format(context=row["context"], input=row["input"])
        limit = self.options.max_length or setting.positions - new_tokens - _MARGIN
        return Example(
            id=f"{name}/{index}",
            prompt=without_middle(setting.tokenizer, prompt, limit),
            references=[row["answers"], row["all_classes"] or []],
            max_new_tokens=new_tokens,
            subset=name,
            chat=name not in _WITHOUT_CHAT,
            end_text="\n" if name == "samsum" else "",
        )

    def score(self, example: Example, answer: Answer) -> dict[str, float]:
        references, classes = example.references
        return {"score": longbench.score(example.subset, answer.texts[0], references, classes)}


def without_middle(tokenizer, text: str, limit: int) -> str:
    """The text, or the first and the last `limit // 2` of its tokens where it has more than `limit`."""
    ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    if len(ids) <= limit:
        return text
    half = limit // 2
    if half < 1:
        raise KVSparseError(f"max_length={limit} leaves no room for a prompt.")
    first, last = (tokenizer.decode(part, skip_special_tokens=True) for part in (ids[:half], ids[-half:]))
    return first + last
