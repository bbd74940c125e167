"""Selectors that score every token: by its key, by leading components of it (Loki), or by a few channels (SparQ)."""

from typing import Any, ClassVar

import torch
from torch import Tensor

from ... import ops
from ...policy.basis import components_of, key_covariance
from ...policy.reading import force, key_logits, masked_softmax, reduce_logits
from ..base import AttentionCall
from ..store import RaggedStore
from .base import Selection, Selector, dense_view


class TokenSelector(Selector):
    """Exact top-k of the true logits."""

    def refresh(self, store: RaggedStore, since: int) -> None:
        """Nothing to do: the stored keys themselves are scored."""

    def ranking_channels(self, store: RaggedStore) -> int:
        """Leading channels of query and key that rank the tokens."""
        return store.keys.shape[-1]

    def select(self, query: Tensor, store: RaggedStore, call: AttentionCall) -> Selection:
        if self.reduce != "none":
            if self.limit is None:
                return Selection(ops.choose_tokens(*self._scored(query, store), self.width, **self._how(store, call, self.reduce)))
            return Selection(self.top(self._scores(query, store, call, self.reduce)))
        # One query head of every group at a time, each against all the keys.
        grouped = query.unflatten(1, (store.heads, -1))
        scores = [self._scores(grouped[:, :, g], store, call, "max") for g in range(grouped.shape[2])]
        return Selection(self.top(torch.stack(scores, dim=2).flatten(1, 2)))

    def _scores(self, query: Tensor, store: RaggedStore, call: AttentionCall, reduce: str) -> Tensor:
        return ops.token_scores(*self._scored(query, store), **self._how(store, call, reduce))

    def _scored(self, query: Tensor, store: RaggedStore) -> tuple[Tensor, Tensor, Tensor]:
        return query[..., : self.ranking_channels(store)], dense_view(store, store.keys), store.length

    def _how(self, store: RaggedStore, call: AttentionCall, reduce: str) -> dict[str, Any]:
        return dict(
            dims=self.ranking_channels(store),
            scale=call.scale,
            softcap=call.softcap,
            group_reduce=reduce,
            sinks=self.sinks,
            recent=self.recent,
            backend=self.backend,
        )

    def bytes_read(self, store: RaggedStore, group: int) -> int:
        return int(store.length.sum()) * self.ranking_channels(store) * store.keys.element_size()


class LowRankSelector(TokenSelector):
    """Loki: keys are stored in their principal components, and the leading ones rank them.

    Args:
        components: leading components that rank.
        basis: `[H, D, D]` orthonormal columns, strongest first; None: computed per row from the first keys seen.
    """

    STATE: ClassVar[tuple[str, ...]] = ("limit", "basis")

    def __init__(self, sinks: int, recent: int, reduce: str, components: int, basis: Tensor | None, backend: str = "auto"):
        super().__init__(sinks, recent, reduce, backend=backend)
        self.components = components
        self.calibrated = basis
        self.basis: Tensor | None = None  # [1, H, D, D] calibrated, [B, H, D, D] from the rows' own keys
        self._fitted: list[bool] = []

    def begin(self, batch: int) -> None:
        self._fitted = [False] * batch

    def observe(self, query: Tensor, key: Tensor, pad: Tensor) -> None:
        batch, heads, tokens, dim = key.shape
        if self.calibrated is not None:
            self.keep("basis", self.calibrated.to(key.device, torch.float32).unsqueeze(0))
            return
        if not any(self._fitted):
            self.keep("basis", torch.eye(dim, device=key.device).expand(batch, heads, dim, dim))
        # A row is fitted once, by the first forward that shows it a real token. All at once: one small eigenproblem on a GPU
        # takes as long as hundreds.
        shown = {row: first for row, first in enumerate(pad.tolist()) if not self._fitted[row] and first < tokens}
        if shown:
            covariances = torch.stack([key_covariance(key[row, :, first:]) for row, first in shown.items()])
            self.basis[list(shown)] = components_of(covariances)[0]
            for row in shown:
                self._fitted[row] = True

    def enter(self, states: Tensor) -> Tensor:
        grouped = states.unflatten(1, (self.basis.shape[1], -1)).flatten(2, -2)
        return (grouped.to(self.basis.dtype) @ self.basis).to(states.dtype).view(states.shape)

    def ranking_channels(self, store: RaggedStore) -> int:
        return self.components

    def select_batch(self, index: Tensor) -> None:
        basis = self.basis
        if self.calibrated is not None:
            self.basis = None  # one for all rows
        super().select_batch(index)
        if self.calibrated is not None:
            self.basis = basis
        self._fitted = [self._fitted[row] for row in index.tolist()]

    def saved_state(self) -> dict:
        return {**super().saved_state(), "fitted": self._fitted}

    def restore(self, tensors: dict[str, Tensor], saved: dict, store: RaggedStore) -> None:
        super().restore(tensors, saved, store)
        self._fitted = saved["fitted"]


