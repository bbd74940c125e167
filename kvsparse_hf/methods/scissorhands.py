"""Scissorhands: tokens that seldom get less than the average attention stay."""

from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from ..errors import BudgetError, OptionError
from ..policy.base import Candidates
from ..policy.budgets import Budget, Cost
from ..policy.depth import weighted
from ..policy.history import count_bits, record_many, words
from ..policy.scored import DroppingPolicy, Entries
from ..registry import register_method
from .evicting import EvictingCache
from .observing import ObservingOptions


@dataclass(frozen=True)
class PersistencePolicy(DroppingPolicy):
    """Gives up the entries that most of the newest queries paid less than the average.

    Attributes:
        drop: share of a full segment that goes at once.
        weights: relative budgets of the layers, empty for equal ones; depth: which of them this layer is.
    """

    drop: float = 0.5
    weights: tuple[float, ...] = ()
    depth: int = 0

    @property
    def memory_bytes(self) -> int:
        return 4 * words(self.window) + 4

    def counts(self, candidates: Candidates, available: Tensor, seen: Tensor, cost: Cost) -> Tensor:
        average = super().counts(candidates, available, seen, cost)
        if not self.weights:
            return average
        own = [int(weighted(row, self.weights)[self.depth]) for row in average[:, 0].tolist()]
        return torch.tensor(own).clamp(min=1).unsqueeze(1).expand_as(average)

    def dropped(self, limit: Tensor) -> Tensor:
        most = (limit - self.sinks - self.recent).clamp(min=1)
        return torch.minimum((limit * self.drop).long().clamp(min=1), most)

    def observe(self, candidates: Candidates) -> dict[str, Tensor]:
        keys, memory = candidates.keys, candidates.memory
        history = memory.get("history")
        if history is None:
            history = torch.zeros(*keys.shape[:3], words(self.window), dtype=torch.int32, device=keys.device)
        if candidates.query.shape[2] == 0:
            return memory
        history, received = record_many(candidates, history, self.window, self.use)
        if "received" in memory:
            received = received + memory["received"] * (1.0 - 1.0 / self.window) ** candidates.query.shape[2]
        return {"history": history, "received": received}

    def worth(self, entries: Entries) -> Tensor:
        """The rank from the worst: first by the history, then by attention received, then by position."""
        order = torch.argsort(entries.memory["received"], dim=-1, descending=True, stable=True)
        below = count_bits(entries.memory["history"]).gather(2, order)
        order = order.gather(2, torch.argsort(below, dim=-1, stable=True))
        rank = torch.arange(order.shape[-1], 0, -1, device=order.device, dtype=torch.float32)
        return torch.empty(order.shape, device=order.device).scatter_(2, order, rank.expand_as(order))


class ScissorhandsOptions(ObservingOptions):
    """Options of `ScissorhandsCache`. Defaults: the paper's."""

    recent: int = Field(10, ge=0, description="newest tokens that are never dropped")
    window: int = Field(400, ge=2, description="newest queries whose attention counts")
    drop: float = Field(0.5, gt=0.0, lt=1.0, description="share of the budget that is dropped at once when it is used up")
    use: Literal["mean", "max"] = Field(
        "mean", description="a token is used when the mean ('mean') or any ('max') of a group's query heads pays it the average"
    )
    layer_weights: tuple[float, ...] = Field(
        (), description="relative budgets of the layers, first to last, at an unchanged total; default: equal"
    )

    @model_validator(mode="after")
    def _check_drop(self) -> "ScissorhandsOptions":
        tokens = Budget.parse(self.budget).tokens
        if any(not weight > 0 for weight in self.layer_weights):
            raise OptionError("scissorhands: layer_weights must be positive.")
        if tokens is not None and self.sinks + self.recent >= tokens:
            raise BudgetError(
                f"scissorhands: budget={tokens} leaves nothing to drop beside sinks + recent = {self.sinks + self.recent}."
            )
        return self


@register_method("scissorhands")
class ScissorhandsCache(EvictingCache):
    """Scissorhands (Liu et al., "Exploiting the Persistence of Importance Hypothesis for LLM KV Cache Compression at Test
    Time", NeurIPS 2023, arXiv 2305.17118).

    What mattered will matter: of the newest `window` queries, count for each token those that paid it less than the average
    `1/n`. When the budget is used up, the tokens with the largest counts go, half the budget at once, the newest `recent`
    excepted; then decoded tokens are added until it is used up again. A head therefore holds between `budget * (1 - drop)`
    and `budget` entries. A long prompt is cut to the budget first.

    The history is exact: one bit per kept token and query, in a ring of 400 bits (56 bytes per entry with the tie-breaker).

    There is no official code. Where the paper leaves room: equal counts, which are the norm, are settled by the attention
    received (fading over `window` queries; of a prompt only its last `window` queries are looked at), then for the earlier
    token; a group's query heads are averaged before the comparison. The paper gives later layers more, without numbers:
    `layer_weights`, at an unchanged total.

    Example:
        >>> cache = ScissorhandsCache(model, budget=1024)
        >>> model.generate(**inputs, past_key_values=cache)
    """

    paper = "arXiv 2305.17118"
    needs = "the attention of the newest queries"
    prefix_safe = False
    Options = ScissorhandsOptions

    def prepare(self) -> None:
        super().prepare()
        weights, layers = self.options.layer_weights, len(self._sparse)
        if weights and len(weights) != layers:
            raise OptionError(f"scissorhands: layer_weights has {len(weights)} entries, the model has {layers} layers to budget.")
        tokens = Budget.parse(self.options.budget).tokens
        least = self.options.sinks + self.options.recent
        if weights and tokens is not None and int(weighted(tokens, weights).min()) <= least:
            raise BudgetError(f"scissorhands: layer_weights leave a layer no more than sinks + recent = {least}; raise the budget.")

    def make_policy(self, layer_idx: int) -> PersistencePolicy:
        options = self.options
        return PersistencePolicy(
            Budget.parse(options.budget),
            sinks=options.sinks,
            recent=options.recent,
            window=options.window,
            drop=options.drop,
            use=options.use,
            weights=options.layer_weights,
            depth=self._sparse.index(layer_idx),
        )
