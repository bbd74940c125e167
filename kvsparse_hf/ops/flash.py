"""decode_attention through FlashAttention kernels: backend="flash".

Every (batch row, KV head) becomes one sequence with a single KV head, whose query heads are the G query heads of the
group, so that heads may be ragged. Taken from, in this order: FlashAttention 3 (module ``flash_attn_interface``),
FlashAttention 2 (``flash_attn``, for pages only), and the FlashAttention 2 that torch itself contains (no pages).
"""

from __future__ import annotations

import importlib
import inspect
from functools import cache

import torch
from torch import Tensor

from .errors import BackendError

_FA2_PAGE_MULTIPLE = 256


@cache
def _module(name: str):
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def _error(why: str) -> BackendError:
    return BackendError(f"decode_attention: the flash backend cannot run this call: {why}. "
                        "Use backend='auto', 'triton' or 'torch'")


def _check(q: Tensor, k: Tensor, v: Tensor, return_logits: bool) -> None:
    if q.device.type != "cuda":
        raise _error(f"it needs CUDA tensors, not {q.device.type!r}")
    if k.dtype not in (torch.float16, torch.bfloat16):
        raise _error(f"it takes float16 and bfloat16, not {str(k.dtype).removeprefix('torch.')}")
    if k.shape[-1] != v.shape[-1]:
        raise _error(f"keys ({k.shape[-1]}) and values ({v.shape[-1]}) must have the same head size")
    if k.shape[-1] > 256 or k.shape[-1] % 8:
        raise _error(f"the head size must be a multiple of 8 up to 256, not {k.shape[-1]}")
    if return_logits:
        raise _error("it cannot return logits")


def _sequences(start: Tensor, length: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cumulative query lengths, first rows (one more than there are sequences) and used lengths, int32."""
    count = start.numel()
    queries = torch.arange(count + 1, dtype=torch.int32, device=start.device)
    first = torch.nn.functional.pad(start.flatten(), (0, 1)).int()
    return queries, first, length.flatten().int()


def _flat_aten(q: Tensor, k: Tensor, v: Tensor, start: Tensor, length: Tensor, max_len: int, scale: float,
               softcap: float) -> tuple[Tensor, Tensor]:
    if softcap:
        raise _error("softcap needs the flash_attn_interface package (FlashAttention 3)")
    queries, first, used = _sequences(start, length)
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k.unsqueeze(1), v.unsqueeze(1), queries, first, 1, max_len, 0.0, False, False, scale=scale, seqused_k=used
    )
    # [G, sequences], or [sequences, G, 1] in older versions
    return out, (lse.squeeze(-1) if lse.dim() == 3 else lse.transpose(0, 1))


def _flat_fa3(fa3, q: Tensor, k: Tensor, v: Tensor, start: Tensor, length: Tensor, max_len: int, scale: float,
              softcap: float) -> tuple[Tensor, Tensor]:
    queries, first, used = _sequences(start, length)
    options = dict(max_seqlen_q=1, max_seqlen_k=max_len, seqused_k=used, softmax_scale=scale, softcap=softcap,
                   num_splits=0)
    if "return_attn_probs" in inspect.signature(fa3.flash_attn_varlen_func).parameters:
        options["return_attn_probs"] = True  # versions without it always return the lse
    out, lse, *_ = fa3.flash_attn_varlen_func(q, k.unsqueeze(1), v.unsqueeze(1), queries, first, **options)
    return out, lse.transpose(0, 1)


def _page_tables(start: Tensor, length: Tensor, pages: Tensor, page_size: int) -> tuple[Tensor, Tensor]:
    """Table of store pages [B * H, P] and the number of keys in it [B * H]: full pages first, a partial one last."""
    torch._assert_async(
        (start % page_size == 0).all(), "the flash backend needs segments that start at a multiple of the page size"
    )
    filled = torch.where(pages >= 0, length.unsqueeze(-1) - pages * page_size, 0).clamp(0, page_size)
    order = torch.where(filled > 0, pages, torch.iinfo(torch.int32).max).sort(dim=-1)
    used = torch.where(order.values < torch.iinfo(torch.int32).max, order.values, 0)
    table = used + (start // page_size).unsqueeze(-1)
    return table.flatten(0, 1).int(), filled.sum(-1).flatten().int()


def _paged(q: Tensor, k: Tensor, v: Tensor, start: Tensor, length: Tensor, pages: Tensor, page_size: int,
           scale: float, softcap: float) -> tuple[Tensor, Tensor, Tensor]:
    fa3, fa2 = _module("flash_attn_interface"), _module("flash_attn")
    if fa3 is None and fa2 is None:
        raise _error("pages need the package flash_attn_interface (FlashAttention 3) or flash_attn (FlashAttention 2)")
    if fa3 is None and page_size % _FA2_PAGE_MULTIPLE:
        raise _error(f"FlashAttention 2 takes page sizes that are multiples of {_FA2_PAGE_MULTIPLE}, not {page_size}")
    if k.shape[0] % page_size:
        raise _error(f"the store's {k.shape[0]} rows are not a multiple of the page size {page_size}")
    table, used = _page_tables(start, length, pages, page_size)
    run = (fa3 or fa2).flash_attn_with_kvcache
    out, lse, *_ = run(
        q.unsqueeze(1), k.view(-1, page_size, 1, k.shape[-1]), v.view(-1, page_size, 1, v.shape[-1]),
        cache_seqlens=used, softmax_scale=scale, softcap=softcap, return_softmax_lse=True,
        **{"page_table" if fa3 else "block_table": table},
    )
    return out.squeeze(1), lse.squeeze(-1), used


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
) -> tuple[Tensor, Tensor | None, None]:
    """See :func:`kvsparse_hf.ops.decode_attention`. Listed pages must be distinct, segments page-aligned.

    Raises:
        BackendError: this call needs something that the installed FlashAttention cannot do.
    """
    _check(q, k, v, return_logits)
    if page_stride not in (0, page_size):
        raise _error("it takes pages that follow each other, not keys and values in turn")
    batch, heads_q, dim = q.shape
    rows = q.to(k.dtype).reshape(start.numel(), -1, dim)  # [B * H, G, D]
    if pages is not None:
        out, lse, used = _paged(rows, k, v, start, length, pages, page_size, scale, softcap)
    else:
        used = length.flatten()
        fa3 = _module("flash_attn_interface")
        flat = _flat_aten if fa3 is None else lambda *args: _flat_fa3(fa3, *args)
        out, lse = flat(rows, k, v, start, length, max_len, scale, softcap)
    # the kernels disagree on what an empty sequence gives
    empty = (used == 0).unsqueeze(-1)
    lse = torch.where(empty, float("-inf"), lse.float())
    out = torch.where(empty.unsqueeze(-1), 0, out)
    if sinks is not None:
        with_sink = torch.logaddexp(lse, sinks.float().view(1, start.shape[1], -1).expand(batch, -1, -1).flatten(0, 1))
        out = out * torch.exp(lse - with_sink).unsqueeze(-1)
        lse = with_sink
    out = out.to(q.dtype).view(batch, heads_q, -1)
    return out, lse.reshape(batch, heads_q) if return_lse else None, None
