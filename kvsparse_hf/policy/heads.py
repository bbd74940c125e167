"""Budgets that differ from head to head, at an exact total."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import UnsupportedOperationError
from .base import Candidates, Policy
from .budgets import Cost, distribute
from .select import NEG_INF, protected_mask

EVERYTHING = 2**30  # a span that no text reaches; fits the store's int32 tables


def count_best(scores: Tensor, free: Tensor, totals: Tensor) -> Tensor:
    """How many of each row's `totals` best entries lie in each head; ties go to the lower head, then the lower index.

    Args:
        scores: `[B, H, N]`; free: `[B, H, N]` bool, the entries that take part; totals: `[B]` on the host.

    Returns:
        `[B, H]` int64.
    """
    batch, heads, length = scores.shape
    limits = torch.finfo(torch.float32)
    rank_by = scores.float().nan_to_num(nan=limits.min, posinf=limits.max, neginf=limits.min)
    rank_by = rank_by.masked_fill(~free, NEG_INF).flatten(1)
    width = min(int(totals.max()), heads * length)
    order = torch.sort(rank_by, dim=-1, descending=True, stable=True)
    chosen = order.values[:, :width] > NEG_INF
    chosen &= torch.arange(width, device=scores.device) < totals.to(scores.device).unsqueeze(1)
    number = torch.zeros(batch, heads, dtype=torch.int64, device=scores.device)
    return number.scatter_add_(1, order.indices[:, :width] // length, chosen.long())


@dataclass(frozen=True)
class AdaptiveHeads(Policy):
    """Mix-in for a policy with scores: the heads of a layer share its budget by how many of the layer's best entries they
    hold (Ada-KV).

    Attributes:
        alpha: the part of the budget, beside what is always kept, that every head gets in any case.
        official: round each head's share by itself (as published), so that the sum may miss the budget.
        normalize: weigh a head's scores by how much of their sum its best entries hold.
    """

    alpha: float = 0.2
    official: bool = False
    normalize: bool = False

    @property
    def grid(self) -> int:
        return 64

    @property
    def couples_heads(self) -> bool:
        return True

    def allocate(self, candidates: Candidates, scores: Tensor, counts: Tensor) -> Tensor:
        ranks, device = candidates.ranks, scores.device
        length = ranks.largest(candidates.length, device)
        pad = ranks.gather(candidates.pad + length - candidates.length)
        scores = ranks.gather_ragged(scores.float(), length)
        every = ranks.gather(counts.to(device)).cpu() if ranks.size > 1 else counts
        return self._divide(pad, length, scores, every)[:, ranks.share(every.shape[1])]

    def _divide(self, pad: Tensor, length: int, scores: Tensor, counts: Tensor) -> Tensor:
        """`counts` `[B, H]`, divided anew among all heads. `pad` `[B, H]`, `scores` `[B, H, N]` with N = `length`."""
        available = (length - pad).cpu()
        # Counts that differ between the heads are the shares of an earlier choice, which stay.
        rows = (available > counts).any(1) & (counts == counts[:, :1]).all(1)
        if not bool(rows.any()):
            return counts
        protect = protected_mask(pad, length, counts.to(pad.device), self.sinks, self.tails(counts.to(pad.device)))
        held = protect.sum(-1).cpu()
        total = (counts - held).sum(1)
        free = (torch.arange(length, device=pad.device) >= pad.unsqueeze(-1)) & ~protect
        if self.normalize:
            scores = scores * _concentration(scores, free, int(total.max()) // counts.shape[1])
        number = count_best(scores, free, total).cpu()
        counts = counts.clone()
        for row in rows.nonzero().flatten().tolist():
            counts[row] = held[row] + self.shares(number[row], int(total[row]), (available - held)[row])
        return counts

    def shares(self, number: Tensor, total: int, caps: Tensor) -> Tensor:
        """`[H]` entries per head, given how many of the best lie in each; all beside what is always kept."""
        average = total / len(number)
        if self.official:
            share = torch.round((1 - self.alpha) * number.double() + math.floor(self.alpha * average))
            return torch.minimum(share.long(), caps)
        return distribute((1 - self.alpha) * number.double() + self.alpha * average, total, caps)


def _concentration(scores: Tensor, free: Tensor, best: int) -> Tensor:
    """`[B, H, 1]`: what part of a head's scores its `best` largest hold."""
    scores = scores.masked_fill(~free, 0.0)
    top = scores.topk(min(best, scores.shape[-1]), dim=-1).values.sum(-1, keepdim=True)
    return top / scores.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)


