"""Attention of one query token over keys and values of 8 or 4 bits, dequantized in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..reference.quantized import LEVELS
from ._math import (
    LN2,
    add_sink,
    attend_tile,
    contiguous,
    dot_precision,
    inner_contiguous,
    join_previous,
    launch_options,
    multiprocessors,
    next_power_of_2,
    normalise,
    require_contiguous,
)
from .merge import merge_splits, partial_buffers
from .plan import plan_decode


@triton.jit
def _e4m3(codes):
    """float8_e4m3fn codes as fp32, by their bits: older devices and the interpreter have no such type."""
    bits = codes.to(tl.int32)
    exponent = (bits >> 3) & 15
    normal = (((exponent + 120) << 23) | ((bits & 7) << 20)).to(tl.float32, bitcast=True)
    size = tl.where(exponent == 0, (bits & 7).to(tl.float32) * 0.001953125, normal)  # 2^-9 below the normal range
    return tl.where((bits & 128) != 0, -size, size)


@triton.jit
def _load_values(Codes, Ranges, rows, ok, columns, D: tl.constexpr, GROUP: tl.constexpr, LEVELS: tl.constexpr):
    """Rows of a quantized store, dequantized: fp32 [N, columns], zeros where not ok. LEVELS is the largest code."""
    BYTES: tl.constexpr = D // 2 if LEVELS == 15 else D
    ENDS: tl.constexpr = 1 if LEVELS == 448 else 2
    mask = ok[:, None] & (columns < D)[None, :]
    # Both halves of a byte are wanted by the same program: the second load finds it in the cache.
    codes = tl.load(Codes + rows[:, None] * BYTES + (columns % BYTES)[None, :], mask=mask, other=0)
    ends = Ranges + rows[:, None] * (D // GROUP * ENDS) + (columns // GROUP * ENDS)[None, :]
    if LEVELS == 448:
        values = _e4m3(codes) * (tl.load(ends, mask=mask, other=0.0).to(tl.float32) / LEVELS)
    else:
        low = tl.load(ends, mask=mask, other=0.0).to(tl.float32)
        high = tl.load(ends + 1, mask=mask, other=0.0).to(tl.float32)
        numbers = codes.to(tl.int32)
        if LEVELS == 15:
            numbers = (numbers >> tl.where(columns < BYTES, 0, 4)[None, :]) & 15
        values = low + numbers.to(tl.float32) * ((high - low) / LEVELS)
    return values


@triton.jit
def _decode_attention_quantized_kernel(
    Q, K, KRanges, V, VRanges, Start, Length, Sinks, Out, Lse, Logits, Part, PartMax, PartSum,
    q_stride_b, q_stride_h, width, tokens_per_split, scale, softcap,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, LEVELS: tl.constexpr,
    CHANNELS: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_N: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_LSE: tl.constexpr,
    HAS_LOGITS: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr, DEPENDENT: tl.constexpr,
):
    """One (split, KV head, batch row). CHANNELS share a range; LEVELS names the format by its largest code."""
    join_previous(DEPENDENT, SPLIT)
    split = tl.program_id(0)
    splits = tl.num_programs(0)
    head = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    unit = batch * HEADS + head
    first_row = tl.load(Start + unit).to(tl.int64)
    lo = split * tokens_per_split
    end = tl.minimum(lo + tokens_per_split, width)
    hi = tl.minimum(end, tl.load(Length + unit).to(tl.int32))

    g = tl.arange(0, BLOCK_G)
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    g_ok = g < GROUP
    head_q = head * GROUP + g
    row_q = unit * GROUP + g  # row of [B, Hq, ...] outputs
    peak = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_DV], tl.float32)
    if HAS_LOGITS:
        for n in range(lo + tl.cdiv(tl.maximum(hi - lo, 0), BLOCK_N) * BLOCK_N, end, BLOCK_N):
            slot = n + tl.arange(0, BLOCK_N)
            tl.store(Logits + row_q[:, None] * width + slot[None, :], peak[:, None],
                     mask=g_ok[:, None] & (slot < end)[None, :])

    q_rows = Q + batch * q_stride_b + head_q.to(tl.int64) * q_stride_h
    q = tl.load(q_rows[:, None] + d[None, :], mask=g_ok[:, None] & (d < D)[None, :], other=0.0)
    for n in range(lo, hi, BLOCK_N):
        slot = n + tl.arange(0, BLOCK_N)
        ok = slot < hi
        k = _load_values(K, KRanges, first_row + slot, ok, d, D, CHANNELS, LEVELS).to(q.dtype)
        v = _load_values(V, VRanges, first_row + slot, ok, dv, DV, CHANNELS, LEVELS).to(q.dtype)
        acc, peak, total, logits = attend_tile(q, k, v, ok[None, :], acc, peak, total, scale, softcap,
                                               HAS_SOFTCAP, True, PRECISION)
        if HAS_LOGITS:
            tl.store(Logits + row_q[:, None] * width + slot[None, :], logits * LN2,
                     mask=g_ok[:, None] & (slot < end)[None, :])

    if SPLIT:
        at = row_q * splits + split
        tl.store(PartMax + at, peak, mask=g_ok)
        tl.store(PartSum + at, total, mask=g_ok)
        tl.store(Part + at[:, None] * DV + dv[None, :], acc, mask=g_ok[:, None] & (dv < DV)[None, :])
    else:
        if HAS_SINKS:
            acc, peak, total = add_sink(acc, peak, total, tl.load(Sinks + head_q, mask=g_ok, other=0.0))
        out, lse = normalise(acc, peak, total)
        tl.store(Out + row_q[:, None] * DV + dv[None, :], out.to(Out.dtype.element_ty),
                 mask=g_ok[:, None] & (dv < DV)[None, :])
        if HAS_LSE:
            tl.store(Lse + row_q, lse, mask=g_ok)


def decode_attention_quantized(
    q: Tensor,
    k: Tensor,
    k_ranges: Tensor,
    v: Tensor,
    v_ranges: Tensor,
    start: Tensor,
    length: Tensor,
    *,
    format: str,
    group: int,
    max_len: int,
    scale: float,
    softcap: float,
    sinks: Tensor | None,
    return_lse: bool,
    return_logits: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`kvsparse_hf.ops.decode_attention_quantized`; results not asked for are empty."""
    batch, heads_q, dim = q.shape
    heads, dim_v = start.shape[1], v_ranges.shape[1] * group
    require_contiguous(k=k, v=v, k_ranges=k_ranges, v_ranges=v_ranges)
    q = inner_contiguous(q)
    start, length, sinks = contiguous(start, length, sinks)
    out = torch.empty(batch, heads_q, dim_v, dtype=q.dtype, device=q.device)
    lse = torch.empty((batch, heads_q) if return_lse else (0,), dtype=torch.float32, device=q.device)
    logits = torch.empty((batch, heads_q, max_len) if return_logits else (0,), dtype=torch.float32, device=q.device)

    block_d, block_dv = max(16, next_power_of_2(dim)), max(16, next_power_of_2(dim_v))
    # The dequantized tile lies in registers in q's dtype, which is what the tile sizes were measured for.
    plan = plan_decode(max_len, batch * heads, max(block_d, block_dv), q.element_size(), multiprocessors(q.device))
    split = plan.splits > 1
    parts = partial_buffers(batch * heads_q, plan.splits, dim_v, q.device) if split else (None, None, None)
    _decode_attention_quantized_kernel[(plan.splits, heads, batch)](
        q, k, k_ranges, v, v_ranges, start, length, sinks, out, lse, logits, *parts,
        q.stride(0), q.stride(1), max_len, plan.tokens, scale, softcap,
        HEADS=heads, GROUP=heads_q // heads, D=dim, DV=dim_v, LEVELS=LEVELS[format], CHANNELS=group,
        BLOCK_G=max(16, next_power_of_2(heads_q // heads)), BLOCK_D=block_d, BLOCK_DV=block_dv,
        BLOCK_N=plan.tile.keys, HAS_SOFTCAP=softcap > 0, HAS_SINKS=sinks is not None, HAS_LSE=return_lse,
        HAS_LOGITS=return_logits, SPLIT=split, PRECISION=dot_precision(q.dtype), **launch_options(q.device),
        num_warps=plan.tile.warps, num_stages=plan.tile.stages,
    )
    if split:
        merge_splits(parts, sinks, None, out.unsqueeze(2), lse.unsqueeze(-1) if return_lse else None)
    return out, lse, logits
