"""Loki's ranking by pages, for keys that are somewhere else."""

from typing import ClassVar

from torch import Tensor

from ... import ops
from ..base import AttentionCall
from ..store import RaggedStore
from .base import Selection
from .pages import forced_pages
from .tokens import LowRankSelector


class LowRankPageSelector(LowRankSelector):
    """A page ranks by its best token, a token by the leading components of its key, of which this selector keeps a copy.

    Args:
        components, basis: as of `LowRankSelector`.
    """

    STATE: ClassVar[tuple[str, ...]] = (*LowRankSelector.STATE, "leading")

    def __init__(
        self,
        sinks: int,
        recent: int,
        reduce: str,
        components: int,
        basis: Tensor | None,
        page_size: int,
        backend: str = "auto",
    ):
        super().__init__(sinks, recent, reduce, components, basis, backend)
        self.page_size = page_size
        self.leading: Tensor | None = None  # [B, H, C, components]

    def minimum_pages(self) -> int:
        return sum(forced_pages(self.sinks, self.recent, self.page_size)) + 1

    def refresh(self, store: RaggedStore, since: int) -> None:
        self.room("leading", (store.batch, store.heads, store.max_capacity, self.components), store.keys)
        last = int(store.length.max())
        self.leading[:, :, since:last] = store.span(since, last)[0][..., : self.components]

    def appended(self, store: RaggedStore, key: Tensor, value: Tensor) -> None:
        slot = (store.length.long() - 1).clamp(min=0)[..., None, None].expand(-1, -1, 1, self.components)
        self.leading.scatter_(2, slot, key[..., : self.components].to(self.leading.dtype).unsqueeze(2))

    def select(self, query: Tensor, store: RaggedStore, call: AttentionCall) -> Selection:
        scores = ops.token_scores(
            query[..., : self.components],
            self.leading,
            store.length,
            dims=self.components,
            scale=call.scale,
            softcap=call.softcap,
            group_reduce=self.reduce,
            sinks=self.sinks,
            recent=self.recent,
            backend=self.backend,
        )
        return self.choose(scores.unflatten(2, (-1, self.page_size)).amax(-1))