class ChannelSelector(Selector):
    """SparQ: the channels in which the queries of a group are largest rank the tokens; the mean value stands for the rest.

    Args:
        channels: how many channels rank.
        channel_major: hold the keys a second time, channel by channel, so that only the ranking channels are read.
    """

    STATE: ClassVar[tuple[str, ...]] = ("limit", "value_sum", "key_channels")
    needs_lse: ClassVar[bool] = True

    def __init__(
        self, sinks: int, recent: int, reduce: str, channels: int, channel_major: bool = False, backend: str = "auto"
    ):
        super().__init__(sinks, recent, reduce, backend=backend)
        self.channels = channels
        self.channel_major = channel_major
        self.value_sum: Tensor | None = None  # [B, H, Dv] fp64: the same sum, however the tokens came and went
        self.key_channels: Tensor | None = None  # [B, H, D, C]

    def refresh(self, store: RaggedStore, since: int) -> None:
        values = dense_view(store, store.values)
        sums = [values[row, :, :length].sum(1, dtype=torch.float64) for row, length in enumerate(store.length[:, 0].tolist())]
        self.keep("value_sum", torch.stack(sums))
        if self.channel_major:
            self.keep("key_channels", dense_view(store, store.keys).transpose(-1, -2))

    def appended(self, store: RaggedStore, key: Tensor, value: Tensor) -> None:
        self.value_sum.add_(value)
        if self.channel_major:
            slot = (store.length.long() - 1).clamp(min=0)[..., None, None].expand(-1, -1, key.shape[-1], 1)
            self.key_channels.scatter_(3, slot, key.to(self.key_channels.dtype).unsqueeze(-1))

    def select(self, query: Tensor, store: RaggedStore, call: AttentionCall) -> Selection:
        logits = self._logits(query, store, call)
        slot = torch.arange(logits.shape[-1], device=logits.device)
        logits = torch.where((slot < store.length.unsqueeze(-1)).unsqueeze(2), logits, float("-inf"))
        scores = force(reduce_logits(logits, self.reduce).float(), store.length, self.sinks, self.recent)
        return Selection(self.top(scores), (masked_softmax(logits)[0],))

    def _logits(self, query: Tensor, store: RaggedStore, call: AttentionCall) -> Tensor:
        """`[B, H, G, C]` approximate logits."""
        grouped = query.unflatten(1, (store.heads, -1))
        size = grouped.abs().float()
        channels = size.sum(2).topk(self.channels, dim=-1).indices.unsqueeze(2)  # [B, H, 1, r]
        chosen = grouped.gather(3, channels.expand(-1, -1, grouped.shape[2], -1))
        if self.channel_major:
            index = channels.transpose(-1, -2).expand(-1, -1, -1, store.max_capacity)
            keys = self.key_channels.gather(2, index).transpose(-1, -2)
        else:
            keys = dense_view(store, store.keys)
            keys = keys.gather(3, channels.expand(-1, -1, store.max_capacity, -1))
        # Published temperature: sqrt(d |q_I| / |q|), here relative to the model's own scale.
        share = (chosen.abs().float().sum(-1) / size.sum(-1).clamp(min=1e-20)).clamp(min=1e-20)
        return key_logits(chosen.flatten(1, 2), keys, call.scale) / share.sqrt().unsqueeze(-1)

    def finish(
        self, out: Tensor, lse: Tensor | None, selection: Selection, store: RaggedStore, call: AttentionCall
    ) -> Tensor:
        weights = selection.extra[0]  # [B, H, G, C], approximate
        index = selection.pages.long().unsqueeze(2)
        read = weights.gather(3, index.clamp(min=0).expand(-1, -1, weights.shape[2], -1))
        share = torch.where(index >= 0, read, 0).sum(-1, keepdim=True).flatten(1, 2)  # [B, Hq, 1]
        mean = (self.value_sum / store.length.unsqueeze(-1)).float()
        mean = mean.repeat_interleave(weights.shape[2], dim=1)
        rest = (1 - share) * mean
        if call.sinks is not None:
            # A learned sink takes its part of everything; `lse` holds it beside what was read.
            taken = torch.exp(call.sinks.float() - lse).unsqueeze(-1)  # of the denominator over what was read
            rest = rest * (1 - taken) / (1 - taken + taken * share)
            out = out / (1 - taken + taken * share)
        return (share * out + rest).to(out.dtype)

    def bytes_read(self, store: RaggedStore, group: int) -> int:
        # Channels of a token-major key share memory sectors with the others: the whole key comes in.
        channels = self.channels if self.channel_major else store.keys.shape[-1]
        return int(store.length.sum()) * channels * store.keys.element_size()
