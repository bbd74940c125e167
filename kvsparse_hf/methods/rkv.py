"""R-KV: important and not redundant tokens, chosen again and again while a model reasons."""

from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import Field, field_validator
from torch import Tensor

from ..policy.base import Candidates, Policy
from ..policy.budgets import Budget
from ..policy.redundancy import BLOCK_ELEMENTS, redundancy, window_importance
from ..registry import register_method
from .evicting import EvictingCache
from .periodic import PeriodicOptions


@dataclass(frozen=True)
class RKVPolicy(Policy):
    """Importance less redundancy.

    Attributes:
        window: newest tokens, whose queries judge; always kept.
        kernel: neighbours over which importance spreads.
        balance: weight of importance; the rest goes to redundancy.
        threshold: cosine from which two keys are near-duplicates.
        count_self: see `policy.redundancy.redundancy`.
    """

    window: int = 8
    kernel: int = 7
    balance: float = 0.1
    threshold: float = 0.5
    count_self: bool = True

    @property
    def tail(self) -> int:
        return max(self.window, self.recent)

    @property
    def newest_queries(self) -> int:
        return self.window

    @property
    def queries_read(self) -> int:
        return self.window

    def scores(self, candidates: Candidates) -> Tensor:
        window = min(self.window, candidates.query.shape[2], candidates.length)
        # A prompt is long and compressed once: what counts is memory. Later it is the number of launches.
        block = BLOCK_ELEMENTS if candidates.settled else candidates.keys.numel() // 16
        repeats = redundancy(candidates.keys, candidates.pad, self.threshold, self.count_self, block)
        before = candidates.length - window
        worth = self.balance * window_importance(candidates, window, self.kernel) - (1 - self.balance) * repeats[..., :before]
        return torch.cat((worth, worth.new_zeros(*worth.shape[:2], window)), dim=-1)


class RKVOptions(PeriodicOptions):
    """Options of `RKVCache`. Defaults: the paper's; give reasoning models a budget of 1024 or more."""

    window: int = Field(8, ge=1, description="newest tokens, whose queries judge the others; always kept")
    kernel: int = Field(7, ge=1, description="neighbours over which importance spreads, odd")
    balance: float = Field(0.1, ge=0.0, le=1.0, description="weight of importance (the paper's lambda); 1 - balance goes to redundancy")
    threshold: float = Field(0.5, ge=-1.0, le=1.0, description="cosine from which two keys are near-duplicates")
    duplicates: Literal["newest", "published"] = Field(
        "newest", description="which near-duplicate is spared: the newest, or whichever the published code spares (see the class)"
    )
    recompress_every: int = Field(128, ge=1, description="decoded tokens, which are added, between two compressions to the budget")

    def newest_queries(self) -> int:
        return self.window

    @field_validator("kernel")
    @classmethod
    def _odd(cls, value: int) -> int:
        if value % 2 == 0:
            raise ValueError("must be odd")
        return value

    def protected(self) -> tuple[int, str]:
        return self.sinks + max(self.window, self.recent), "sinks + the observation window (or recent)"


@register_method("rkv")
class RKVCache(EvictingCache):
    """R-KV (Cai et al., "Redundancy-aware KV Cache Compression for Reasoning Models", NeurIPS 2025, arXiv 2505.24133).

    At the end of a prompt over the budget, and after every 128 decoded tokens, the cache is compressed to the budget: the
    newest `window` tokens stay, and of the others those with the largest

        balance * importance - (1 - balance) * redundancy

    where importance is the attention from the window's queries and redundancy the softmax of a key's mean cosine with all
    others. Of a set of near-duplicates the newest is spared. Between two compressions a head holds up to `budget +
    recompress_every` entries; the surplus is reported as reserve.

    Deviations from the published code: every row of a batch is judged by its own keys (the code uses the first row's); the
    phase of the trigger does not leak from one prompt to the next; a token counts among its own near-duplicates, so that of
    two equal keys the older one is redundant. In the published code (`duplicates="published"`) two near-duplicates excuse
    each other, and a token that has none excuses the first token of all, which protects it by accident. The code's default
    weight is 0.07, the paper's 0.1.

    Example:
        >>> cache = RKVCache(model, budget=1024)
        >>> model.generate(**inputs, past_key_values=cache, max_new_tokens=16384)
    """

    paper = "arXiv 2505.24133"
    needs = "the newest queries, and keys"
    prefix_safe = False
    Options = RKVOptions

    def make_policy(self, layer_idx: int) -> Policy:
        options = self.options
        return RKVPolicy(
            Budget.parse(options.budget),
            sinks=options.sinks,
            recent=options.recent,
            window=options.window,
            kernel=options.kernel,
            balance=options.balance,
            threshold=options.threshold,
            count_self=options.duplicates == "newest",
        )
