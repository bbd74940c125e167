"""What is compared: presets, with options that replace theirs."""

import re
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from ..cache import SparseCache
from ..cli.loading import parse_options
from ..errors import KVSparseError
from ..presets import load_preset, read_preset

FULL = "full"
_OPTIONS = re.compile(r"^(?P<preset>.+?):(?P<options>\w+=.*)$", re.DOTALL)


@dataclass(frozen=True)
class Contender:
    """One preset, as `NAME` or `NAME:key=value,key=value`.

    Attributes:
        label: as it was written.
        preset: name or file.
        overrides: options that replace the preset's.
    """

    label: str
    preset: str
    overrides: dict[str, Any]

    @classmethod
    def parse(cls, text: str) -> "Contender":
        """Reads the written form.

        Raises:
            PresetError: no such preset.
            KVSparseError: an option that is not `key=value`.
        """
        found = _OPTIONS.match(text)
        preset = found["preset"] if found else text
        pairs = re.split(r",(?=\w+=)", found["options"]) if found else []
        read_preset(preset)
        return cls(text, preset, parse_options(pairs))

    def make(self, model: PreTrainedModel) -> SparseCache:
        """A fresh cache."""
        return load_preset(self.preset, model, **self.overrides)

    def content(self, model: PreTrainedModel) -> dict[str, Any]:
        """Method and all options as plain values."""
        cache = self.make(model)
        return {"method": cache.method, **cache.option_dict()}


def parse_contenders(texts: list[str]) -> list[Contender]:
    """All contenders, each once; the full cache is the first whether it was named or not.

    Raises:
        KVSparseError: see `Contender.parse`.
    """
    if any(not text.strip() for text in texts):
        raise KVSparseError("--preset is empty; `kvsparse presets` lists the names.")
    return [Contender.parse(text) for text in dict.fromkeys((FULL, *texts))]
