"""H2O: heavy hitters, the tokens that received most attention so far, and the newest ones."""

from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from ..errors import BudgetError, OptionError
from ..policy.base import Candidates
from ..policy.budgets import Budget
from ..policy.received import received_attention
from ..policy.scored import Entries, FollowingPolicy
from ..registry import register_method
from .evicting import EvictingCache
from .observing import ObservingOptions


@dataclass(frozen=True)
class HeavyHitterPolicy(FollowingPolicy):
    """Keeps the entries with the largest accumulated attention beside the newest ones.

    Attributes:
        recent: newest tokens always kept; None for half of what a segment holds.
        normalize: "none" for sums, "count" for means over the queries that could see the token.
        decay: factor on the sums per later query.
        backend: kernels to use.
    """

    recent: int | None = None
    normalize: str = "none"
    decay: float = 1.0
    backend: str = "auto"

    remembers = "received"
    reads_lse = True

    def tails(self, counts: Tensor) -> Tensor | int:
        return counts // 2 if self.recent is None else self.recent

    def observe(self, candidates: Candidates) -> dict[str, Tensor]:
        received = received_attention(candidates, self.decay, "mean", self.backend)
        if "received" in candidates.memory:
            received = received + candidates.memory["received"] * self.decay ** candidates.query.shape[2]
        return {"received": received}

    @property
    def rule(self) -> dict:
        return dict(decay=self.decay, per_query=self.normalize == "count")

    def worth(self, entries: Entries) -> Tensor:
        received = entries.memory["received"]
        if self.normalize == "none":
            return received
        seen_by = entries.age.clamp(min=1).to(received.dtype)
        if self.decay < 1.0:
            seen_by = (1 - torch.pow(self.decay, seen_by)) / (1 - self.decay)
        return received / seen_by


class H2OOptions(ObservingOptions):
    """Options of `H2OCache`. Defaults: heavy and recent in equal parts, as in the published scripts."""

    recent: int | None = Field(
        None, ge=1, description="newest tokens that are always kept, the one being decoded included; default: half of the budget"
    )
    heavy: int | None = Field(None, ge=0, description="entries for heavy hitters: the rest of the budget; give it or `recent`")
    normalize: Literal["none", "count"] = Field(
        "none",
        description="'none': sums, as published, which favour early tokens; 'count': divided by the queries that could see the token",
    )
    decay: float = Field(1.0, gt=0.0, le=1.0, description="factor on the accumulated attention per later query; 1 forgets nothing")

    def newest_kept(self) -> int | None:
        """`recent`, also where `heavy` says it; None for half of the budget."""
        tokens = Budget.parse(self.budget).tokens
        if self.heavy is None or self.recent is not None:
            return self.recent
        return tokens - self.heavy - self.sinks

    def protected(self) -> tuple[int, str]:
        tokens = Budget.parse(self.budget).tokens
        recent = self.recent if self.recent is not None else (tokens or 0) // 2
        return self.sinks + recent, "sinks + recent"

    @model_validator(mode="after")
    def _check_split(self) -> "H2OOptions":
        if self.heavy is None:
            return self
        tokens = Budget.parse(self.budget).tokens
        if tokens is None:
            raise OptionError("h2o: heavy counts entries, so the budget must be a number of entries too; or give recent.")
        if self.recent is None:
            if self.heavy + self.sinks >= tokens:
                raise BudgetError(f"h2o: budget={tokens} leaves no recent token beside sinks + heavy = {self.sinks + self.heavy}.")
        elif self.heavy + self.recent + self.sinks != tokens:
            total = self.heavy + self.recent + self.sinks
            raise BudgetError(f"h2o: sinks + heavy + recent = {total}, but budget={tokens}; give two of budget, heavy and recent.")
        return self


@register_method("h2o")
class H2OCache(EvictingCache):
    """H2O (Zhang et al., "Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models", NeurIPS 2023,
    arXiv 2306.14048).

    Every token's score is the attention it received from all queries so far (column sums of the attention matrix), per
    key/value head. A prompt is cut to the best `heavy` tokens and the newest `recent`; from then on every decoded token
    takes the place of the token with the lowest score outside the newest. Survivors keep their score, across chunks of a
    prompt and across turns; who was evicted lost it for ever.

    The budget counts the token being decoded: with `budget = C + 1`, `heavy = Kh` and `recent = Kr + 1` this is the
    published rule "attend to the C = Kh + Kr kept and the new one, then drop the lowest outside the last Kr". The victim is
    chosen at the end of a step, with that step's attention in the scores, and overwritten by the next token.

    Deviations from the published code: scores are fp32 (sums in half precision stop growing); query heads of a group are
    averaged after the softmax; rows of a batch have scores of their own and padding never counts; the prompt needs O(N)
    memory, by a second pass over the keys; decisions use past queries only (the simulation behind the paper's few-shot
    tables sums over future ones too).

    With `action="offload"` or `"quantize"` the losers stay within reach and keep their scores: all tokens are ranked after
    every `interval` decoded ones (which gather beside the budget until then), and may come back.

    Summed attention favours early tokens, which had more queries to receive it from. `normalize="count"` divides by their
    number; `decay` forgets old attention.

    Example:
        >>> cache = H2OCache(model, budget=1024)
        >>> model.generate(**inputs, past_key_values=cache)
    """

    paper = "arXiv 2306.14048"
    needs = "the attention each token received from all queries"
    prefix_safe = False
    other_actions = True
    Options = H2OOptions

    def make_policy(self, layer_idx: int) -> HeavyHitterPolicy:
        options = self.options
        return HeavyHitterPolicy(
            Budget.parse(options.budget),
            sinks=options.sinks,
            recent=options.newest_kept(),
            normalize=options.normalize,
            decay=options.decay,
            backend=options.backend,
        )
