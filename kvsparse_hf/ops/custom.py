"""The Triton launchers, registered as torch ops ``kvsparse::*`` with shape functions.

The ``launch_*`` functions take the arguments of their reference, with two differences that a registered op asks for:
it returns a fixed number of tensors, so results not asked for are empty, and it takes no keyword-only tensors.
Kernels are imported on first use: importing this module needs no Triton.
"""

from contextlib import nullcontext

import torch
from torch import Tensor


def on_device_of(x: Tensor):
    """Triton launches on the current device; make that the device of ``x``."""
    if x.device.type != "cuda" or x.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(x.device)


def advance(counters: Tensor, tokens: int) -> None:
    """Adds to int32 ``counters`` in place.

    As an op, also where `torch.compile` traces: an addition that it sees becomes part of every kernel that reads the sum, and
    for each op that takes the counters, of a copy of them.
    """
    if torch.compiler.is_compiling():
        torch.ops.kvsparse.advance(counters, tokens)
    else:
        counters.add_(tokens)


def launch_advance(counters: Tensor, tokens: int) -> None:
    counters.add_(tokens)


def launch_store_token(
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
    slot_override: Tensor | None,
    summary: Tensor | None,
    page_size: int,
) -> None:
    # No defaults: the dispatcher drops arguments equal to their default, and torch 2.11 then fails to find `summary`
    # among the mutated ones.
    from .kernels.store import store_token

    with on_device_of(k):
        store_token(k, v, pos, k_new, v_new, new_pos, start, capacity, length, pinned, cursor,
                    slot_override, summary, page_size)


def launch_decode_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: Tensor,
    length: Tensor,
    max_len: int,
    scale: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    pages: Tensor | None = None,
    page_size: int = 0,
    page_stride: int = 0,
    return_lse: bool = False,
    return_logits: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    from .kernels.decode import decode_attention

    with on_device_of(q):
        return decode_attention(
            q, k, v, start, length, max_len=max_len, scale=scale, softcap=softcap, sinks=sinks, pages=pages,
            page_size=page_size, page_stride=page_stride, return_lse=return_lse, return_logits=return_logits,
        )


