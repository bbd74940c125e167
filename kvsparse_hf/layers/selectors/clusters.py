"""RetroInfer's index: clusters of keys; the best are read exactly, the next are estimated from their summaries."""

from typing import ClassVar

import torch
from torch import Tensor

from ...errors import KVSparseError
from ...policy.basis import query_metric
from ...policy.clusters import group_tokens, groups_for, kmeans
from ...policy.reading import key_logits, masked_softmax, merge_partials, per_query_head, reduce_logits
from ..base import AttentionCall
from ..store import RaggedStore
from .base import Selection
from .zones import ZonedSelector

_CUT = 4  # a cluster of more than so many times the mean size is cut


class ClusterSelector(ZonedSelector):
    """Tokens between sinks and recents in groups of similar keys, with the mean key and the mean value of each.

    Args:
        per_cluster: tokens of a cluster in the mean.
        segment: tokens that are clustered together.
        estimate: share of the groups that stand in for their tokens by their means, after those read exactly.
        by_queries: cluster by the logits that the prompt's own queries give, instead of by the direction of the keys.
    """

    STATE: ClassVar[tuple[str, ...]] = ("limit", "indexed", "metric", "members", "first", "size", "centroid", "mean_value")
    needs_lse: ClassVar[bool] = True

    def __init__(
        self,
        sinks: int,
        recent: int,
        reduce: str,
        update_every: int,
        per_cluster: int,
        segment: int,
        estimate: float,
        by_queries: bool,
        backend: str = "auto",
    ):
        super().__init__(sinks, recent, reduce, update_every, backend)
        self.per_cluster, self.segment = per_cluster, segment
        self.estimate = estimate
        self.by_queries = by_queries
        self.metric: Tensor | None = None  # [B, H, D, D]
        self.members: Tensor | None = None  # [B, H, C] int32 slots, group after group
        self.first: Tensor | None = None  # [B, H, M] int32 where in `members` a group begins
        self.size: Tensor | None = None  # [B, H, M] int32; 0 = no group
        self.centroid: Tensor | None = None  # [B, H, M, D]
        self.mean_value: Tensor | None = None  # [B, H, M, Dv]

    # --- building --------------------------------------------------------------------------------------------------

    def begin(self, batch: int) -> None:
        super().begin(batch)
        self._used = [0] * batch  # groups laid out so far
        self._metric_known = [False] * batch
        if self.size is not None:
            self.size.zero_()

    @property
    def reads_queries(self) -> bool:
        return self.by_queries

    def observe(self, query: Tensor, key: Tensor, pad: Tensor) -> None:
        if not self.by_queries:
            return
        batch, heads, tokens, dim = key.shape
        if not any(self._metric_known):
            self.keep("metric", torch.eye(dim, device=key.device).expand(batch, heads, dim, dim))
        for row, first in enumerate(pad.tolist()):
            if not self._metric_known[row] and first < tokens:
                queries = query[row, :, first:].unflatten(0, (heads, -1)).flatten(1, 2)
                self.metric[row] = query_metric(queries)
                self._metric_known[row] = True

    def refresh(self, store: RaggedStore, since: int) -> None:
        held = 0 if self.size is None or self.size.shape[0] != store.batch else self.size.shape[2]
        self._lay_out(store, max(self._groups_of(store.max_capacity), held))
        super().refresh(store, since)

    def _groups_of(self, capacity: int) -> int:
        """Groups that the tokens of a full store can make, however they came."""
        most = _CUT * self.per_cluster
        lots = capacity // self.update_every + capacity // self.segment + 2
        return capacity // self.per_cluster + capacity // most + lots

    def _lay_out(self, store: RaggedStore, groups: int) -> bool:
        batch, heads, like = store.batch, store.heads, store.keys
        moved = self.size is None or self.size.shape != (batch, heads, groups)
        self.room("members", (batch, heads, store.max_capacity), like, torch.int32)
        self.room("first", (batch, heads, groups), like, torch.int32)
        self.room("size", (batch, heads, groups), like, torch.int32)
        self.room("centroid", (batch, heads, groups, like.shape[-1]), like)
        self.room("mean_value", (batch, heads, groups, store.values.shape[-1]), store.values)
        return moved

    def add(self, store: RaggedStore, row: int, first: int, last: int) -> bool:
        moved = False
        for at in range(first, last, self.segment):
            moved |= self._add_segment(store, row, at, min(at + self.segment, last))
        return moved

    def _add_segment(self, store: RaggedStore, row: int, first: int, last: int) -> bool:
        keys, values = (part[0] for part in store.span(first, last, row))
        most = _CUT * self.per_cluster
        clusters, groups = groups_for(last - first, self.per_cluster, most)
        used, total = self._used[row], self.size.shape[2]
        moved = used + groups > total and self._lay_out(store, max(used + groups, total * 2))
        centred = keys.float() - keys.float().mean(1, keepdim=True)
        if self.by_queries:
            assigned = kmeans(centred @ self.metric[row], clusters, spherical=False)
        else:
            assigned = kmeans(centred, clusters)
        grouped = group_tokens(keys, values, assigned, most, groups)
        here = slice(used, used + groups)
        self.members[row, :, first:last] = (grouped.order + first).int()
        self.size[row, :, here] = grouped.size.int()
        self.first[row, :, here] = (first + grouped.size.cumsum(-1) - grouped.size).int()
        self.centroid[row, :, here] = grouped.centroid.to(self.centroid.dtype)
        self.mean_value[row, :, here] = grouped.mean_value.to(self.mean_value.dtype)
        self._used[row] = used + groups
        return moved

    def mark(self, row: int) -> int:
        return self._used[row]

    def go_back(self, store: RaggedStore, row: int, end: int, mark: int) -> None:
        self._used[row] = mark
        self.size[row, :, mark:] = 0

    # --- in the step -----------------------------------------------------------------------------------------------

    def select(self, query: Tensor, store: RaggedStore, call: AttentionCall) -> Selection:
        logits = key_logits(query.float(), self.centroid.float(), call.scale, call.softcap)  # [B, H, G, M]
        logits = torch.where((self.size > 0).unsqueeze(2), logits, float("-inf"))
        scores = reduce_logits(logits, self.reduce)  # [B, Hs, M]
        heads = scores.shape[1]
        size, first = per_query_head(self.size, heads), per_query_head(self.first, heads)
        scores = torch.where(size > 0, scores, float("-inf"))
        order = torch.sort(scores, dim=-1, descending=True, stable=True).indices
        size, first = size.gather(-1, order).long(), first.gather(-1, order)
        ends = size.cumsum(-1)
        exact = ends <= self.free()  # [B, Hs, M] in order of rank: whole groups, as long as they fit
        slots = self._slots_of(size, first, ends, exact)
        always = self.always_read(store).unsqueeze(1).expand(-1, heads, -1)
        pages = torch.cat((always, slots), dim=-1)
        if not self.estimate:
            return Selection(pages)
        return Selection(pages, self._estimate(logits, order, size, exact))

    def _slots_of(self, size: Tensor, first: Tensor, ends: Tensor, exact: Tensor) -> Tensor:
        """`[B, Hs, K]` int32 slots of the tokens of the groups marked `exact`, -1 behind the last."""
        batch, heads, groups = size.shape
        token = torch.arange(self.width - self.sinks - self.recent, device=size.device).expand(batch, heads, -1).contiguous()
        rank = torch.searchsorted(ends, token, right=True).clamp(max=groups - 1)
        within = token - (ends - size).gather(-1, rank)
        taken = exact.gather(-1, rank) & (within < size.gather(-1, rank))
        at = torch.where(taken, first.gather(-1, rank) + within, 0)
        members = per_query_head(self.members, heads)
        return torch.where(taken, members.gather(-1, at), -1).int()

    def _estimate(self, logits: Tensor, order: Tensor, size: Tensor, exact: Tensor) -> tuple[Tensor, Tensor]:
        """Attention `[B, Hq, Dv]` to the means of the groups that come next, each counted as often as it has tokens, and its
        log-sum-exp `[B, Hq]`."""
        present = size > 0
        read = (exact & present).sum(-1, keepdim=True)
        zone = torch.ceil(self.estimate * present.sum(-1, keepdim=True)).long()
        rank = torch.arange(size.shape[-1], device=size.device)
        chosen = present & (rank >= read) & (rank < read + zone)  # in order of rank
        chosen = torch.zeros_like(chosen).scatter(-1, order, chosen).unflatten(1, (self.size.shape[1], -1))
        weight = torch.log(self.size.clamp(min=1).float()).unsqueeze(2)
        share, lse = masked_softmax(torch.where(chosen, logits + weight, float("-inf")))
        return (share @ self.mean_value.float()).flatten(1, 2), lse.flatten(1, 2)

    def finish(
        self, out: Tensor, lse: Tensor | None, selection: Selection, store: RaggedStore, call: AttentionCall
    ) -> Tensor:
        if not self.estimate:
            return out
        return merge_partials([out, selection.extra[0]], [lse, selection.extra[1]])

    # --- bookkeeping -----------------------------------------------------------------------------------------------

    def bytes_read(self, store: RaggedStore, group: int) -> int:
        groups = int((self.size > 0).sum())
        entry = self.centroid.shape[-1] * self.centroid.element_size()
        if self.estimate:
            entry += self.mean_value.shape[-1] * self.mean_value.element_size()
        return groups * (entry + 2 * self.size.element_size())

    def select_batch(self, index: Tensor) -> None:
        super().select_batch(index)
        rows = index.tolist()
        self._used = [self._used[row] for row in rows]
        self._metric_known = [self._metric_known[row] for row in rows]

    def saved_state(self) -> dict:
        return {**super().saved_state(), "used": self._used, "metric_known": self._metric_known}

    def restore(self, tensors: dict[str, Tensor], saved: dict, store: RaggedStore) -> None:
        super().restore(tensors, saved, store)
        self._used, self._metric_known = saved["used"], saved["metric_known"]
        if len(self._used) != store.batch or not all(0 <= used <= self.size.shape[2] for used in self._used):
            raise KVSparseError("the index states more groups than it has room for.")
