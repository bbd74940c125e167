"""Attention that each key receives from the last W queries (W may be all of them), without the attention matrix.

Two passes over the keys: the softmax denominators of the query rows, then the column sums. Every output column belongs
to one program, so there are no atomics and the result is the same every time.

A *row block* is GB query heads of one group times BW queries: row r is head r // BW and query r % BW of the block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._math import (
    LN2,
    LOG2E,
    dot_precision,
    finite_or_zero,
    inner_contiguous,
    join_previous,
    launch_options,
    log2_logits,
    multiprocessors,
    next_power_of_2,
)
from .plan import plan_scores


@triton.jit
def _rows_of_block(block, offset, window, pad, query_blocks, GROUP: tl.constexpr, GB: tl.constexpr, BW: tl.constexpr):
    """Head in the group, query, key index and validity [GB * BW] of the rows of a row block."""
    r = tl.arange(0, GB * BW)
    g = block // query_blocks * GB + r // BW
    w = block % query_blocks * BW + r % BW
    at = offset + w
    return g, w, at, (g < GROUP) & (w < window) & (at >= pad)


@triton.jit
def _load_queries(Q, g, w, ok, stride_h, stride_w, D: tl.constexpr, BLOCK_D: tl.constexpr, dtype: tl.constexpr):
    d = tl.arange(0, BLOCK_D)
    at = Q + g[:, None].to(tl.int64) * stride_h + w[:, None].to(tl.int64) * stride_w + d[None, :]
    return tl.load(at, mask=ok[:, None] & (d < D)[None, :], other=0.0).to(dtype)


@triton.jit
def _load_keys(K, n, total, stride_n, D: tl.constexpr, BLOCK_D: tl.constexpr):
    d = tl.arange(0, BLOCK_D)
    mask = (n < total)[:, None]
    if D != BLOCK_D:
        mask = mask & (d < D)[None, :]
    return tl.load(K + n[:, None].to(tl.int64) * stride_n + d[None, :], mask=mask, other=0.0)


@triton.jit
def _lse_steps(q, at, K, k_stride_n, lo, hi, pad, peak, mass, scale, softcap,
               D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
               HAS_SOFTCAP: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr):
    for first in range(lo, hi, BLOCK_N):
        n = first + tl.arange(0, BLOCK_N)
        k = _load_keys(K, n, hi, k_stride_n, D, BLOCK_D)
        logits = log2_logits(tl.dot(q, k.T, input_precision=PRECISION), scale, softcap, HAS_SOFTCAP)
        if MASKED:
            ok = ((n >= pad) & (n < hi))[None, :] & (n[None, :] <= at[:, None])
            logits = tl.where(ok, logits, float("-inf"))
        new = tl.maximum(peak, tl.max(logits, 1))
        safe = finite_or_zero(new)
        mass = mass * tl.exp2(peak - safe) + tl.sum(tl.exp2(logits - safe[:, None]), 1)
        peak = new
    return peak, mass


@triton.jit
def _query_lse_kernel(
    Q, K, Pad, Lse, PartMax, PartSum,
    q_stride_b, q_stride_h, q_stride_w, k_stride_b, k_stride_h, k_stride_n,
    window, total, query_blocks, tokens_per_split, scale, softcap,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    GB: tl.constexpr, BW: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_PAD: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One (row block, split of the keys, KV head and batch row): maximum and mass of the rows, in units of log 2."""
    join_previous(DEPENDENT, False)
    # the last row blocks see the most keys and go first
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    split = tl.program_id(1)
    unit = tl.program_id(2).to(tl.int64)
    batch = unit // HEADS
    head = unit % HEADS
    pad = 0
    if HAS_PAD:
        pad = tl.load(Pad + batch).to(tl.int32)
    offset = total - window
    g, w, at, ok = _rows_of_block(block, offset, window, pad, query_blocks, GROUP, GB, BW)
    q = _load_queries(Q + batch * q_stride_b + head * GROUP * q_stride_h, g, w, ok, q_stride_h, q_stride_w,
                      D, BLOCK_D, K.dtype.element_ty)
    keys = K + batch * k_stride_b + head * k_stride_h

    first_query = offset + block % query_blocks * BW
    last_query = tl.minimum(first_query + BW, total) - 1
    lo = tl.maximum(split * tokens_per_split, pad // BLOCK_N * BLOCK_N)
    hi = tl.minimum((split + 1) * tokens_per_split, last_query + 1)
    inner = tl.where(pad > lo, lo + BLOCK_N, lo)
    diagonal = inner + tl.maximum(tl.minimum(hi, first_query + 1) - inner, 0) // BLOCK_N * BLOCK_N
    peak = tl.full([GB * BW], float("-inf"), tl.float32)
    mass = tl.zeros([GB * BW], tl.float32)
    if HAS_PAD:
        peak, mass = _lse_steps(q, at, keys, k_stride_n, lo, tl.minimum(inner, hi), pad, peak, mass, scale, softcap,
                                D, BLOCK_D, BLOCK_N, HAS_SOFTCAP, True, PRECISION)
    peak, mass = _lse_steps(q, at, keys, k_stride_n, inner, tl.minimum(diagonal, hi), pad, peak, mass, scale, softcap,
                            D, BLOCK_D, BLOCK_N, HAS_SOFTCAP, False, PRECISION)
    peak, mass = _lse_steps(q, at, keys, k_stride_n, diagonal, hi, pad, peak, mass, scale, softcap,
                            D, BLOCK_D, BLOCK_N, HAS_SOFTCAP, True, PRECISION)

    row = (unit * GROUP + g) * window + w
    inside = (g < GROUP) & (w < window)
    if SPLIT:
        tl.store(PartMax + row * tl.num_programs(1) + split, peak, mask=inside)
        tl.store(PartSum + row * tl.num_programs(1) + split, mass, mask=inside)
    else:
        lse = tl.where(mass > 0, (peak + tl.log2(tl.where(mass > 0, mass, 1.0))) * LN2, float("-inf"))
        tl.store(Lse + row, lse, mask=inside)


@triton.jit
def _merge_lse_kernel(PartMax, PartSum, Lse, rows, splits, ROWS: tl.constexpr, SPLITS: tl.constexpr,
                      DEPENDENT: tl.constexpr):
    """A few rows of [rows, splits] each: log of the summed masses."""
    join_previous(DEPENDENT, False)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    s = tl.arange(0, SPLITS)
    mask = (row < rows)[:, None] & (s < splits)[None, :]
    at = row[:, None].to(tl.int64) * splits + s[None, :]
    peaks = tl.load(PartMax + at, mask=mask, other=float("-inf"))
    masses = tl.load(PartSum + at, mask=mask, other=0.0)
    peak = finite_or_zero(tl.max(peaks, 1))
    mass = tl.sum(masses * tl.exp2(peaks - peak[:, None]), 1)
    lse = tl.where(mass > 0, (peak + tl.log2(tl.where(mass > 0, mass, 1.0))) * LN2, float("-inf"))
    tl.store(Lse + row, lse, mask=row < rows)


@triton.jit
def _received(q, k, n, at, lse, scale, softcap, HAS_SOFTCAP: tl.constexpr, MASKED: tl.constexpr,
              PRECISION: tl.constexpr):
    """Attention [N, rows] that keys n receive; lse in units of log 2, +inf for rows that count for nothing."""
    logits = log2_logits(tl.dot(k, q.T, input_precision=PRECISION), scale, softcap, HAS_SOFTCAP)
    if MASKED:
        logits = tl.where(n[:, None] <= at[None, :], logits, float("-inf"))
    return tl.exp2(logits - lse[None, :])


@triton.jit
def _load_lse(Lse, g, w, ok, window):
    lse = tl.load(Lse + g.to(tl.int64) * window + w, mask=ok, other=float("inf"))
    return tl.where(lse == float("-inf"), float("inf"), lse) * LOG2E


@triton.jit
def _per_head(received, KEPT: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr):
    """[N, ROWS] -> [N, KEPT]: the maximum over the group needs one sum per head, the mean needs only one in all."""
    if KEPT == 1:
        sums = tl.sum(received, 1)[:, None]
    else:
        sums = tl.sum(tl.reshape(received, [N, KEPT, ROWS // KEPT]), 2)
    return sums


@triton.jit
def _column_sums_kernel(
    Q, K, Pad, Lse, Out,
    q_stride_b, q_stride_h, q_stride_w, k_stride_b, k_stride_h, k_stride_n,
    window, total, query_blocks, key_tiles, scale, softcap, factor,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    GB: tl.constexpr, BW: tl.constexpr, BLOCK_N: tl.constexpr, MAX: tl.constexpr, ONE_BLOCK: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_PAD: tl.constexpr, PRECISION: tl.constexpr, DEPENDENT: tl.constexpr,
):
    """One (run of ``key_tiles`` key tiles, KV head and batch row).

    ONE_BLOCK: all query rows fit one row block, which stays on chip while the keys stream by.
    """
    join_previous(DEPENDENT, False)
    KEPT: tl.constexpr = GB if MAX else 1
    unit = tl.program_id(1).to(tl.int64)
    batch = unit // HEADS
    head = unit % HEADS
    pad = 0
    if HAS_PAD:
        pad = tl.load(Pad + batch).to(tl.int32)
    offset = total - window
    queries = Q + batch * q_stride_b + head * GROUP * q_stride_h
    keys = K + batch * k_stride_b + head * k_stride_h
    lses = Lse + unit * GROUP * window
    if ONE_BLOCK:
        g, w, at, ok = _rows_of_block(0, offset, window, pad, 1, GROUP, GB, BW)
        q = _load_queries(queries, g, w, ok, q_stride_h, q_stride_w, D, BLOCK_D, K.dtype.element_ty)
        lse = _load_lse(lses, g, w, ok, window)

    first = tl.program_id(0) * key_tiles * BLOCK_N
    for start in range(first, tl.minimum(first + key_tiles * BLOCK_N, total), BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        k = _load_keys(keys, n, total, k_stride_n, D, BLOCK_D)
        if ONE_BLOCK:
            result = tl.max(_per_head(_received(q, k, n, at, lse, scale, softcap, HAS_SOFTCAP, True, PRECISION),
                                      KEPT, BLOCK_N, GB * BW), 1)
        else:
            result = tl.zeros([BLOCK_N], tl.float32)
            # queries before this tile of keys see none of it, queries behind it see all of it
            begin = tl.maximum(start - offset, 0) // BW
            whole = tl.minimum(tl.cdiv(tl.maximum(start + BLOCK_N - 1 - offset, 0), BW), query_blocks)
            for heads_block in range(0, (GROUP + GB - 1) // GB):
                acc = tl.zeros([BLOCK_N, KEPT], tl.float32)
                for block in range(heads_block * query_blocks + begin, heads_block * query_blocks + whole):
                    g, w, at, ok = _rows_of_block(block, offset, window, pad, query_blocks, GROUP, GB, BW)
                    q = _load_queries(queries, g, w, ok, q_stride_h, q_stride_w, D, BLOCK_D, K.dtype.element_ty)
                    lse = _load_lse(lses, g, w, ok, window)
                    acc += _per_head(_received(q, k, n, at, lse, scale, softcap, HAS_SOFTCAP, True, PRECISION),
                                     KEPT, BLOCK_N, GB * BW)
                for block in range(heads_block * query_blocks + whole, (heads_block + 1) * query_blocks):
                    g, w, at, ok = _rows_of_block(block, offset, window, pad, query_blocks, GROUP, GB, BW)
                    q = _load_queries(queries, g, w, ok, q_stride_h, q_stride_w, D, BLOCK_D, K.dtype.element_ty)
                    lse = _load_lse(lses, g, w, ok, window)
                    acc += _per_head(_received(q, k, n, at, lse, scale, softcap, HAS_SOFTCAP, False, PRECISION),
                                     KEPT, BLOCK_N, GB * BW)
                if MAX:
                    result = tl.maximum(result, tl.max(acc, 1))
                else:
                    result += tl.max(acc, 1)
        tl.store(Out + unit * total + n, tl.where(n >= pad, result * factor, 0.0), mask=n < total)


def column_sums(
    q: Tensor,
    k: Tensor,
    *,
    scale: float,
    pad: Tensor | None,
    softcap: float,
    lse: Tensor | None,
    group_reduce: str,
) -> Tensor:
    """See :func:`kvsparse_hf.ops.column_sums`; q [B, Hq, W, D] may be the last W <= N queries only."""
    if group_reduce not in ("mean", "max", "sum"):
        raise ValueError(f"group_reduce must be 'mean', 'max' or 'sum', got {group_reduce!r}")
    batch, heads_q, window, dim = q.shape
    heads, total = k.shape[1], k.shape[2]
    group = heads_q // heads
    q, k = inner_contiguous(q), inner_contiguous(k)
    pad = None if pad is None else pad.contiguous()
    out = torch.empty(batch, heads, total, dtype=torch.float32, device=k.device)
    block_d = max(16, next_power_of_2(dim))
    plan = plan_scores(total, window, group, batch * heads, block_d, k.element_size(), multiprocessors(k.device))
    strides = (*q.stride()[:3], *k.stride()[:3])
    common = dict(
        HEADS=heads, GROUP=group, D=dim, BLOCK_D=block_d, GB=plan.heads, BW=plan.queries,
        HAS_SOFTCAP=softcap > 0, HAS_PAD=pad is not None, PRECISION=dot_precision(k.dtype), **launch_options(k.device),
    )
    if lse is None:
        rows = batch * heads_q * window
        lse = torch.empty(batch, heads_q, window, dtype=torch.float32, device=k.device)
        parts = torch.empty(2, rows, plan.splits, dtype=torch.float32, device=k.device)
        _query_lse_kernel[(plan.row_blocks, plan.splits, batch * heads)](
            q, k, pad, lse, parts[0], parts[1], *strides,
            window, total, plan.query_blocks, plan.tokens, scale, softcap, SPLIT=plan.splits > 1, BLOCK_N=plan.tile.keys,
            num_warps=plan.tile.warps, num_stages=plan.tile.stages, **common,
        )
        if plan.splits > 1:
            _merge_lse_kernel[(triton.cdiv(rows, 8),)](
                parts[0], parts[1], lse, rows, plan.splits, ROWS=8, SPLITS=next_power_of_2(plan.splits), num_warps=4,
                **launch_options(k.device),
            )
    else:
        lse = lse.to(torch.float32).contiguous()
    _column_sums_kernel[(triton.cdiv(total, plan.key_tiles * plan.sums.keys), batch * heads)](
        q, k, pad, lse, out, *strides,
        window, total, plan.query_blocks, plan.key_tiles, scale, softcap,
        1 / group if group_reduce == "mean" else 1.0,
        MAX=group_reduce == "max", ONE_BLOCK=plan.row_blocks == 1, BLOCK_N=plan.sums.keys, num_warps=plan.sums.warps,
        num_stages=plan.sums.stages, **common,
    )
    return out
