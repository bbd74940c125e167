"""What a scoring pass leaves for "softmax_mean": logits of every query head, and what is needed to normalise them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._math import finite_or_zero, join_previous, launch_options, next_power_of_2


@triton.jit
def forced(scores, page, valid_pages, sink_pages, recent_pages):
    """-inf beyond the valid pages, +inf on the pages that must be chosen."""
    always = (page < sink_pages) | (page >= valid_pages - recent_pages)
    return tl.where(page < valid_pages, tl.where(always, float("inf"), scores), float("-inf"))


@triton.jit
def share_offsets(PartMax, PartSum, row, blocks, GROUP: tl.constexpr, BLOCKS: tl.constexpr):
    """What to subtract from a logit of each of the row's GROUP query heads, so that exp2 gives its softmax over all pages,
    divided by GROUP: [GROUP rounded up]."""
    g = tl.arange(0, triton.next_power_of_2(GROUP))[:, None]
    part = tl.arange(0, BLOCKS)[None, :]
    at = (row * GROUP + g) * blocks + part
    ok = (g < GROUP) & (part < blocks)
    peaks = tl.load(PartMax + at, mask=ok, other=float("-inf"))
    masses = tl.load(PartSum + at, mask=ok, other=0.0)
    peak = finite_or_zero(tl.max(peaks, 1))
    mass = tl.sum(masses * tl.exp2(peaks - peak[:, None]), 1)
    return peak + tl.log2(tl.where(mass > 0, mass, 1.0) * GROUP)


@triton.jit
def mean_share(Logits, offsets, row, page, pages, GROUP: tl.constexpr):
    """The mean over the row's query heads of their softmax over all pages: [R, N], for page [R, N]."""
    g = tl.arange(0, triton.next_power_of_2(GROUP))[:, None, None]
    at = (row * GROUP + g) * pages + page[None, :, :]
    logits = tl.load(Logits + at, mask=(g < GROUP) & (page < pages)[None, :, :], other=float("-inf"))
    return tl.sum(tl.exp2(logits - offsets[:, None, None]), 0)


@triton.jit
def _page_softmax_kernel(
    Logits, PartMax, PartSum, Length, Out, pages, blocks, page_size, sink_pages, recent_pages,
    GROUP: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_P: tl.constexpr, DEPENDENT: tl.constexpr,
):
    """One (block of pages, row): the scores themselves, for those who want more of them than the best."""
    join_previous(DEPENDENT, True)
    row = tl.program_id(1).to(tl.int64)
    page = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)[None, :]
    valid_pages = tl.cdiv(tl.load(Length + row).to(tl.int32), page_size)
    offsets = share_offsets(PartMax, PartSum, row, blocks, GROUP, BLOCKS)
    scores = mean_share(Logits, offsets, row, page, pages, GROUP)
    tl.store(Out + row * pages + page, forced(scores, page, valid_pages, sink_pages, recent_pages), mask=page < pages)


@dataclass(frozen=True)
class Bounds:
    """The first pass of "softmax_mean".

    Attributes:
        logits: fp32 [B, Hq, P] in units of log 2, -inf where nothing is valid.
        parts: fp32 [2, B * Hq, blocks]: the maximum of each block of pages, and the sum of 2 ** (logit - maximum).
        length: [B, H] valid entries.
        page_size, sink_pages, recent_pages: as of `ops.page_scores`.
        block: pages of a program that writes all the scores.
    """

    logits: Tensor
    parts: Tensor
    length: Tensor
    page_size: int
    sink_pages: int
    recent_pages: int
    block: int

    @property
    def shape(self) -> tuple[int, int]:
        """Rows (key/value heads of all batch rows) and pages."""
        return self.length.numel(), self.logits.shape[2]

    def arguments(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.logits, self.parts[0], self.parts[1], self.length

    def numbers(self, warps: int) -> tuple[tuple[int, ...], dict[str, int]]:
        """Arguments of the kernels, of so many warps, that reduce these bounds: numbers, and compile-time constants."""
        blocks = self.parts.shape[-1]
        group = self.logits.shape[0] * self.logits.shape[1] // self.shape[0]
        # one part a thread at least: fewer would be laid out unlike the logits, which would move through shared memory
        padded = max(next_power_of_2(blocks), 32 * warps)
        return (blocks, self.page_size, self.sink_pages, self.recent_pages), dict(GROUP=group, BLOCKS=padded)

    def reduced(self) -> Tensor:
        """The scores, fp32 [rows, P]."""
        rows, pages = self.shape
        out = torch.empty(rows, pages, dtype=torch.float32, device=self.logits.device)
        if not pages:
            return out
        numbers, constants = self.numbers(warps=4)
        _page_softmax_kernel[(triton.cdiv(pages, self.block), rows)](
            *self.arguments(), out, pages, *numbers, **constants, BLOCK_P=self.block, num_warps=4, **launch_options(out.device),
        )
        return out
