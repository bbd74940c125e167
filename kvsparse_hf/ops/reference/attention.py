"""Attention over a flat store: one decode token, and a chunk of new tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ._common import NEG_INF, acc_dtype, apply_softcap, filled_width, safe_softmax

_QUERY_BLOCK = 512


def _rows_of(store: Tensor, start: Tensor, slots: Tensor, valid: Tensor) -> Tensor:
    """Rows ``start + slots`` of a store [R, D] as [B, H, L, D]; invalid ones are zeros, whatever the memory holds."""
    rows = torch.where(valid, start.unsqueeze(-1) + slots, 0)
    return torch.where(valid.unsqueeze(-1), store[rows], 0)


def _first_rows(stores: Sequence[Tensor], start: Tensor, width: int, valid: Tensor) -> list[Tensor]:
    """The first ``width`` rows of every segment of each store, as [B, H, width, D]; invalid ones are zeros. Segments that lie
    evenly are looked at where they are, which can be known on a CPU outside of a traced step."""
    step = _even_step(start, width, min(map(len, stores)))
    if step is None:
        slots = torch.arange(width, device=start.device).expand(*start.shape, width)
        return [_rows_of(store, start, slots, valid) for store in stores]
    first, full = int(start[0, 0]), bool(valid.all())
    segments = []
    for store in stores:
        row, inner = store.stride()
        shape, strides = (*start.shape, width, store.shape[1]), (start.shape[1] * step * row, step * row, row, inner)
        segments.append(store.as_strided(shape, strides, store.storage_offset() + first * row))
    return segments if full else [torch.where(valid.unsqueeze(-1), segment, 0) for segment in segments]


def _even_step(start: Tensor, width: int, rows: int) -> int | None:
    """Rows from one segment to the next, where that is the same for all and each has ``width`` rows; None where it is not, or
    cannot be known for nothing."""
    if start.device.type != "cpu" or torch.compiler.is_compiling() or start.numel() == 0:
        return None
    starts = start.flatten().tolist()
    step = starts[1] - starts[0] if len(starts) > 1 else max(width, 1)
    even = step >= max(width, 1) and starts == list(range(starts[0], starts[0] + step * len(starts), step))
    return step if even and starts[-1] + width <= rows else None


def decode_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: Tensor,
    length: Tensor,
    *,
    max_len: int,
    scale: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    pages: Tensor | None = None,
    page_size: int = 0,
    page_stride: int = 0,
    return_lse: bool = False,
    return_logits: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Attention of one query token per row over the valid entries of its KV head's segment.

    Args:
        q: [B, Hq, D]; query head h reads KV head h // (Hq // H).
        k, v: [R, D], [R, Dv], the flat store of the layer.
        start, length: [B, H], first row and number of valid entries of each segment.
        max_len: largest length that can occur (a host constant).
        scale: factor of q @ k.
        softcap: c > 0 turns a logit s into c * tanh(s / c).
        sinks: [Hq], an extra logit per query head in the denominator only.
        pages: [B, H, P] int32, page ids relative to the segment; page p covers slots p * page_size and on; -1 = none.
            Only these pages are read. An id listed twice counts twice.
        page_size: slots of a page; needed with ``pages``.
        page_stride: rows from one page to the next, where other rows lie between; 0: page_size.
        return_lse: also return the log of the softmax denominator, the sink included.
        return_logits: also return the scaled, capped logits, -inf where invalid.

    Returns:
        out [B, Hq, Dv] in q's dtype, lse [B, Hq] fp32 or None, logits [B, Hq, max_len or P * page_size] fp32 or None.
        A query with nothing to read gives 0 and lse -inf (or its sink).
    """
    batch, heads_q, dim = q.shape
    heads = start.shape[1]
    acc = acc_dtype(q)
    if pages is None:
        width = filled_width(length, max_len)
        valid = (torch.arange(width, device=q.device) < length.unsqueeze(-1)).expand(batch, heads, width)
        keys, values = (rows.to(acc) for rows in _first_rows((k, v), start, width, valid))
    else:
        within = torch.arange(page_size, device=q.device)
        slots = (pages.long().unsqueeze(-1) * page_size + within).flatten(2)
        rows = (pages.long().unsqueeze(-1) * (page_stride or page_size) + within).flatten(2)
        valid = (slots >= 0) & (slots < length.unsqueeze(-1))
        keys, values = (_rows_of(store, start, rows, valid).to(acc) for store in (k, v))
    queries = q.to(acc).view(batch, heads, heads_q // heads, dim)

    logits = apply_softcap(queries @ keys.transpose(-1, -2) * scale, softcap)
    logits = torch.where(valid.unsqueeze(2), logits, NEG_INF)
    weights, lse = safe_softmax(logits, None if sinks is None else sinks.view(1, heads, -1))
    out = (weights @ values).flatten(1, 2).to(q.dtype)
    if return_logits and pages is None:
        logits = F.pad(logits, (0, max_len - width), value=NEG_INF)
    return (
        out,
        lse.flatten(1, 2).float() if return_lse else None,
        logits.flatten(1, 2).float() if return_logits else None,
    )


def chunk_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: Tensor,
    length: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    *,
    max_len: int,
    scale: float,
    pad: Tensor | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of T new tokens over everything stored and, causally, over themselves.

    Args:
        q: [B, Hq, T, D].
        k, v, start, length, max_len, scale, softcap, sinks: as in :func:`decode_attention`.
        k_new, v_new: [B, H, T, D], [B, H, T, Dv], the new tokens (not yet stored).
        pad: [B] int32, how many of the T new tokens of a row are leading padding: they are never read and give 0.

    Returns:
        out [B, Hq, T, Dv] in q's dtype; with ``return_lse`` also lse [B, Hq, T] fp32 (-inf on padding).
    """
    batch, heads_q, tokens, dim = q.shape
    heads = start.shape[1]
    acc = acc_dtype(q)
    width = filled_width(length, max_len)
    stored = (torch.arange(width, device=q.device) < length.unsqueeze(-1)).expand(batch, heads, width)
    new = torch.arange(tokens, device=q.device)
    real = (torch.ones(batch, tokens, dtype=torch.bool, device=q.device) if pad is None
            else new >= pad.unsqueeze(-1))  # [B, T]
    new_mask = real[:, None, None, :, None].to(acc)
    held_k, held_v = (rows.to(acc) for rows in _first_rows((k, v), start, width, stored))
    keys = torch.cat([held_k, k_new.to(acc)], dim=2).unsqueeze(2)
    values = torch.cat([held_v, torch.where(new_mask.squeeze(2) > 0, v_new.to(acc), 0)], dim=2).unsqueeze(2)
    queries = q.to(acc).view(batch, heads, heads_q // heads, tokens, dim)
    sink = None if sinks is None else sinks.view(1, heads, -1, 1)

    outs, lses = [], []
    for first in range(0, tokens, _QUERY_BLOCK):
        block = slice(first, min(first + _QUERY_BLOCK, tokens))
        causal = (new <= new[block].unsqueeze(-1)) & real.unsqueeze(1)  # [B, t, T]
        valid = torch.cat([stored.unsqueeze(2).expand(-1, -1, causal.shape[1], -1),
                           causal.unsqueeze(1).expand(-1, heads, -1, -1)], dim=-1)
        valid = valid & real[:, None, block, None]
        logits = apply_softcap(queries[:, :, :, block] @ keys.transpose(-1, -2) * scale, softcap)
        weights, lse = safe_softmax(torch.where(valid.unsqueeze(2), logits, NEG_INF), sink)
        is_real = real[:, None, None, block]
        outs.append(weights @ values)
        lses.append(torch.where(is_real, lse, NEG_INF))
    out = torch.cat(outs, dim=3).flatten(1, 2).to(q.dtype)
    return (out, torch.cat(lses, dim=3).flatten(1, 2).float()) if return_lse else out
