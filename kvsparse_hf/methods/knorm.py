"""Knorm: the tokens with the shortest keys."""

from dataclasses import dataclass

from pydantic import Field
from torch import Tensor

from ..errors import OptionError
from ..policy.base import Candidates, Policy
from ..policy.budgets import Budget
from ..policy.geometry import key_norms
from ..policy.scored import Entries, ObservingPolicy
from ..registry import register_method
from .evicting import EvictingCache
from .periodic import KeyScoreOptions


@dataclass(frozen=True)
class ShortKeysPolicy(Policy):
    """Keeps the keys with the smallest L2 norm."""

    queries_read = 0

    def scores(self, candidates: Candidates) -> Tensor:
        return -key_norms(candidates.keys)


@dataclass(frozen=True)
class BoundedShortKeysPolicy(ShortKeysPolicy, ObservingPolicy):
    """The same, and every decoded token replaces the one with the longest key."""

    bounded: bool = True

    reads_weights = False
    reads_keys = True

    def worth(self, entries: Entries) -> Tensor:
        return -key_norms(entries.keys)


class KnormOptions(KeyScoreOptions):
    """Options of `KnormCache`."""

    skip_layers: tuple[int, ...] = Field((), description="decoder layers that keep everything; the paper's language modelling: [0, 1]")


@register_method("knorm")
class KnormCache(EvictingCache):
    """Knorm (Devoto et al., "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression", EMNLP 2024,
    arXiv 2406.11430).

    Short keys get much attention, so the tokens with the smallest key norm stay. No query is used.

    The paper leaves the first two layers whole, where the correlation is weak: `skip_layers=[0, 1]`. The default skips none,
    so that the budget holds in every layer; skipped layers come on top of it. Norms are taken in fp32 (in bf16 most of them
    tie) and compared to 13 bits, so that a repeated token's keys, equally long in the first layer, tie.

    Example:
        >>> cache = KnormCache(model, budget=1024, skip_layers=[0, 1])
        >>> model.generate(**inputs, past_key_values=cache)
    """

    paper = "arXiv 2406.11430"
    needs = "keys"
    other_actions = True
    Options = KnormOptions

    def prepare(self) -> None:
        super().prepare()
        unknown = sorted(set(self.options.skip_layers) - set(range(self.binding.layers)))
        if unknown:
            raise OptionError(f"knorm: skip_layers={unknown} does not exist; the model has layers 0 to {self.binding.layers - 1}.")

    def make_policy(self, layer_idx: int) -> Policy:
        options = self.options
        if layer_idx in options.skip_layers:
            return Policy()
        kind = BoundedShortKeysPolicy if options.decode == "bounded" else ShortKeysPolicy
        return kind(Budget.parse(options.budget), sinks=options.sinks, recent=options.recent)
