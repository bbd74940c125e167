"""The tasks by name. A task is one class in one file of this folder, and one entry here."""

from typing import Any

from ...errors import KVSparseError, suggest
from .base import Answer, Example, Setting, Task
from .gsm8k import GSM8KTask
from .kv import KVTask
from .lines import LinesTask
from .longbench import LongBenchTask
from .longgen import LongGenTask
from .multiturn import MultiTurnTask
from .passkey import PasskeyTask
from .ppl import PerplexityTask
from .recall import RecallTask
from .ruler import RulerTask

__all__ = ["Answer", "Example", "Setting", "Task", "get_task", "list_tasks"]

_TASKS: dict[str, type[Task]] = {
    task.name: task
    for task in (
        GSM8KTask,
        KVTask,
        LinesTask,
        LongBenchTask,
        LongGenTask,
        MultiTurnTask,
        PasskeyTask,
        PerplexityTask,
        RecallTask,
        RulerTask,
    )
}


def list_tasks() -> list[str]:
    """The names of all tasks."""
    return sorted(_TASKS)


def get_task(name: str, **options: Any) -> Task:
    """The task of that name.

    Raises:
        KVSparseError: an unknown name; the nearest known one is suggested.
        OptionError: an option the task does not have, or a value out of range.
    """
    if name not in _TASKS:
        raise KVSparseError(f"unknown task {name!r}.{suggest(name, _TASKS)}")
    return _TASKS[name](options)
