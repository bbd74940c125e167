"""Shared by the methods that follow a plan made beforehand."""

from pathlib import Path
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel

from ..errors import OptionError
from ..texts import brief
from .evicting import EvictingCache


class PlannedCache(EvictingCache):
    """Reads a plan while the cache is constructed. A method gives `read_plan`.

    Attributes:
        plan: what `read_plan` returned.
    """

    plan: Any

    def __init__(self, model: PreTrainedModel | PretrainedConfig, **options):
        self._model = model  # a plan file is checked against its weights
        super().__init__(model, **options)
        del self._model

    def prepare(self) -> None:
        super().prepare()
        self.plan = self.read_plan(self._model)

    def read_plan(self, model: PreTrainedModel | PretrainedConfig) -> Any:
        """The plan that the options name, checked against the model."""
        raise TypeError(f"{type(self).__name__} does not say how to read its plan.")


def plain_table(value: Any) -> Any:
    """A table given by a user as what an option can hold: a path as a string, numbers as nested lists."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    try:
        return [row.tolist() if hasattr(row, "tolist") else list(row) for row in value]
    except TypeError as error:
        raise OptionError(f"{brief(value)} is neither a file nor a table of numbers.") from error
