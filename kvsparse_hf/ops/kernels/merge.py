"""Merging the partial results of attention that was split over the keys."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._math import LN2, LOG2E, finite_or_zero, join_previous, launch_options, next_power_of_2

_COLUMNS = 32
_SPLITS = 64


@triton.jit
def _merge_splits_kernel(
    Part, PartMax, PartSum, Sinks, Out, Lse,
    out_stride_b, out_stride_h, out_stride_t, splits, tokens, Pad,
    HEADS_Q: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr, ALL_SPLITS: tl.constexpr, BLOCK_S: tl.constexpr,
    HAS_SINKS: tl.constexpr, HAS_PAD: tl.constexpr, HAS_LSE: tl.constexpr, DEPENDENT: tl.constexpr,
):
    """One (batch row, query head, token) and one slice of the head size: sum_s 2^(m_s - m) acc_s / denominator."""
    join_previous(DEPENDENT, True)
    row = tl.program_id(0).to(tl.int64)
    dv = tl.program_id(1) * BLOCK_DV + tl.arange(0, BLOCK_DV)
    token = row % tokens
    head = (row // tokens) % HEADS_Q
    batch = row // tokens // HEADS_Q
    s_all = tl.arange(0, ALL_SPLITS)
    if BLOCK_S == ALL_SPLITS:  # one tile: ask for it before waiting for the weights
        part = tl.load(Part + (row * splits + s_all)[:, None] * DV + dv[None, :],
                       mask=(s_all < splits)[:, None] & (dv < DV)[None, :], other=0.0)
    m_all = tl.load(PartMax + row * splits + s_all, mask=s_all < splits, other=float("-inf"))
    l_all = tl.load(PartSum + row * splits + s_all, mask=s_all < splits, other=0.0)
    m = tl.max(m_all, 0)
    if HAS_SINKS:
        sink = tl.load(Sinks + head).to(tl.float32) * LOG2E
        m = tl.maximum(m, sink)
    safe = finite_or_zero(m)
    weight = tl.exp2(m_all - safe)
    # an empty split wrote m = -inf and nothing else: its l and acc are whatever the memory held
    total = tl.sum(tl.where(weight > 0, weight * l_all, 0.0), 0)
    if HAS_SINKS:
        total += tl.exp2(sink - safe)

    if BLOCK_S == ALL_SPLITS:
        acc = tl.sum(tl.where(weight[:, None] > 0, part * weight[:, None], 0.0), 0)
    else:
        acc = tl.zeros([BLOCK_DV], tl.float32)
        for first in range(0, splits, BLOCK_S):
            s = first + tl.arange(0, BLOCK_S)
            w = tl.exp2(tl.load(PartMax + row * splits + s, mask=s < splits, other=float("-inf")) - safe)
            part = tl.load(Part + (row * splits + s)[:, None] * DV + dv[None, :],
                           mask=(s < splits)[:, None] & (dv < DV)[None, :], other=0.0)
            acc += tl.sum(tl.where(w[:, None] > 0, part * w[:, None], 0.0), 0)

    empty = total == 0
    if HAS_PAD:
        empty = empty | (token < tl.load(Pad + batch))
    out = tl.where(empty, 0.0, acc / tl.where(empty, 1.0, total))
    out_row = Out + batch * out_stride_b + head * out_stride_h + token * out_stride_t
    tl.store(out_row + dv, out.to(Out.dtype.element_ty), mask=dv < DV)
    if HAS_LSE:
        if tl.program_id(1) == 0:
            lse = tl.where(empty, float("-inf"), (m + tl.log2(tl.where(empty, 1.0, total))) * LN2)
            tl.store(Lse + row, lse)


def partial_buffers(rows: int, splits: int, dim_v: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """acc [rows, splits, Dv], and m and l [rows, splits], all fp32 and uninitialised."""
    stats = torch.empty(2, rows, splits, dtype=torch.float32, device=device)
    return torch.empty(rows, splits, dim_v, dtype=torch.float32, device=device), stats[0], stats[1]


def merge_splits(
    parts: tuple[Tensor, Tensor, Tensor], sinks: Tensor | None, pad: Tensor | None, out: Tensor, lse: Tensor | None
) -> None:
    """Merge into ``out`` [B, Hq, T, Dv] (any strides, last one 1) and ``lse`` [B, Hq, T]."""
    part, part_max, part_sum = parts
    splits, dim_v = part.shape[1:]
    batch, heads_q, tokens = out.shape[:3]
    block_dv = min(_COLUMNS, next_power_of_2(dim_v))
    all_splits = next_power_of_2(splits)
    _merge_splits_kernel[(batch * heads_q * tokens, triton.cdiv(dim_v, block_dv))](
        part, part_max, part_sum, sinks, out, lse,
        out.stride(0), out.stride(1), out.stride(2), splits, tokens, pad,
        HEADS_Q=heads_q, DV=dim_v, BLOCK_DV=block_dv, ALL_SPLITS=all_splits, BLOCK_S=min(_SPLITS, all_splits),
        HAS_SINKS=sinks is not None, HAS_PAD=pad is not None, HAS_LSE=lse is not None,
        num_warps=4, **launch_options(out.device),
    )
