"""Scores of single tokens: the logits of (leading components of) their keys, reduced over the query heads of a KV head."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..reference._common import check_reduction
from ._math import (
    LN2,
    dot_precision,
    finite_or_zero,
    inner_contiguous,
    join_previous,
    launch_options,
    log2_logits,
    next_power_of_2,
    require_contiguous,
)
from .bounds import Bounds, forced
from .topk import topk_bounds, topk_pages


@triton.jit
def _token_logit_kernel(
    Q, Keys, Length, Out, PartMax, PartSum,
    q_stride_b, q_stride_h, tokens, row, scale, softcap, sinks, recent,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    REDUCE: tl.constexpr, HAS_SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, DEPENDENT: tl.constexpr,
):
    """One (block of tokens, KV head, batch row); outputs as those of the page kernel, for pages of one token.

    A key is the first D of ``row`` numbers.
    """
    join_previous(DEPENDENT, True)
    block = tl.program_id(0)
    head = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    unit = batch * HEADS + head
    token = block * BLOCK_N + tl.arange(0, BLOCK_N)
    g = tl.arange(0, BLOCK_G)
    d = tl.arange(0, BLOCK_D)
    g_ok = g < GROUP
    q = tl.load(Q + batch * q_stride_b + (head * GROUP + g)[:, None] * q_stride_h + d[None, :],
                mask=g_ok[:, None] & (d < D)[None, :], other=0.0).to(Keys.dtype.element_ty)
    length = tl.load(Length + unit).to(tl.int32)
    valid = token < length
    keys = tl.load(Keys + (unit * tokens + token)[:, None] * row + d[None, :],
                   mask=valid[:, None] & (d < D)[None, :], other=0.0)
    logits = log2_logits(tl.dot(q, keys.T, input_precision=PRECISION), scale, softcap, HAS_SOFTCAP)

    if REDUCE == "softmax_mean":
        logits = tl.where(valid[None, :], logits, float("-inf"))
        peak = tl.max(logits, 1)
        mass = tl.sum(tl.exp2(logits - finite_or_zero(peak)[:, None]), 1)
        at = unit * GROUP + g
        tl.store(Out + at[:, None] * tokens + token[None, :], logits, mask=g_ok[:, None] & (token < tokens)[None, :])
        tl.store(PartMax + at * tl.num_programs(0) + block, peak, mask=g_ok)
        tl.store(PartSum + at * tl.num_programs(0) + block, mass, mask=g_ok)
    else:
        if REDUCE == "max":
            reduced = tl.max(tl.where(g_ok[:, None], logits, float("-inf")), 0) * LN2
        else:
            reduced = tl.sum(logits, 0) * (LN2 / GROUP)
        tl.store(Out + unit * tokens + token, forced(reduced, token, length, sinks, recent), mask=token < tokens)


def _score_tokens(
    q: Tensor,
    keys: Tensor,
    length: Tensor,
    *,
    dims: int,
    scale: float,
    softcap: float,
    group_reduce: str,
    sinks: int,
    recent: int,
) -> Tensor | Bounds:
    """The first pass: final scores [B, H, C], or what "softmax_mean" has still to reduce."""
    check_reduction(group_reduce)
    batch, heads, tokens, row = keys.shape
    group = q.shape[1] // heads
    require_contiguous(keys=keys)
    q, length = inner_contiguous(q), length.contiguous()
    block_d = max(16, next_power_of_2(dims))
    block = 256 if block_d * keys.element_size() <= 128 else 128
    blocks = triton.cdiv(tokens, block)
    softmax = group_reduce == "softmax_mean"
    parts = torch.empty(2, batch * heads * group, blocks, dtype=torch.float32, device=q.device) if softmax else None
    out = torch.empty(batch, heads * (group if softmax else 1), tokens, dtype=torch.float32, device=q.device)
    if tokens:
        _token_logit_kernel[(blocks, heads, batch)](
            q, keys, length, out, *((parts[0], parts[1]) if softmax else (None, None)),
            q.stride(0), q.stride(1), tokens, row, scale, softcap, sinks, recent,
            HEADS=heads, GROUP=group, D=dims, BLOCK_G=max(16, next_power_of_2(group)), BLOCK_D=block_d, BLOCK_N=block,
            REDUCE=group_reduce, HAS_SOFTCAP=softcap > 0, PRECISION=dot_precision(keys.dtype), num_warps=4,
            **launch_options(q.device),
        )
    return Bounds(out, parts, length, 1, sinks, recent, 1024) if softmax else out


def token_scores(q: Tensor, keys: Tensor, length: Tensor, **options) -> Tensor:
    """See :func:`kvsparse_hf.ops.token_scores`."""
    found = _score_tokens(q, keys, length, **options)
    return found.reduced().view(keys.shape[:3]) if isinstance(found, Bounds) else found


def choose_tokens(q: Tensor, keys: Tensor, length: Tensor, k: int, **options) -> Tensor:
    """See :func:`kvsparse_hf.ops.choose_tokens`."""
    found = _score_tokens(q, keys, length, **options)
    return topk_bounds(found, k).view(*keys.shape[:2], k) if isinstance(found, Bounds) else topk_pages(found, k)
