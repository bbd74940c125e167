"""Plain-torch references of every op: what the op means, on any device, in fp32 arithmetic (fp64 for fp64 inputs).

They are what the kernels are tested against, what runs where no kernel does, and traceable by
``torch.compile(fullgraph=True)``: no host synchronisation and no shape that depends on data, but for eager steps on a CPU, where
both cost nothing and save looking at what is not filled.
"""

from .attention import chunk_attention, decode_attention
from .follow import follow_token
from .hot import hot_append, hot_fetch, hot_plan
from .linear import MOST_ROWS, check_rows, few_rows_linear
from .pages import choose_pages, choose_tokens, page_scores, token_scores, topk_pages
from .quantized import decode_attention_quantized, dequantize, quantize
from .record import AVERAGE, HISTORY_BITS, record_token
from .scores import column_sums, window_scores
from .store import gather_rows, store_token
from .tiers import merge_attention

__all__ = [
    "AVERAGE",
    "HISTORY_BITS",
    "MOST_ROWS",
    "check_rows",
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
