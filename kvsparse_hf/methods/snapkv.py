"""SnapKV: the prompt's last queries choose which earlier tokens stay."""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from pydantic import Field, field_validator
from torch import Tensor

from .. import ops
from ..policy.base import Candidates, Policy
from ..policy.budgets import Budget
from ..policy.pooling import pool_scores
from ..policy.received import received_attention
from ..registry import register_method
from .evicting import EvictingCache
from .periodic import PeriodicOptions


@dataclass(frozen=True)
class WindowPolicy(Policy):
    """Scores a token by the attention it gets from the last `window` queries, smoothed over its neighbours.

    Attributes:
        window: observation window, always kept.
        kernel: pooling width; pooling: "max" or "avg".
        reduce: over the query heads of a group, after the softmax and before pooling.
        backend: kernels to use.
    """

    window: int = 32
    kernel: int = 7
    pooling: str = "max"
    reduce: str = "mean"
    backend: str = "auto"

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
        """`[B, H, N]`; the window itself is protected by index and scores 0."""
        return window_attention(candidates, self.window, self.kernel, self.pooling, self.reduce, self.backend)


def window_attention(
    candidates: Candidates, window: int, kernel: int, pooling: str, reduce: str, backend: str
) -> Tensor:
    """Attention of the last `window` queries to every earlier candidate.

    Returns:
        `[B, H, N]` fp32: the exact softmax over all candidates, summed over the window's queries, reduced over the query
        heads of each key/value head, then pooled over the tokens before the window. The window's own entries are 0.
    """
    batch, heads, length = candidates.keys.shape[:3]
    window = min(window, candidates.query.shape[2], length)
    query = candidates.query[:, :, -window:]
    if candidates.sinks is not None:
        # Learned sinks take their part of every query's attention, so the denominators must be known first.
        lse = None if candidates.lse is None else candidates.lse[:, :, -window:]
        scores = received_attention(replace(candidates, query=query, lse=lse), 1.0, reduce, backend)
    else:
        group = query.shape[1] // heads
        # Heads become rows, because the kept tokens of a ragged layer leave each head another padding.
        scores = ops.window_scores(
            query.reshape(batch * heads, group, window, -1),
            candidates.keys.reshape(batch * heads, 1, length, -1),
            scale=candidates.scale,
            pad=candidates.pad.reshape(-1).to(torch.int32),
            softcap=candidates.softcap,
            group_reduce=reduce,
            backend=backend,
        ).view(batch, heads, length)
    before = pool_scores(scores[..., : length - window], candidates.pad, kernel, pooling)
    return torch.cat((before, scores.new_zeros(batch, heads, window)), dim=-1)


class SnapKVOptions(PeriodicOptions):
    """Options of `SnapKVCache`. Defaults: the paper's LongBench settings."""

    window: int = Field(32, ge=1, description="last prompt queries that score the others; always kept")
    kernel: int = Field(7, ge=1, description="pooling width over tokens, odd")
    pooling: Literal["max", "avg"] = Field("max", description="pooling over tokens")
    reduce: Literal["mean", "max", "sum"] = Field("mean", description="over the query heads that share a key/value head")
    decode: Literal["grow", "bounded"] = Field(
        "grow", description="decoded tokens are added ('grow', as published) or replace the oldest unprotected one ('bounded')"
    )

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


@register_method("snapkv")
class SnapKVCache(EvictingCache):
    """SnapKV (Li et al., "LLM Knows What You are Looking for Before Generation", NeurIPS 2024, arXiv 2404.14469).

    At the end of a prompt longer than the budget, the last `window` queries score all earlier tokens; the best
    `budget - window` stay with the window. The decision depends on what the prompt ends with, so a compressed prompt is
    not reusable for another question.

    Deviations from the published code: scores are computed once per key/value head (mean over its query heads, after the
    softmax), so the cache is not enlarged by the group size; softmax and sums are fp32; padding never counts; the chunks
    of a chunked prefill are compressed as they come. With `decode="bounded"` the last `window` entries are a ring of the
    newest tokens. With `recompress_every=n`, decoded tokens are added and after every n of them the last `window` queries
    choose anew. Later turns are appended (`grow`) or compete anew (otherwise).

    Example:
        >>> cache = SnapKVCache(model, budget=1024)
        >>> model.generate(**inputs, past_key_values=cache)
    """

    paper = "arXiv 2404.14469"
    needs = "the last queries of the prompt"
    prefix_safe = False
    other_actions = True
    Options = SnapKVOptions

    def make_policy(self, layer_idx: int) -> Policy:
        return WindowPolicy(**self.window_settings())

    def window_settings(self) -> dict:
        """Options as fields of a `WindowPolicy`."""
        options = self.options
        return dict(
            budget=Budget.parse(options.budget),
            sinks=options.sinks,
            recent=options.recent,
            bounded=options.decode == "bounded",
            window=options.window,
            kernel=options.kernel,
            pooling=options.pooling,
            reduce=options.reduce,
            backend=options.backend,
        )
