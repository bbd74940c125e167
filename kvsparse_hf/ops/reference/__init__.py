"""Plain-torch references of every op: what the op means, on any device, in fp32 arithmetic (fp64 for fp64 inputs).

They are what the kernels are tested against, what runs where no kernel does, and traceable by
``torch.compile(fullgraph=True)``: no host synchronisation and no shape that depends on data.
"""

from .attention import chunk_attention, decode_attention
from .follow import follow_token
from .pages import page_scores, topk_pages
from .record import AVERAGE, HISTORY_BITS, record_token
from .scores import column_sums, window_scores
from .store import gather_rows, store_token

__all__ = [
    "AVERAGE",
    "HISTORY_BITS",
    "chunk_attention",
    "column_sums",
    "decode_attention",
    "follow_token",
    "gather_rows",
    "page_scores",
    "record_token",
    "store_token",
    "topk_pages",
    "window_scores",
]
