"""Quest's selector: pages of keys, ranked by an upper bound of their logits."""

from typing import Any, ClassVar

import torch
from torch import Tensor

from ... import ops
from ..base import AttentionCall
from ..store import RaggedStore
from .base import Selection, Selector


class PageSelector(Selector):
    """Keeps the elementwise maximum and minimum of the keys of each page.

    Pages are slots of the row's own segment, which begins with its first real token: padding never shares a page.
    """

    STATE: ClassVar[tuple[str, ...]] = ("limit", "bounds")

    def __init__(self, sinks: int, recent: int, reduce: str, page_size: int, backend: str = "auto"):
        super().__init__(sinks, recent, reduce, page_size, backend)
        self.bounds: Tensor | None = None  # [B, H, P, 2, D]: maximum, minimum
        self.sink_pages, self.recent_pages = forced_pages(sinks, recent, page_size)

    def minimum_pages(self) -> int:
        return self.sink_pages + self.recent_pages + 1

    def refresh(self, store: RaggedStore, since: int) -> None:
        size = self.page_size
        total = store.max_capacity // size
        self.room("bounds", (store.batch, store.heads, total, 2, store.keys.shape[-1]), store.keys)
        lengths = store.length.cpu()
        first, last = since // size, -(-int(lengths.max()) // size)
        whole = max(first, int(lengths.min()) // size)  # pages before are full in every row
        if whole > first:
            keys = store.span(first * size, whole * size)[0].unflatten(2, (-1, size))
            low, high = torch.aminmax(keys, dim=3)
            self.bounds[:, :, first:whole] = torch.stack((high, low), dim=3)
        if last > whole:
            keys = store.span(whole * size, last * size)[0].unflatten(2, (-1, size))
            slot = torch.arange(whole * size, last * size, device=keys.device).view(-1, size)
            filled = (slot < store.length[..., None, None]).unsqueeze(-1)
            high = keys.masked_fill(~filled, float("-inf")).amax(3)
            low = keys.masked_fill(~filled, float("inf")).amin(3)
            self.bounds[:, :, whole:last] = torch.stack((high, low), dim=3).masked_fill(~filled.any(3).unsqueeze(3), 0)

    def summary(self) -> Tensor:
        return self.bounds

    def select(self, query: Tensor, store: RaggedStore, call: AttentionCall) -> Selection:
        if self.reduce != "none":
            if self.limit is None and not self.spare:
                return Selection(ops.choose_pages(*self._scored(query, store), self.width, **self._how(call, self.reduce)))
            return self.choose(self._scores(query, store, call, self.reduce))
        # One query head of every group at a time, each against all the summaries.
        grouped = query.unflatten(1, (store.heads, -1))
        scores = [self._scores(grouped[:, :, g], store, call, "max") for g in range(grouped.shape[2])]
        return Selection(self.top(torch.stack(scores, dim=2).flatten(1, 2)))

    def _scores(self, query: Tensor, store: RaggedStore, call: AttentionCall, reduce: str) -> Tensor:
        return ops.page_scores(*self._scored(query, store), **self._how(call, reduce))

    def _scored(self, query: Tensor, store: RaggedStore) -> tuple[Tensor, Tensor, Tensor]:
        return query, self.bounds, store.length

    def _how(self, call: AttentionCall, reduce: str) -> dict[str, Any]:
        return dict(
            page_size=self.page_size,
            scale=call.scale,
            group_reduce=reduce,
            sink_pages=self.sink_pages,
            recent_pages=self.recent_pages,
            backend=self.backend,
        )

    def bytes_read(self, store: RaggedStore, group: int) -> int:
        pages = (store.length.cpu() + self.page_size - 1) // self.page_size
        readers = group if self.reduce == "none" else 1
        return int(pages.sum()) * readers * 2 * self.bounds.shape[-1] * self.bounds.element_size()


def forced_pages(sinks: int, recent: int, page_size: int) -> tuple[int, int]:
    """First and last pages that cover the sinks and the recent tokens, wherever in its page the newest token stands."""
    return -(-sinks // page_size), -(-(max(recent, 1) - 1) // page_size) + 1
