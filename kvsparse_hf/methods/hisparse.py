"""HiSparse: keys and values in host memory, what a step selects in a hot buffer on the device."""

from typing import Any, Literal

import torch
from pydantic import Field, field_validator, model_validator
from transformers import PretrainedConfig, PreTrainedModel

from ..calibrate.loki import load_basis
from ..errors import OptionError, PresetError
from ..layers.base import SparseLayer
from ..layers.evicting import EvictingLayer
from ..layers.host import HostMemory, parse_bytes
from ..layers.offloading import OffloadingLayer
from ..layers.placement import Placement
from ..layers.selectors.base import Selector
from ..layers.selectors.clusters import ClusterSelector
from ..layers.selectors.lowrank_pages import LowRankPageSelector
from ..layers.selectors.pages import PageSelector, forced_pages
from ..policy.base import Policy
from ..policy.budgets import Budget
from ..registry import register_method
from .selecting import GroupSelectingOptions, SelectingCache, leading


class HiSparseOptions(GroupSelectingOptions):
    """Options of `HiSparseCache`. A hot buffer of twice the budget is HiSparse's default; the selectors' defaults are those of
    `QuestCache`, `LokiCache` and `RetrievalAttentionCache`."""

    selector: Literal["quest", "loki", "ivf"] = Field("quest", description="what ranks: bounds of pages, low-rank keys, or clusters")
    page_size: int | None = Field(
        None, ge=1, description="tokens of a page, a power of two; default 16. 'ivf' retrieves single tokens: always 1"
    )
    hot_tokens: int | None = Field(
        None, ge=1, description="tokens per key/value head in the hot buffer, whole pages; default: twice what a step reads"
    )
    host_bytes: int | str | None = Field(
        None, description="most host memory that the cache may take ('64GiB'); default: 90 % of what the machine has available"
    )
    device_bytes: int | str | None = Field(
        None,
        description="keys, values and tables may take so much of the device ('8GiB'): as many layers as fit stay there whole; "
        "default: every layer is offloaded whose pages do not fit into its hot buffer",
    )
    prefetch: int = Field(0, ge=0, description="next-ranked pages that are fetched after each step for the one to come")
    dense_layers: int | None = Field(
        None, ge=0, description="so many first decoder layers read everything and stay on the device; default 2 for 'quest', else 0"
    )
    d_f: int | float = Field(0.25, gt=0, description="loki: leading components that rank: an int, or a share of the head size")
    basis: str | None = Field(
        None, description="loki: file that `kvsparse calibrate loki` wrote; without one, the basis of the prompt's own keys"
    )
    estimate: float = Field(
        0.232, ge=0, le=1, description="ivf: share of the clusters that stand in by their means, after those read exactly"
    )
    per_cluster: int = Field(16, ge=1, description="ivf: tokens of a cluster in the mean")
    segment: int = Field(8192, ge=64, description="ivf: tokens that are clustered together")
    update_every: int = Field(1024, ge=1, description="ivf: new tokens that gather before the index takes them in")

    @property
    def tokens_per_page(self) -> int:
        return self.page_size or (1 if self.selector == "ivf" else 16)

    @property
    def first_layers(self) -> int:
        """First decoder layers that are dense."""
        return self.dense_layers if self.dense_layers is not None else 2 if self.selector == "quest" else 0

    @field_validator("page_size")
    @classmethod
    def _power_of_two(cls, value: int | None) -> int | None:
        if value is not None and value & (value - 1):
            raise ValueError("must be a power of two (16, 32 or 64)")
        return value

    def protected(self) -> tuple[int, str]:
        size = self.tokens_per_page
        if self.selector == "ivf":
            return super().protected()
        pages = sum(forced_pages(self.sinks, self.recent, size)) + 1
        return pages * size, f"the pages of sinks and recent + one page of {size}"

    @model_validator(mode="after")
    def _check_pages(self) -> "HiSparseOptions":
        parse_bytes(self.host_bytes, "host_bytes")
        parse_bytes(self.device_bytes, "device_bytes")
        size = self.tokens_per_page
        if self.selector == "ivf" and size != 1:
            raise OptionError(f"page_size={size}: the clusters of selector='ivf' retrieve single tokens; leave page_size out.")
        if self.selector == "ivf" and self.prefetch:
            raise OptionError("prefetch needs a ranking of pages, which selector='ivf' has not; use 'quest' or 'loki'.")
        if self.hot_tokens is not None and self.hot_tokens % size:
            raise OptionError(f"hot_tokens={self.hot_tokens} is no multiple of the page of {size} tokens.")
        return self


