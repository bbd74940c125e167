"""The softmax over all entries that follows block-wise logits: each query head's shares, averaged over its group."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._math import finite_or_zero, join_previous, launch_options, next_power_of_2


class BlockLogits(NamedTuple):
    """What a first pass over pages or tokens leaves.

    Attributes:
        logits: fp32 [B, Hq, N] in units of log 2, -inf where nothing is valid.
        parts: fp32 [2, B * Hq, blocks], maximum and mass of each block.
        length: [B, H] valid tokens; size: tokens of an entry (a page).
        sinks, recent: first and last valid entries that are always chosen.
    """

    logits: Tensor
    parts: Tensor
    length: Tensor
    size: int
    sinks: int
    recent: int

    @classmethod
    def empty(cls, length: Tensor, heads_q: int, entries: int, blocks: int, size: int, sinks: int, recent: int):
        """Room for the first pass."""
        batch, device = length.shape[0], length.device
        logits = torch.empty(batch, heads_q, entries, dtype=torch.float32, device=device)
        parts = torch.empty(2, batch * heads_q, blocks, dtype=torch.float32, device=device)
        return cls(logits, parts, length, size, sinks, recent)

    @property
    def group(self) -> int:
        return self.logits.shape[1] // self.length.shape[1]


@triton.jit
def forced(scores, page, valid_pages, sink_pages, recent_pages):
    """-inf beyond the valid pages, +inf on the pages that must be chosen."""
    always = (page < sink_pages) | (page >= valid_pages - recent_pages)
    return tl.where(page < valid_pages, tl.where(always, float("inf"), scores), float("-inf"))


@triton.jit
def mean_share(Logits, PartMax, PartSum, unit, page, pages, blocks, GROUP: tl.constexpr, BLOCKS: tl.constexpr):
    """Shares of the entries ``page`` (any shape), averaged over the query heads of KV head ``unit``."""
    part = tl.arange(0, BLOCKS)
    total = tl.zeros(page.shape, tl.float32)
    for g in tl.static_range(GROUP):
        row = unit * GROUP + g
        logits = tl.load(Logits + row * pages + page, mask=page < pages, other=float("-inf"))
        peaks = tl.load(PartMax + row * blocks + part, mask=part < blocks, other=float("-inf"))
        masses = tl.load(PartSum + row * blocks + part, mask=part < blocks, other=0.0)
        peak = finite_or_zero(tl.max(peaks, 0))
        mass = tl.sum(masses * tl.exp2(peaks - peak), 0)
        total += tl.exp2(logits - peak) / tl.where(mass > 0, mass, 1.0)
    return total / GROUP


@triton.jit
def _share_scores_kernel(
    Logits, PartMax, PartSum, Length, Out, pages, blocks, page_size, sink_pages, recent_pages,
    HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_P: tl.constexpr, DEPENDENT: tl.constexpr,
):
    """One (block of entries, KV head, batch row)."""
    join_previous(DEPENDENT, True)
    unit = tl.program_id(2).to(tl.int64) * HEADS + tl.program_id(1)
    page = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    valid_pages = tl.cdiv(tl.load(Length + unit).to(tl.int32), page_size)
    mean = mean_share(Logits, PartMax, PartSum, unit, page, pages, blocks, GROUP, BLOCKS)
    tl.store(Out + unit * pages + page, forced(mean, page, valid_pages, sink_pages, recent_pages), mask=page < pages)


def share_scores(first: BlockLogits, block: int) -> Tensor:
    """Scores fp32 [B, H, N], in blocks of so many entries."""
    batch, heads = first.length.shape
    pages, blocks = first.logits.shape[-1], first.parts.shape[-1]
    out = torch.empty(batch, heads, pages, dtype=torch.float32, device=first.logits.device)
    _share_scores_kernel[(triton.cdiv(pages, block), heads, batch)](
        first.logits, first.parts[0], first.parts[1], first.length, out, pages, blocks, first.size, first.sinks,
        first.recent, HEADS=heads, GROUP=first.group, BLOCKS=next_power_of_2(blocks), BLOCK_P=block,
        num_warps=4, **launch_options(out.device),
    )
    return out
