"""Every error the library raises on purpose. All are `ValueError`s, so a caller may catch them broadly."""

import difflib
from collections.abc import Iterable

__all__ = [
    "BudgetError",
    "KVSparseError",
    "OptionError",
    "PresetError",
    "UnsupportedModelError",
    "UnsupportedOperationError",
    "suggest",
]


class KVSparseError(ValueError):
    """Base of all errors of this library."""


class BudgetError(KVSparseError):
    """A budget that is no budget, or that is too small for what the method must always keep."""


class OptionError(KVSparseError):
    """An unknown or impossible option of a method."""


class PresetError(KVSparseError):
    """A preset that does not exist, cannot be read, or holds unknown keys."""


class UnsupportedModelError(KVSparseError):
    """A model whose attention this library cannot serve correctly."""


class UnsupportedOperationError(KVSparseError):
    """An operation this cache cannot do without giving wrong results."""


def suggest(name: str, known: Iterable[str]) -> str:
    """The tail of an "unknown name" message: the nearest known name, then all of them."""
    known = sorted(known)
    near = difflib.get_close_matches(str(name)[:100], known, n=1, cutoff=0.4)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"{hint} Known: {', '.join(known)}."