@register_method("hisparse")
class HiSparseCache(SelectingCache):
    """HiSparse (SGLang, "HiSparse: Turbocharging Sparse Attention with Hierarchical Memory", LMSYS blog, 2026-04-10).

    Sparse attention reduces what a step reads, not what must be stored. Here all keys and values are stored in host memory
    and each layer has a hot buffer of `hot_tokens` per key/value head on the device. A step selects as Quest, Loki or
    RetroInfer do; the pages that are not in the buffer replace the least recently used ones, read straight from host memory
    by the kernel that copies them. Attention is that of the selector alone, bit for bit.

    When it pays: offloading saves memory, not time. A step of `k` selected tokens brings in `(1 - hit rate) * k` of them over
    the link, so that the throughput of a whole batch is bounded by link bandwidth over that (`kvsparse bench offload` states
    the law beside the measurement). It wins where the batch or the context does not fit the device otherwise. With
    `device_bytes`, layers stay on the device while there is room, and a small batch loses nothing.

    `prefetch` pays where the next step wants what this one ranked next *and* the link is idle meanwhile; it moves more bytes
    in any case. Leave it at 0 where the link is the limit.

    With "ivf" a page is one token, as clusters gather tokens from everywhere: fetching their whole pages would move many times
    what is read. Single rows reach about half the bandwidth that pages of 16 do, and the tables count tokens.

    Deviations from the published system, which serves models with one key/value head: every key/value head selects and
    keeps its own pages; what moves is a page, not a token; the page being filled stays on the device until it is full, where
    HiSparse writes each token through one step later and so misses the newest ones; the hot buffer begins with the pages that
    the prompt's last queries chose; least recently used is meant by steps, with one stamp per slot; layers stay on the
    device whole; hits are not attended while misses are under way, which would change the sum. Further turns, later chunks of
    a prompt and drafts are attended against everything, as all selecting methods here do it, which brings the layer's pages
    back each time: exact, and slow for many small chunks.

    Example:
        >>> cache = HiSparseCache(model, budget=2048, host_bytes="64GiB")
        >>> model.generate(**inputs, past_key_values=cache)
    """

    paper = "LMSYS blog 2026-04-10"
    action = "offload"
    Options = HiSparseOptions

    def __init__(self, model: PreTrainedModel | PretrainedConfig, **options):
        self._model = model  # the basis file is checked against its weights
        super().__init__(model, **options)
        del self._model, self._bases, self._memory, self._placement, self._offloading

    def prepare(self) -> None:
        options = self.options
        self._bases = None
        if options.selector == "loki" and options.basis is not None:
            self._bases = load_basis(options.basis, self._model, self.binding)
        self._offloading = [index for index in self._sparse if index >= options.first_layers]
        self._memory = HostMemory(parse_bytes(options.host_bytes, "host_bytes"))
        self._placement = Placement(
            options.hot_tokens, parse_bytes(options.device_bytes, "device_bytes"), options.prefetch, len(self._offloading)
        )
        tokens = Budget.parse(options.budget).tokens
        if tokens is not None and self._offloading:
            selector = self.make_selector(self._offloading[0])
            self._placement.slots(selector, int(selector.page_budget(torch.tensor([tokens]))))  # refuses a small hot buffer

    def make_layer(self, layer_idx: int) -> SparseLayer:
        options = self.options
        if layer_idx not in self._offloading:
            return EvictingLayer(layer_idx, self.session, Policy(), options.reserve, options.backend)
        selector, budget = self.make_selector(layer_idx), Budget.parse(options.budget)
        where = (self._placement, self._offloading.index(layer_idx), self._memory)
        return OffloadingLayer(layer_idx, self.session, selector, budget, options.reserve, options.backend, *where)

    def make_selector(self, layer_idx: int) -> Selector:
        options = self.options
        common: tuple[Any, ...] = (options.sinks, options.recent, options.reduce)
        if options.selector == "quest":
            return PageSelector(*common, options.tokens_per_page, options.backend)
        if options.selector == "ivf":
            clusters = (options.update_every, options.per_cluster, options.segment, options.estimate, False)
            return ClusterSelector(*common, *clusters, options.backend)
        if self._bases is not None and layer_idx not in self._bases:
            raise PresetError(f"basis {options.basis!r} has none for layer {layer_idx}.")
        basis = None if self._bases is None else self._bases[layer_idx]
        components = leading(options.d_f, self.binding.head_dim, "d_f")
        return LowRankPageSelector(*common, components, basis, options.tokens_per_page, options.backend)
