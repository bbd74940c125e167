"""Ada-KV: the heads of a layer share its budget by how many of the layer's best tokens they hold."""

from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, model_validator

from ..errors import OptionError
from ..hf.rotary import FutureRotation, layer_rotation
from ..policy.base import Policy
from ..policy.budgets import Budget
from ..policy.heads import AdaptiveHeads
from ..registry import register_method
from .expected_attention import ExpectedAttentionPolicy
from .pyramidkv import PyramidPolicy
from .snapkv import SnapKVCache, SnapKVOptions, WindowPolicy


@dataclass(frozen=True)
class AdaptiveWindowPolicy(AdaptiveHeads, WindowPolicy):
    """SnapKV's scores."""


@dataclass(frozen=True)
class AdaptivePyramidPolicy(AdaptiveHeads, PyramidPolicy):
    """SnapKV's scores, and PyramidKV's budget per layer."""


@dataclass(frozen=True)
class AdaptiveExpectedPolicy(AdaptiveHeads, ExpectedAttentionPolicy):
    """Expected Attention's scores."""


class AdaKVOptions(SnapKVOptions):
    """Options of `AdaKVCache`. Defaults: the published code's (window, kernel and pooling as in SnapKV)."""

    scorer: Literal["snapkv", "pyramidkv", "expected-attention"] = Field(
        "snapkv", description="whose scores: SnapKV's, the same with PyramidKV's budget per layer, or Expected Attention's"
    )
    alpha: float = Field(
        0.2, ge=0.0, le=1.0, description="safeguard: the part of the budget beside the window that every head gets; 1 is uniform"
    )
    formula: Literal["exact", "official"] = Field(
        "exact", description="'exact': the heads' shares sum to the budget; 'official': each is rounded by itself, as published"
    )
    normalize: bool = Field(False, description="weigh a head's scores by how much of their sum its best tokens hold (forks do)")
    beta: int = Field(20, ge=1, description="scorer='pyramidkv': the last layer gets 1/beta of the average")
    future: int = Field(512, ge=1, description="scorer='expected-attention': positions over which the rotation is averaged")
    epsilon: float = Field(0.0, ge=0.0, description="scorer='expected-attention': added before the length of the value")

    @model_validator(mode="before")
    @classmethod
    def _expected_sinks(cls, given: Any) -> Any:
        if given.get("scorer") == "expected-attention":
            return {"sinks": 4, **given}  # its scores leave the sinks out, so they must be protected
        return given

    def newest_queries(self) -> int:
        return ExpectedAttentionPolicy.observed if self.scorer == "expected-attention" else self.window

    def protected(self) -> tuple[int, str]:
        if self.scorer == "expected-attention":
            return self.sinks + self.recent, "sinks + recent"
        return super().protected()

    @model_validator(mode="after")
    def _check_ring(self) -> "AdaKVOptions":
        if self.scorer == "expected-attention" and self.decode == "bounded" and self.recent < 1:
            raise OptionError("decode='bounded' with scorer='expected-attention' needs recent >= 1: the ring of the newest tokens.")
        return self


@register_method("adakv")
class AdaKVCache(SnapKVCache):
    """Ada-KV (Feng et al., "Optimizing KV Cache Eviction by Adaptive Budget Allocation for Efficient LLM Inference", NeurIPS
    2025, arXiv 2407.11550).

    Of a layer's budget, beside what every head keeps anyway (the window), the part `alpha` is split evenly; the rest goes to
    the heads by how many of the layer's best-scored tokens lie in each. Then every head keeps its own best. The store is
    ragged, so the bytes held are those of the budget.

    Deviations from the published code: the shares are rounded by largest remainder, so that they sum to the budget exactly
    (`formula="official"` rounds each head by itself and may lose a few); no head gets more than exists, and what it cannot
    take goes to the others; scores are per key/value head; rows of a batch are shared out one by one. Of chunks and later
    turns that compress, each shares out anew; `decode="bounded"` and `recompress_every` keep the shares of the last prompt.
    Further deviations: as `SnapKVCache`.

    Example:
        >>> cache = AdaKVCache(model, budget=1024)
        >>> model.generate(**inputs, past_key_values=cache)
    """

    paper = "arXiv 2407.11550"
    Options = AdaKVOptions

    def make_policy(self, layer_idx: int) -> Policy:
        options = self.options
        shares = dict(alpha=options.alpha, official=options.formula == "official", normalize=options.normalize)
        if options.scorer == "pyramidkv":
            depth, depths = self._sparse.index(layer_idx), len(self._sparse)
            return AdaptivePyramidPolicy(**self.window_settings(), **shares, depth=depth, depths=depths, beta=options.beta)
        if options.scorer == "snapkv":
            return AdaptiveWindowPolicy(**self.window_settings(), **shares)
        return AdaptiveExpectedPolicy(
            Budget.parse(options.budget),
            sinks=options.sinks,
            recent=options.recent,
            bounded=options.decode == "bounded",
            rotation=layer_rotation(FutureRotation, self.binding.config, self.binding.decoder_class, layer_idx),
            future=options.future,
            epsilon=options.epsilon,
            **shares,
        )
