"""How many entries may stay: parsing a user's budget, and dividing it over layers and heads.

A budget counts kept entries per key/value head *on average*, sinks and windows included (and, in bounded decode, the
token being decoded).
"""

import math
import numbers
import re
from dataclasses import dataclass

import torch

from ..errors import BudgetError
from ..texts import brief

_UNITS = {"": 1, "b": 1}
for _power, _prefix in enumerate("kmgt", start=1):
    _UNITS[_prefix + "b"] = 1000**_power
    _UNITS[_prefix + "ib"] = 1024**_power

_MOST = 2**31 - 1  # lengths are int32
_FORMS = "an int >= 1 (tokens per key/value head), a float in (0, 1] (share of the prompt), or a size such as '512MiB'"


@dataclass(frozen=True)
class Cost:
    """Bytes per row, over all budgeted layers and heads.

    Attributes:
        per_token: of one token kept in every head.
        fixed: of the tables that do not depend on how many are kept.
    """

    per_token: int
    fixed: int = 0


@dataclass(frozen=True)
class Budget:
    """A parsed budget. Exactly one of `tokens`, `share` and `nbytes` is set.

    Attributes:
        tokens: kept entries per key/value head.
        share: kept share of the prompt, in (0, 1].
        nbytes: bytes of the whole cache, over all layers and rows.
    """

    tokens: int | None = None
    share: float | None = None
    nbytes: int | None = None

    @classmethod
    def parse(cls, value: "int | float | str | Budget") -> "Budget":
        """Reads what a user wrote.

        Raises:
            BudgetError: for anything but the three documented forms.
        """
        if isinstance(value, Budget):
            return value
        if isinstance(value, bool):
            raise BudgetError(f"budget={value!r} is a bool; give {_FORMS}.")
        if isinstance(value, numbers.Integral):
            if value < 1:
                raise BudgetError(f"budget={brief(value)} keeps nothing; give {_FORMS}.")
            if value > _MOST:
                raise BudgetError(f"budget={brief(value)} is more than a cache can count; FullCache keeps everything.")
            return cls(tokens=int(value))
        if isinstance(value, numbers.Real):
            share = float(value)
            if not (math.isfinite(share) and 0.0 < share <= 1.0):
                raise BudgetError(f"budget={value} is a share outside (0, 1]; give {_FORMS}.")
            return cls(share=share)
        if isinstance(value, str):
            return cls._parse_text(value)
        raise BudgetError(f"budget={brief(value)} has type {type(value).__name__}; give {_FORMS}.")

    @classmethod
    def _parse_text(cls, text: str) -> "Budget":
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*", text)
        unit = match.group(2).lower() if match else None
        if match is None or unit not in _UNITS or unit == "":
            raise BudgetError(f"budget={brief(text)} is not understood; give {_FORMS}.")
        nbytes = float(match.group(1)) * _UNITS[unit]
        if not 1 <= nbytes < 2**62:
            raise BudgetError(f"budget={brief(text)} keeps nothing, or more bytes than there are; give {_FORMS}.")
        return cls(nbytes=int(nbytes))

    def check_minimum(self, minimum: int, what: str) -> None:
        """Refuses a token budget below what is always kept (`minimum` entries, named by `what`)."""
        if self.tokens is not None and self.tokens < minimum:
            raise BudgetError(f"budget={self.tokens} is smaller than {what} = {minimum}; raise the budget.")

    def per_head(self, valid: torch.Tensor, cost: "Cost") -> torch.Tensor:
        """Entries per key/value head for each row.

        Args:
            valid: `[B]` real (unpadded) tokens seen by each row, on the host.
            cost: what tokens cost, for a budget in bytes.

        Returns:
            `[B]` int64, at least 1.
        """
        if self.tokens is not None:
            return torch.full_like(valid, self.tokens)
        if self.share is not None:
            return (valid.double() * self.share).round().long().clamp(min=1)
        tokens = (self.nbytes // max(len(valid), 1) - cost.fixed) // cost.per_token
        if tokens < 1:
            need = (cost.fixed + cost.per_token) * len(valid)
            raise BudgetError(f"budget of {self.nbytes} bytes is below one token per head, which needs {need} bytes.")
        return torch.full_like(valid, min(tokens, _MOST))

    def __str__(self) -> str:
        if self.tokens is not None:
            return str(self.tokens)
        return f"{self.share:g} of the prompt" if self.share is not None else f"{self.nbytes} bytes"


def largest_remainder(weights: torch.Tensor, total: int) -> torch.Tensor:
    """Integers proportional to `weights` that sum to exactly `total`; ties go to the lower index.

    Args:
        weights: `[n]` non-negative, not all zero.
        total: the sum to reach.
    """
    exact = weights.double() / weights.double().sum() * total
    floor = exact.floor().long()
    missing = total - int(floor.sum())
    order = torch.argsort(exact - floor, descending=True, stable=True)
    floor[order[:missing]] += 1
    return floor


def distribute(weights: torch.Tensor, total: int, caps: torch.Tensor) -> torch.Tensor:
    """Integers in proportion to `weights`, none above its cap; what a capped one cannot take goes to the others.

    Args:
        weights: `[n]` non-negative. Where those that can still take something are all zero, they share evenly.
        total: the sum to reach; at most `caps.sum()` is given out.
        caps: `[n]` int64 on the host.

    Returns:
        `[n]` int64 with the sum `min(total, caps.sum())`. Rounding is by largest remainder.
    """
    total = min(int(total), int(caps.sum()))
    given = torch.zeros_like(caps)
    open_ = caps > 0
    while total > int(given.sum()):
        share = weights.double()[open_]
        share = largest_remainder(share if bool(share.any()) else torch.ones_like(share), total - int(given[~open_].sum()))
        given[open_] = torch.minimum(share, caps[open_])
        open_ = open_ & (given < caps)
    return given
