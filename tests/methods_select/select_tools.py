"""Stores with chosen contents, and brute-force oracles written from the maths, token by token."""

import math

import numpy as np
import torch
from torch import Tensor

from kvsparse_hf.layers.base import AttentionCall
from kvsparse_hf.layers.selectors.base import Selector
from kvsparse_hf.layers.store import RaggedStore
from kvsparse_hf.policy.reading import per_query_head

EDGES = [1, 2, 15, 16, 17, 31, 32, 33, 47, 64, 65, 100]  # around the edges of a page of 16


def make_store(lengths: list[int], heads: int = 2, dim: int = 8, page: int = 16, seed: int = 0, scale: float = 1.0) -> RaggedStore:
    """Rows of such lengths with random keys and values; whatever lies behind a row's last token is NaN."""
    generator = torch.Generator().manual_seed(seed)
    capacity = -(-(max(lengths) + 3) // page) * page
    like = torch.zeros(1, dim)
    store = RaggedStore(torch.full((len(lengths), heads), capacity), like, like)
    store.keys.copy_(torch.randn(store.keys.shape, generator=generator) * scale)
    store.values.copy_(torch.randn(store.values.shape, generator=generator))
    store.length.copy_(torch.tensor(lengths).unsqueeze(1).expand(-1, heads))
    store.capacity.fill_(capacity)
    store.pinned.fill_(capacity)
    slot = torch.arange(capacity).expand(len(lengths), heads, -1)
    store.positions.copy_(slot.flatten())
    behind = (slot >= store.length.unsqueeze(-1)).flatten()
    store.keys[behind] = store.values[behind] = float("nan")
    return store


def make_query(store: RaggedStore, group: int = 3, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(store.batch, store.heads * group, store.keys.shape[-1], generator=generator)


def ready(selector: Selector, store: RaggedStore, budget: int | list[int]) -> Selector:
    """The selector with its metadata built."""
    tokens = torch.tensor(budget if isinstance(budget, list) else [budget] * store.batch)
    selector.begin(store.batch)
    selector.set_budget(tokens, store.keys.device)
    selector.refresh(store, 0)
    return selector


def call_of(store: RaggedStore, **options) -> AttentionCall:
    return AttentionCall(store.keys.shape[-1] ** -0.5, **options)


def chosen(pages: Tensor) -> list[list[list[int]]]:
    """The page ids of every row and head, without the -1 behind the last."""
    return [[[page for page in head if page >= 0] for head in row] for row in pages.tolist()]


def step(selector: Selector, store: RaggedStore, query: Tensor, call: AttentionCall) -> Tensor:
    """What a layer does with a selection: reads it, and lets the selector finish."""
    from kvsparse_hf import ops

    selection = selector.select(query, store, call)
    heads = selection.pages.shape[1]
    out, lse, _ = ops.decode_attention(
        query, store.keys, store.values, per_query_head(store.start, heads), per_query_head(store.length, heads),
        max_len=store.max_capacity, scale=call.scale, softcap=call.softcap, sinks=call.sinks, pages=selection.pages,
        page_size=selector.page_size, return_lse=True,
    )
    return selector.finish(out, lse, selection, store, call)


# --- the maths ---------------------------------------------------------------------------------------------------------


def segment(store: RaggedStore, row: int, head: int) -> tuple[np.ndarray, np.ndarray]:
    first, count = int(store.start[row, head]), int(store.length[row, head])
    return store.keys[first:first + count].double().numpy(), store.values[first:first + count].double().numpy()


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max())
    return e / e.sum()


def best(scores: list[float], forced: set[int], count: int) -> list[int]:
    """Forced entries, then the best of the rest; ties to the lower index."""
    free = sorted((i for i in range(len(scores)) if i not in forced), key=lambda i: (-scores[i], i))
    return sorted([*forced, *free[:max(count - len(forced), 0)]])


def quest_pages(query: np.ndarray, keys: np.ndarray, scale: float, page: int, sinks: int, recent: int, reduce: str, count: int):
    """Pages `[1 or G][…]` that the queries `[G, D]` of a group read among `keys` `[n, D]`."""
    blocks = [keys[i:i + page] for i in range(0, len(keys), page)]
    bound = np.array([[sum(max(q[c] * b[:, c].max(), q[c] * b[:, c].min()) for c in range(len(q))) for b in blocks] for q in query])
    bound = bound * scale
    last = len(blocks) - 1
    forced = {p for p in range(len(blocks)) if p * page < sinks} | {last}
    # The recent pages cover `recent` tokens wherever in its page the newest one stands.
    forced |= {p for p in range(len(blocks)) if p >= last - math.ceil((recent - 1) / page)}
    if reduce == "none":
        return [best(list(row), forced, count) for row in bound]
    if reduce == "softmax_mean":
        bound = np.array([softmax(row) for row in bound])
    score = bound.max(0) if reduce == "max" else bound.mean(0)
    return [best(list(score), forced, count)]


def token_choice(logits: np.ndarray, sinks: int, recent: int, reduce: str, count: int) -> list[list[int]]:
    """Tokens `[1 or G][…]` read, by `logits` `[G, n]`."""
    n = logits.shape[1]
    forced = {i for i in range(n) if i < sinks or i >= n - recent}
    if reduce == "none":
        return [best(list(row), forced, count) for row in logits]
    if reduce == "softmax_mean":
        logits = np.array([softmax(row) for row in logits])
    score = {"max": logits.max(0), "sum": logits.sum(0)}.get(reduce, logits.mean(0))
    return [best(list(score), forced, count)]


def attend(query: np.ndarray, keys: np.ndarray, values: np.ndarray, scale: float) -> np.ndarray:
    return softmax(keys @ query * scale) @ values
