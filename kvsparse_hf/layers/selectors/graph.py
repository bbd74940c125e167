"""A graph index on the host (HNSW of faiss), searched by every query head."""

import copy
import importlib.util
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from ...errors import OptionError
from ...policy.basis import query_metric
from ..base import AttentionCall
from ..store import RaggedStore
from .base import Selection, dense_view
from .zones import ZonedSelector


def require_faiss() -> None:
    """Refuses to go on without faiss.

    Raises:
        OptionError: it is not installed.
    """
    if importlib.util.find_spec("faiss") is None:
        raise OptionError("index='hnsw' needs faiss: pip install faiss-cpu (or the extra 'hnsw' of this package).")


class Graph:
    """One HNSW graph over the keys of one head, for largest inner products.

    Inner products make a poor graph: a few long keys are everybody's neighbours. So the keys are centred, which moves all
    logits of a query alike, and given one more coordinate that makes them equally long; the nearest ones then are those of
    the largest inner product with a query that has 0 there.

    Args:
        keys: `[n, D]` the first keys; centre and length are theirs.
        links: neighbours of an entry.
        effort: candidates that a search (and an insertion) keeps.
    """

    def __init__(self, keys: np.ndarray, links: int, effort: int):
        import faiss

        self._mean = keys.mean(0)
        self._square = float(np.square(keys - self._mean).sum(1).max())
        self._index = faiss.IndexHNSWFlat(keys.shape[1] + 1, links)
        self._index.hnsw.efConstruction = max(effort, 2 * links)
        self._index.hnsw.efSearch = effort
        self.add(keys)

    @property
    def size(self) -> int:
        return self._index.ntotal

    def add(self, keys: np.ndarray) -> None:
        centred = keys - self._mean
        rest = np.maximum(self._square - np.square(centred).sum(1), 0)
        self._index.add(np.concatenate((centred, np.sqrt(rest)[:, None]), axis=1))

    def search(self, queries: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Inner products and entries `[n, count]`, best first; entry -1 where the search found fewer."""
        self._index.hnsw.efSearch = max(self._index.hnsw.efSearch, count)
        distance, entries = self._index.search(np.pad(queries, ((0, 0), (0, 1))), count)
        length = np.square(queries).sum(1, keepdims=True) + self._square
        return (length - distance) / 2 + queries @ self._mean[:, None], entries

    def __getstate__(self) -> tuple:
        import faiss

        return self._mean, self._square, faiss.serialize_index(self._index)

    def __setstate__(self, state: tuple) -> None:
        import faiss

        self._mean, self._square, index = state
        self._index = faiss.deserialize_index(index)

    def nbytes(self) -> int:
        """Bytes of the index."""
        return self.__getstate__()[2].nbytes


class GraphSelector(ZonedSelector):
    """Tokens between sinks and recents in one graph per row and key/value head.

    Args:
        links: neighbours of an entry; effort: candidates that a search (and an insertion) keeps.
        by_queries: build the graph in the metric of the prompt's own queries: distances between keys then are differences
            of logits, and queries have no preferred direction. Inner products stay the true ones.
    """

    STATE: ClassVar[tuple[str, ...]] = ("limit", "indexed", "metric", "inverse")
    is_compileable: ClassVar[bool] = False

    def __init__(
        self,
        sinks: int,
        recent: int,
        reduce: str,
        update_every: int,
        links: int,
        effort: int,
        by_queries: bool,
        backend: str = "auto",
    ):
        super().__init__(sinks, recent, reduce, update_every, backend)
        self.links, self.effort = links, effort
        self.by_queries = by_queries
        self.metric: Tensor | None = None  # [B, H, D, D]
        self.inverse: Tensor | None = None
        self.graphs: list[list[Graph]] = []

    # --- building --------------------------------------------------------------------------------------------------

    def begin(self, batch: int) -> None:
        super().begin(batch)
        self._metric_known = [False] * batch
        self.graphs = [[] for _ in range(batch)]

    @property
    def reads_queries(self) -> bool:
        return self.by_queries

    def observe(self, query: Tensor, key: Tensor, pad: Tensor) -> None:
        if not self.by_queries:
            return
        batch, heads, tokens, dim = key.shape
        if not any(self._metric_known):
            unit = torch.eye(dim, device=key.device).expand(batch, heads, dim, dim)
            self.keep("metric", unit)
            self.keep("inverse", unit)
        for row, first in enumerate(pad.tolist()):
            if not self._metric_known[row] and first < tokens:
                self.metric[row] = query_metric(query[row, :, first:].unflatten(0, (heads, -1)).flatten(1, 2))
                self.inverse[row] = torch.linalg.inv(self.metric[row].double()).float()
                self._metric_known[row] = True

    def add(self, store: RaggedStore, row: int, first: int, last: int) -> bool:
        keys = dense_view(store, store.keys)[row, :, first:last].float()
        if self.by_queries:
            keys = keys @ self.metric[row]
        own = list(keys.cpu().numpy())
        held = self.graphs[row]
        if not held:
            self.graphs[row] = [Graph(part, self.links, self.effort) for part in own]
            return False
        if sum(held is graphs for graphs in self.graphs) > 1:  # rows that came from one row share its graphs
            self.graphs[row] = copy.deepcopy(held)
        for graph, part in zip(self.graphs[row], own, strict=True):
            graph.add(part)
        return False

    def go_back(self, store: RaggedStore, row: int, end: int, mark: int) -> None:
        self.graphs[row] = []  # a graph forgets nothing: it is built anew
        if end > self.sinks:
            self.add(store, row, self.sinks, end)

    # --- in the step (on the host) ---------------------------------------------------------------------------------

    def select(self, query: Tensor, store: RaggedStore, call: AttentionCall) -> Selection:
        grouped = query.float().unflatten(1, (store.heads, -1))
        if self.by_queries:
            grouped = grouped @ self.inverse
        grouped = grouped.cpu().numpy()
        free = self.free()
        counts = [free] * store.batch if isinstance(free, int) else free.flatten().tolist()
        width = self.width - self.sinks - self.recent
        rows = []
        for row, count in enumerate(counts):
            heads = [self._search(graph, grouped[row, h], count, call) for h, graph in enumerate(self.graphs[row])]
            readers = grouped.shape[1] * (grouped.shape[2] if self.reduce == "none" else 1)
            found = np.concatenate(heads) if heads else np.full((readers, 0), -1)
            rows.append(np.pad(found, ((0, 0), (0, width - found.shape[1])), constant_values=-1))
        slots = torch.from_numpy(np.stack(rows)).to(query.device, torch.int32)
        slots = torch.where(slots >= 0, slots + self.sinks, -1)
        always = self.always_read(store).unsqueeze(1).expand(-1, slots.shape[1], -1)
        return Selection(torch.cat((always, slots), dim=-1))

    def _search(self, graph: Graph, queries: np.ndarray, count: int, call: AttentionCall) -> np.ndarray:
        """Entries `[1 or G, count]` that the query heads `[G, D]` of a group read; -1 for none."""
        scores, entries = graph.search(np.ascontiguousarray(queries), min(count, graph.size))
        if self.reduce == "none":
            return entries
        logits = torch.from_numpy(scores).masked_fill(torch.from_numpy(entries) < 0, float("-inf")) * call.scale
        if self.reduce == "softmax_mean":
            logits = torch.softmax(logits, dim=-1)
        # What a head did not find counts as the least that it did.
        floor = logits.masked_fill(torch.isinf(logits), float("inf")).amin(-1, keepdim=True)
        floor = torch.zeros_like(floor) if self.reduce == "softmax_mean" else floor
        table = floor.expand(-1, graph.size).clone()
        table.scatter_reduce_(1, torch.from_numpy(entries).clamp(min=0), torch.maximum(logits, floor), "amax")
        pooled = table.amax(0) if self.reduce == "max" else table.mean(0)
        candidates = np.unique(entries[entries >= 0])
        best = torch.argsort(pooled[torch.from_numpy(candidates)], descending=True, stable=True)[:count]
        return np.sort(candidates[best.numpy()])[None]

    # --- bookkeeping -----------------------------------------------------------------------------------------------

    def host_bytes(self) -> int:
        distinct = {id(graphs): graphs for graphs in self.graphs}.values()
        return sum(graph.nbytes() for graphs in distinct for graph in graphs)

    def select_batch(self, index: Tensor) -> None:
        super().select_batch(index)
        rows = index.tolist()
        self.graphs = [self.graphs[row] for row in rows]
        self._metric_known = [self._metric_known[row] for row in rows]

    def saved_state(self) -> dict:
        return {**super().saved_state(), "metric_known": self._metric_known}

    def restore(self, tensors: dict[str, Tensor], saved: dict, store: RaggedStore) -> None:
        super().restore(tensors, saved, store)
        self._metric_known = saved["metric_known"]
        self.graphs = [[] for _ in range(store.batch)]
        for row in range(store.batch):
            self.go_back(store, row, self._end(row), 0)