def launch_decode_attention_quantized(
    q: Tensor,
    k: Tensor,
    k_ranges: Tensor,
    v: Tensor,
    v_ranges: Tensor,
    start: Tensor,
    length: Tensor,
    format: str,
    group: int,
    max_len: int,
    scale: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    return_logits: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    from .kernels.quantized import decode_attention_quantized

    with on_device_of(q):
        return decode_attention_quantized(
            q, k, k_ranges, v, v_ranges, start, length, format=format, group=group, max_len=max_len, scale=scale,
            softcap=softcap, sinks=sinks, return_lse=return_lse, return_logits=return_logits,
        )


def launch_merge_attention(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    from .kernels.tiers import merge_attention

    with on_device_of(outs[0]):
        return merge_attention(outs, lses)


def launch_chunk_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: Tensor,
    length: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    max_len: int,
    scale: float,
    pad: Tensor | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor]:
    from .kernels.chunk import chunk_attention

    with on_device_of(q):
        return chunk_attention(
            q, k, v, start, length, k_new, v_new, max_len=max_len, scale=scale, pad=pad, softcap=softcap,
            sinks=sinks, return_lse=return_lse,
        )


def launch_column_sums(
    q: Tensor,
    k: Tensor,
    scale: float,
    pad: Tensor | None = None,
    softcap: float = 0.0,
    lse: Tensor | None = None,
    group_reduce: str = "mean",
) -> Tensor:
    from .kernels.scores import column_sums

    with on_device_of(q):
        return column_sums(q, k, scale=scale, pad=pad, softcap=softcap, lse=lse, group_reduce=group_reduce)


def launch_gather_rows(
    src_k: Tensor, src_v: Tensor, index: Tensor, start: Tensor, dst_k: Tensor, dst_v: Tensor
) -> None:
    from .kernels.store import gather_rows

    with on_device_of(dst_k):
        gather_rows(src_k, src_v, index, start, dst_k, dst_v)


def launch_follow_token(
    scores: Tensor,
    cursor: Tensor,
    pos: Tensor,
    logits: Tensor,
    lse: Tensor,
    start: Tensor,
    length: Tensor,
    capacity: Tensor,
    newest: Tensor,
    decay: float,
    log2_decay: float,
    accumulate: bool,
    per_query: bool,
    across_heads: bool,
    sinks: int,
    recent: int,
) -> None:
    from .kernels.follow import follow_token

    with on_device_of(scores):
        follow_token(scores, cursor, pos, logits, lse, start, length, capacity, newest, decay, log2_decay, accumulate,
                     per_query, across_heads, sinks, recent)


def launch_record_token(
    history: Tensor,
    received: Tensor,
    pos: Tensor,
    logits: Tensor,
    lse: Tensor,
    start: Tensor,
    length: Tensor,
    newest: Tensor,
    window: int,
    use_max: bool,
) -> None:
    from .kernels.follow import record_token

    with on_device_of(received):
        record_token(history, received, pos, logits, lse, start, length, newest, window, use_max)


def _register(name: str, function, mutates: tuple[str, ...] = ()):
    return torch.library.custom_op(f"kvsparse::{name}", function, mutates_args=mutates)


_register("advance", launch_advance, ("counters",))
_register("store_token", launch_store_token, ("k", "v", "pos", "length", "cursor", "summary"))
_register("gather_rows", launch_gather_rows, ("dst_k", "dst_v"))
_register("follow_token", launch_follow_token, ("scores", "cursor"))
_register("record_token", launch_record_token, ("history", "received"))
_decode_attention = _register("decode_attention", launch_decode_attention)
_decode_attention_quantized = _register("decode_attention_quantized", launch_decode_attention_quantized)
_merge_attention = _register("merge_attention", launch_merge_attention)
_chunk_attention = _register("chunk_attention", launch_chunk_attention)
_column_sums = _register("column_sums", launch_column_sums)


@_decode_attention.register_fake
def _(q, k, v, start, length, max_len, scale, softcap=0.0, sinks=None, pages=None, page_size=0,
      page_stride=0, return_lse=False, return_logits=False):
    batch, heads_q, _ = q.shape
    width = max_len if pages is None else pages.shape[-1] * page_size
    lse = q.new_empty((batch, heads_q) if return_lse else (0,), dtype=torch.float32)
    logits = q.new_empty((batch, heads_q, width) if return_logits else (0,), dtype=torch.float32)
    return q.new_empty((batch, heads_q, v.shape[-1])), lse, logits


@_decode_attention_quantized.register_fake
def _(q, k, k_ranges, v, v_ranges, start, length, format, group, max_len, scale, softcap=0.0, sinks=None,
      return_lse=False, return_logits=False):
    batch, heads_q, _ = q.shape
    lse = q.new_empty((batch, heads_q) if return_lse else (0,), dtype=torch.float32)
    logits = q.new_empty((batch, heads_q, max_len) if return_logits else (0,), dtype=torch.float32)
    return q.new_empty((batch, heads_q, v_ranges.shape[1] * group)), lse, logits


@_merge_attention.register_fake
def _(outs, lses):
    return torch.empty_like(outs[0]), torch.empty_like(lses[0])


@_chunk_attention.register_fake
def _(q, k, v, start, length, k_new, v_new, max_len, scale, pad=None, softcap=0.0, sinks=None, return_lse=False):
    batch, heads_q, tokens, _ = q.shape
    lse = q.new_empty((batch, heads_q, tokens) if return_lse else (0,), dtype=torch.float32)
    return q.new_empty((batch, tokens, heads_q, v.shape[-1])).transpose(1, 2), lse


@_column_sums.register_fake
def _(q, k, *_args, **_options):
    return k.new_empty(k.shape[:3], dtype=torch.float32)