def table_counts(table: Tensor, average: int, protected: int, length: int, beta: float) -> Tensor:
    """Entries per layer and head by a table of importance (HeadKV).

    Of the `average - protected` entries per head that are free, the part `1 / beta` (rounded down) goes into a pool which
    the table divides; every head gets the rest.

    Args:
        table: `[L, H]` non-negative importance, not all zero.
        length: tokens of the prompt: no head can hold more, and what it cannot hold goes to the others.

    Returns:
        `[L, H]` int64, protected ones included, with the sum `L * H * average`.
    """
    if average <= protected or length <= average:
        return torch.full(table.shape, average)
    free = average - protected
    pool = int(free / beta)
    weights = table.double().flatten()
    wanted = weights / weights.sum() * (pool * weights.numel()) + (free - pool)
    caps = torch.full(wanted.shape, length - protected)
    return protected + distribute(wanted, free * weights.numel(), caps).view(table.shape)


def _fits(counts: Tensor, available: Tensor, candidates: Candidates) -> Tensor:
    """This rank's part of counts `[B, H]` for all heads of the layer."""
    mine = counts[:, candidates.ranks.share(counts.shape[1])]
    if mine.shape != available.shape:
        raise UnsupportedOperationError(
            f"the plan is for {counts.shape[1]} key/value heads per layer, this forward has {available.shape[1]} on each of "
            f"{candidates.ranks.size} rank(s): the model's config does not state its heads, or the cache was constructed from a config "
            "and the model is divided among ranks; construct it from the model."
        )
    return mine


@dataclass(frozen=True)
class TableHeads(Policy):
    """Mix-in for a policy with scores: a fixed table says what each head's share of the budget is.

    Attributes:
        table: importance of every head, one tuple per budgeted layer.
        depth: which of those this layer is.
        beta: see `table_counts`.
    """

    table: tuple[tuple[float, ...], ...] = ()
    depth: int = 0
    beta: float = 1.1

    @property
    def grid(self) -> int:
        return 64

    def counts(self, candidates: Candidates, available: Tensor, seen: Tensor, cost: Cost) -> Tensor:
        table, protected = torch.tensor(self.table, dtype=torch.float64), self.tail + self.sinks
        averages = self.budget.per_head(seen, cost).tolist()
        rows = [table_counts(table, n, protected, length, self.beta)[self.depth] for n, length in zip(averages, seen.tolist(), strict=True)]
        return _fits(torch.stack(rows), available, candidates)


@dataclass(frozen=True)
class SpanPolicy(Policy):
    """Every head holds the first `sinks` tokens and the newest ones, as many as its span; decode slides.

    Attributes:
        spans: entries per head, sinks included; None for a head that keeps everything.
    """

    bounded: bool = True
    spans: tuple[int | None, ...] = ()

    @property
    def evicts(self) -> bool:
        return True

    @property
    def grid(self) -> int:
        return 64

    @property
    def tail(self) -> int:
        return EVERYTHING

    def counts(self, candidates: Candidates, available: Tensor, seen: Tensor, cost: Cost) -> Tensor:
        spans = torch.tensor([EVERYTHING if span is None else span for span in self.spans])
        return _fits(spans.expand(len(available), -1), available, candidates)

    def pinned(self, counts: Tensor, kept: Tensor) -> Tensor:
        # A head that keeps everything only grows; in the others the sink slots are fixed from the start.
        return torch.where(counts >= EVERYTHING, EVERYTHING, torch.minimum(torch.full_like(counts, self.sinks), counts - 1))


@dataclass(frozen=True)
class ElasticSpanPolicy(SpanPolicy):
    """Spans `alpha + beta * N` per head, where N is the length the text is expected to reach (MoA).

    Attributes:
        rules: `(alpha, beta)` of the query heads that share each key/value head.
        new_tokens: expected after the prompt.
        minimum, multiple: a span is at least the one and rounded up to a multiple of the other.
        widest: a key/value head takes the widest span of its query heads instead of their mean.
    """

    rules: tuple[tuple[tuple[float, float], ...], ...] = ()
    new_tokens: int = 1024
    minimum: int = 128
    multiple: int = 64
    widest: bool = False

    def counts(self, candidates: Candidates, available: Tensor, seen: Tensor, cost: Cost) -> Tensor:
        spans = [[self.span(head, length + self.new_tokens) for head in self.rules] for length in seen.tolist()]
        return _fits(torch.tensor(spans), available, candidates)

    def span(self, head: tuple[tuple[float, float], ...], length: int) -> int:
        """Entries that a key/value head holds of a text of `length` tokens."""
        spans = [min(max(int(alpha + beta * length), 0), length) for alpha, beta in head]
        span = max(spans) if self.widest else sum(spans) / len(spans)
        return math.ceil(max(span, self.minimum) / self.multiple) * self.multiple
