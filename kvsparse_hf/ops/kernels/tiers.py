"""Merges attention over several stores. One launch a layer."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._math import finite_or_zero, join_previous, launch_options, next_power_of_2

MOST = 4


@triton.jit
def _weight(Lse, row, safe):
    return tl.exp(tl.load(Lse + row) - safe)


@triton.jit
def _merge_attention_kernel(
    Out0, Out1, Out2, Out3, Lse0, Lse1, Lse2, Lse3, Out, Lse,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, COUNT: tl.constexpr, DEPENDENT: tl.constexpr,
):
    """One (batch row, query head)."""
    join_previous(DEPENDENT, True)
    row = tl.program_id(0).to(tl.int64)
    dv = tl.arange(0, BLOCK_DV)
    at = row * DV + dv
    peak = tl.load(Lse0 + row)
    if COUNT > 1:
        peak = tl.maximum(peak, tl.load(Lse1 + row))
    if COUNT > 2:
        peak = tl.maximum(peak, tl.load(Lse2 + row))
    if COUNT > 3:
        peak = tl.maximum(peak, tl.load(Lse3 + row))
    safe = finite_or_zero(peak)
    total = _weight(Lse0, row, safe)
    acc = tl.load(Out0 + at, mask=dv < DV, other=0.0).to(tl.float32) * total
    if COUNT > 1:
        weight = _weight(Lse1, row, safe)
        acc += tl.load(Out1 + at, mask=dv < DV, other=0.0).to(tl.float32) * weight
        total += weight
    if COUNT > 2:
        weight = _weight(Lse2, row, safe)
        acc += tl.load(Out2 + at, mask=dv < DV, other=0.0).to(tl.float32) * weight
        total += weight
    if COUNT > 3:
        weight = _weight(Lse3, row, safe)
        acc += tl.load(Out3 + at, mask=dv < DV, other=0.0).to(tl.float32) * weight
        total += weight
    empty = total == 0
    divisor = tl.where(empty, 1.0, total)
    tl.store(Out + at, (acc / divisor).to(Out.dtype.element_ty), mask=dv < DV)
    tl.store(Lse + row, tl.where(empty, float("-inf"), safe + tl.log(divisor)))


def merge_attention(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    """See :func:`kvsparse_hf.ops.merge_attention`."""
    if not 1 <= len(outs) <= MOST:
        raise ValueError(f"merge_attention takes 1 to {MOST} partial results, got {len(outs)}")
    outs, lses = [out.contiguous() for out in outs], [lse.contiguous() for lse in lses]
    batch, heads_q, dim_v = outs[0].shape
    out, lse = torch.empty_like(outs[0]), torch.empty_like(lses[0])
    spare = [outs[0]] * (MOST - len(outs)), [lses[0]] * (MOST - len(outs))
    _merge_attention_kernel[(batch * heads_q,)](
        *outs, *spare[0], *lses, *spare[1], out, lse,
        DV=dim_v, BLOCK_DV=next_power_of_2(dim_v), COUNT=len(outs), num_warps=1, **launch_options(out.device),
    )
    return out, lse
