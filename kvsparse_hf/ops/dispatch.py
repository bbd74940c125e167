"""The public ops: one function each, same arguments as its reference plus ``backend``."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from . import custom, reference
from .backend import resolve, through_dispatcher


def store_token(
    k: Tensor,
    v: Tensor,
    pos: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    new_pos: Tensor,
    start: Tensor,
    capacity: Tensor,
    length: Tensor,
    pinned: Tensor,
    cursor: Tensor,
    slot_override: Tensor | None = None,
    summary: Tensor | None = None,
    page_size: int = 0,
    *,
    backend: str = "auto",
) -> None:
    state = (start, capacity, length, pinned, cursor)
    args = (k, v, pos, k_new, v_new, new_pos, *state, slot_override, summary, page_size)
    dims = (k.shape[-1], v.shape[-1])
    if resolve("store_token", backend, k, v, k_new, v_new, dims=dims) == "torch":
        reference.store_token(*args)
    elif through_dispatcher(k_new, v_new):
        torch.ops.kvsparse.store_token(*args)
    else:
        custom.launch_store_token(*args)


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
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    options = dict(
        max_len=max_len, scale=scale, softcap=softcap, sinks=sinks, pages=pages, page_size=page_size,
        page_stride=page_stride, return_lse=return_lse, return_logits=return_logits,
    )
    chosen = resolve("decode_attention", backend, q, k, v, dims=(k.shape[-1], v.shape[-1]), flash=True)
    if chosen == "torch":
        return reference.decode_attention(q, k, v, start, length, **options)
    if chosen == "flash":
        from .flash import decode_attention as flash_decode_attention

        return flash_decode_attention(q, k, v, start, length, **options)
    if through_dispatcher(q, k, v, sinks):
        out, lse, logits = torch.ops.kvsparse.decode_attention(q, k, v, start, length, **options)
    else:
        out, lse, logits = custom.launch_decode_attention(q, k, v, start, length, **options)
    return out, lse if return_lse else None, logits if return_logits else None


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
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    return_logits: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    args = (q, k, k_ranges, v, v_ranges, start, length)
    options = dict(format=format, group=group, max_len=max_len, scale=scale, softcap=softcap, sinks=sinks,
                   return_lse=return_lse, return_logits=return_logits)
    dims = (q.shape[-1], v_ranges.shape[1] * group)
    if resolve("decode_attention_quantized", backend, q, k_ranges, v_ranges, dims=dims) == "torch":
        return reference.decode_attention_quantized(*args, **options)
    if through_dispatcher(q, sinks):
        out, lse, logits = torch.ops.kvsparse.decode_attention_quantized(*args, **options)
    else:
        out, lse, logits = custom.launch_decode_attention_quantized(*args, **options)
    return out, lse if return_lse else None, logits if return_logits else None


def merge_attention(outs: list[Tensor], lses: list[Tensor], *, backend: str = "auto") -> tuple[Tensor, Tensor]:
    if resolve("merge_attention", backend, *outs) == "torch":
        return reference.merge_attention(outs, lses)
    if through_dispatcher(*outs):
        return torch.ops.kvsparse.merge_attention(outs, lses)
    return custom.launch_merge_attention(outs, lses)


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
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    args = (q, k, v, start, length, k_new, v_new)
    options = dict(max_len=max_len, scale=scale, pad=pad, softcap=softcap, sinks=sinks, return_lse=return_lse)
    dims = (k.shape[-1], v.shape[-1])
    if resolve("chunk_attention", backend, q, k, v, k_new, v_new, dims=dims) == "torch":
        return reference.chunk_attention(*args, **options)
    if through_dispatcher(q, k, v, k_new, v_new, sinks):
        out, lse = torch.ops.kvsparse.chunk_attention(*args, **options)
    else:
        out, lse = custom.launch_chunk_attention(*args, **options)
    return (out, lse) if return_lse else out


def window_scores(
    q_win: Tensor,
    k: Tensor,
    *,
    scale: float,
    pad: Tensor | None = None,
    softcap: float = 0.0,
    group_reduce: str = "mean",
    backend: str = "auto",
) -> Tensor:
    options = dict(scale=scale, pad=pad, softcap=softcap, group_reduce=group_reduce)
    if resolve("window_scores", backend, q_win, k, dims=(k.shape[-1],)) == "torch":
        return reference.window_scores(q_win, k, **options)
    if through_dispatcher(q_win, k):
        return torch.ops.kvsparse.column_sums(q_win, k, lse=None, **options)
    return custom.launch_column_sums(q_win, k, lse=None, **options)


def column_sums(
    q: Tensor,
    k: Tensor,
    *,
    scale: float,
    pad: Tensor | None = None,
    softcap: float = 0.0,
    lse: Tensor | None = None,
    group_reduce: str = "mean",
    backend: str = "auto",
) -> Tensor:
    options = dict(scale=scale, pad=pad, softcap=softcap, lse=lse, group_reduce=group_reduce)
    if resolve("column_sums", backend, q, k, dims=(k.shape[-1],)) == "torch":
        return reference.column_sums(q, k, **options)
    if through_dispatcher(q, k):
        return torch.ops.kvsparse.column_sums(q, k, **options)
    return custom.launch_column_sums(q, k, **options)


def follow_token(
    scores: Tensor,
    cursor: Tensor,
    pos: Tensor,
    logits: Tensor,
    lse: Tensor,
    start: Tensor,
    length: Tensor,
    capacity: Tensor,
    newest: Tensor,
    *,
    decay: float = 1.0,
    accumulate: bool = True,
    per_query: bool = False,
    across_heads: bool = False,
    sinks: int = 0,
    recent: int = 0,
    backend: str = "auto",
) -> None:
    tensors = (scores, cursor, pos, logits, lse, start, length, capacity, newest)
    if resolve("follow_token", backend, scores, logits) == "torch":
        options = dict(accumulate=accumulate, per_query=per_query, across_heads=across_heads)
        reference.follow_token(*tensors, decay=decay, sinks=sinks, recent=recent, **options)
        return
    rule = (decay, math.log2(decay), accumulate, per_query, across_heads, sinks, recent)
    if through_dispatcher(logits):
        torch.ops.kvsparse.follow_token(*tensors, *rule)
    else:
        custom.launch_follow_token(*tensors, *rule)


def record_token(
    history: Tensor,
    received: Tensor,
    pos: Tensor,
    logits: Tensor,
    lse: Tensor,
    start: Tensor,
    length: Tensor,
    newest: Tensor,
    *,
    window: int,
    use_max: bool = False,
    backend: str = "auto",
) -> None:
    args = (history, received, pos, logits, lse, start, length, newest)
    if resolve("record_token", backend, received, logits) == "torch":
        reference.record_token(*args, window=window, use_max=use_max)
    elif through_dispatcher(logits):
        torch.ops.kvsparse.record_token(*args, window, use_max)
    else:
        custom.launch_record_token(*args, window, use_max)


def gather_rows(
    src_k: Tensor,
    src_v: Tensor,
    index: Tensor,
    start: Tensor,
    dst_k: Tensor,
    dst_v: Tensor,
    *,
    backend: str = "auto",
) -> None:
    args = (src_k, src_v, index, start, dst_k, dst_v)
    if resolve("gather_rows", backend, src_k, src_v, dst_k, dst_v) == "torch":
        reference.gather_rows(*args)
    elif through_dispatcher(src_k, src_v):
        torch.ops.kvsparse.gather_rows(*args)
    else:
        custom.launch_gather_rows(*args)


for _op in (
    store_token, decode_attention, chunk_attention, window_scores, column_sums, gather_rows,
    follow_token, record_token, decode_attention_quantized, merge_attention,
):
    _op.__doc__ = (getattr(reference, _op.__name__).__doc__ or "").rstrip() + (
        "\n\n    ``backend``: \"auto\", \"triton\", \"torch\"" + (", \"flash\"" if _op is decode_attention else "")
        + "; see :func:`kvsparse_hf.ops.backend.resolve`.\n    "
    )
