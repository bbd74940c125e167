"""StreamingLLM: the first tokens (attention sinks) and the newest ones."""

from dataclasses import dataclass

import torch
from pydantic import Field
from torch import Tensor

from ..options import EvictingOptions
from ..policy.base import Policy
from ..policy.budgets import Budget
from ..registry import register_method
from .evicting import EvictingCache

_EVERYTHING_ELSE = 2**40


@dataclass(frozen=True)
class StreamingPolicy(Policy):
    """Sinks, then as many of the newest tokens as the budget holds."""

    queries_read = 0

    @property
    def moved_slots(self) -> int:
        return self.sinks

    @property
    def tail(self) -> int:
        return _EVERYTHING_ELSE

    def pinned(self, counts: Tensor, kept: Tensor) -> Tensor:
        # The sink slots are fixed from the start, also in a row that is still shorter than its budget.
        return torch.minimum(torch.full_like(counts, self.sinks), counts - 1)


class StreamingLLMOptions(EvictingOptions):
    """Options of `StreamingLLMCache`."""

    sinks: int = Field(4, ge=0, description="first tokens of each row that are always kept (the paper's 4)")
    recent: int = Field(1, ge=1, description="newest tokens that must fit beside the sinks; all of budget - sinks is used")
    positions: str = Field(
        "cache",
        pattern="^(original|cache)$",
        description="'cache' as published: kept tokens are numbered by their place in the cache; 'original': in the text",
    )


@register_method("streaming-llm")
class StreamingLLMCache(EvictingCache):
    """StreamingLLM (Xiao et al., "Efficient Streaming Language Models with Attention Sinks", ICLR 2024, arXiv 2309.17453).

    Keeps the first `sinks` real tokens of every row and the newest `budget - sinks`, at every decode step. It does not
    extend what the model can recall: tokens between are gone.

    Deviations from the paper: the budget counts the token being decoded, so attention reads exactly `budget` entries (the
    published code reads one more); a prompt longer than the budget is attended densely once and then cut (with
    `prefill_chunk_size` in `generate()`, each chunk sees only what the cache kept, as in the paper's streaming setting);
    `positions="cache"` is realised by rotating the sink keys, which gives the same logits.

    Example:
        >>> cache = StreamingLLMCache(model, budget=512)
        >>> model.generate(**inputs, past_key_values=cache)
    """

    paper = "arXiv 2309.17453"
    needs = "positions"
    Options = StreamingLLMOptions

    def make_policy(self, layer_idx: int) -> Policy:
        return StreamingPolicy(Budget.parse(self.options.budget), sinks=self.options.sinks, recent=1, bounded=True)
