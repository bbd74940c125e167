"""Kernels on flat KV stores. They know nothing of caches or models.

A layer's store is ``k [R, D]``, ``v [R, Dv]`` and ``pos [R]``. Each (batch row, KV head) owns the contiguous rows
``start .. start + capacity``, of which the first ``length`` are valid, in any order. Query head h reads KV head
h // (Hq // H). Every op has a plain-torch reference, and a Triton kernel registered as a torch op.
"""

from .dispatch import (
    chunk_attention,
    column_sums,
    decode_attention,
    decode_attention_quantized,
    follow_token,
    gather_rows,
    merge_attention,
    record_token,
    store_token,
    window_scores,
)
from .errors import BackendError
from .hot import hot_append, hot_fetch, hot_plan
from .linear import few_rows_linear
from .reference import dequantize, quantize
from .selection import choose_pages, choose_tokens, page_scores, token_scores, topk_pages

__all__ = [
    "BackendError",
    "choose_pages",
    "choose_tokens",
    "chunk_attention",
    "column_sums",
    "decode_attention",
    "decode_attention_quantized",
    "dequantize",
    "few_rows_linear",
    "follow_token",
    "gather_rows",
    "hot_append",
    "hot_fetch",
    "hot_plan",
    "merge_attention",
    "page_scores",
    "quantize",
    "record_token",
    "store_token",
    "token_scores",
    "topk_pages",
    "window_scores",
]
