"""Shared by the methods that keep everything and select what each step reads."""

from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from ..cache import SparseCache
from ..errors import OptionError
from ..layers.base import SparseLayer
from ..layers.evicting import EvictingLayer
from ..layers.selecting import SelectingLayer
from ..layers.selectors.base import Selector
from ..options import CommonOptions
from ..policy.base import Policy
from ..policy.budgets import Budget


class GroupSelectingOptions(CommonOptions):
    """Options of selecting methods whose query heads share what their key/value head reads."""

    budget: Any = Field(
        2048,
        description="entries that a decode step reads per key/value head (int), share of the prompt (float), or bytes of keys "
        "and values per step over all selecting layers ('64MiB')",
    )
    sinks: int = Field(4, ge=0, description="first tokens of each row that are always read")
    recent: int = Field(16, ge=1, description="newest tokens that are always read")
    dense_layers: int = Field(0, ge=0, description="so many first decoder layers read everything")
    reduce: Literal["softmax_mean", "max", "mean"] = Field(
        "softmax_mean", description="how the scores of the query heads that share a key/value head become one"
    )

    @field_validator("budget")
    @classmethod
    def _plain_budget(cls, value: Any) -> Any:
        budget = Budget.parse(value)
        return next(part for part in (budget.tokens, budget.share, value) if part is not None)

    def protected(self) -> tuple[int, str]:
        """The least that a step must read, and what it is."""
        return self.sinks + self.recent + 1, "sinks + recent + 1"

    @model_validator(mode="after")
    def _check_protected(self) -> "GroupSelectingOptions":
        Budget.parse(self.budget).check_minimum(*self.protected())
        return self


class SelectingOptions(GroupSelectingOptions):
    """Options that every selecting method takes."""

    per_query_head: bool = Field(False, description="every query head reads its own choice, `budget` entries each")

    def reduction(self) -> str:
        """How a selector ranks: the group's reduction, or "none" for each query head by itself."""
        return "none" if self.per_query_head else self.reduce


class SelectingCache(SparseCache):
    """A cache of `SelectingLayer`s. A method gives `Options` and `make_selector`.

    Nothing is evicted, so crops, beams, assisted decoding and reuse of a prefix are exact.
    """

    action: ClassVar[str] = "skip"
    needs: ClassVar[str] = "each step's query"
    Options: ClassVar[type] = SelectingOptions

    def make_selector(self, layer_idx: int) -> Selector:
        """What a step of one layer reads."""
        raise TypeError(f"{type(self).__name__} does not say what it reads.")

    def make_layer(self, layer_idx: int) -> SparseLayer:
        options = self.options
        if layer_idx < options.dense_layers:
            return EvictingLayer(layer_idx, self.session, Policy(), options.reserve, options.backend)
        budget = Budget.parse(options.budget)
        selector = self.make_selector(layer_idx)
        return SelectingLayer(layer_idx, self.session, selector, budget, options.reserve, options.backend)


def leading(value: int | float, dim: int, name: str) -> int:
    """So many of `dim` channels: an int as it is, a float up to 1 as a share.

    Raises:
        OptionError: more than there are.
    """
    count = value if isinstance(value, int) else max(1, round(value * dim))
    if count > dim:
        raise OptionError(f"{name}={value!r} is more than the model's head size {dim}.")
    return count
