"""Shared by the methods that evict: they differ in their policy alone."""

from typing import ClassVar

from ..cache import SparseCache
from ..errors import OptionError
from ..hf.rotary import KeyRotation, layer_rotation
from ..layers.base import SparseLayer
from ..layers.evicting import EvictingLayer
from ..layers.host import HostMemory, parse_bytes
from ..layers.periodic import BlockDroppingLayer, RecompressingLayer
from ..layers.scored import FollowingLayer, ScoredLayer
from ..layers.tiered import TieredLayer
from ..layers.tiers import FORMATS, Coding
from ..options import EvictingOptions
from ..policy.base import Policy
from ..policy.budgets import Budget
from ..policy.scored import DroppingPolicy, FollowingPolicy, ObservingPolicy
from ..policy.tiers import HOST, QUANTIZED, Rest
from ..registry import get_method, list_methods

# How a layer decodes follows from what its policy decides; the most particular comes first.
_LAYERS = (
    (DroppingPolicy, BlockDroppingLayer),
    (FollowingPolicy, FollowingLayer),
    (ObservingPolicy, ScoredLayer),
    (Policy, EvictingLayer),
)


_INTERVAL = 16  # decoded tokens between two rankings, where a method ranks while it decodes and does not evict


class EvictingCache(SparseCache):
    """A cache of `EvictingLayer`s. A method gives `Options` and `make_policy`.

    With `action="offload"` or `"quantize"`, what the method would drop goes to host memory or to few bits instead, and every
    step still attends to it: a `TieredLayer` whose device tier is the budget. Chunks of a prompt are chosen from anew among
    all its tokens. Methods that rank while they decode do so after every `interval` tokens, and may bring tokens back.

    Attributes:
        other_actions: whether the method can offload and quantize.
    """

    action: str = "evict"
    other_actions: ClassVar[bool] = False
    Options: ClassVar[type] = EvictingOptions

    def make_policy(self, layer_idx: int) -> Policy:
        """What stays in one layer."""
        raise TypeError(f"{type(self).__name__} does not say what it keeps.")

    def prepare(self) -> None:
        self.action = getattr(self.options, "action", type(self).action)
        if self.action in ("offload", "quantize"):
            self._prepare_tiers()

    def _prepare_tiers(self) -> None:
        options = self.options
        if not self.other_actions:
            able = ", ".join(name for name in list_methods() if getattr(get_method(name), "other_actions", False))
            raise OptionError(f"{self.method} can only evict; action={self.action!r} is available for {able}.")
        refused = {
            "decode='bounded'": getattr(options, "decode", "grow") != "grow",
            "recompress_every": getattr(options, "recompress_every", None) is not None,
            "positions='cache'": options.positions == "cache",
            "backend='flash'": options.backend == "flash",
            "a budget in bytes": Budget.parse(options.budget).nbytes is not None,
        }
        for name, given in refused.items():
            if given:
                raise OptionError(
                    f"action={self.action!r} with {name} is not available: nothing leaves the reach of a step, so there is nothing to "
                    "overwrite or renumber. Leave it out; a budget is the number or the share of entries in full precision on the device."
                )
        self._coding = Coding(FORMATS[options.bits], options.group)
        if self.action == "quantize" and self.binding.head_dim:
            self._coding.check(self.binding.head_dim)
        self._memory = HostMemory(parse_bytes(options.host_bytes, "host_bytes"))
        self.prefix_safe = self.action == "offload"

    def _tiered_layer(self, layer_idx: int, policy: Policy) -> TieredLayer:
        options = self.options
        ranks = isinstance(policy, ObservingPolicy)
        return TieredLayer(
            layer_idx,
            self.session,
            policy,
            Rest(HOST if self.action == "offload" else QUANTIZED),
            (options.interval or _INTERVAL) if ranks else None,
            options.reserve,
            options.backend,
            self._memory,
            self._coding,
        )

    def make_layer(self, layer_idx: int) -> SparseLayer:
        options, policy = self.options, self.make_policy(layer_idx)
        if self.action in ("offload", "quantize") and policy.budget is not None:
            return self._tiered_layer(layer_idx, policy)
        interval = getattr(options, "recompress_every", None)
        if interval is not None and policy.budget is not None:
            return RecompressingLayer(layer_idx, self.session, policy, options.reserve, options.backend, interval)
        kind = next(layer for decides, layer in _LAYERS if isinstance(policy, decides))
        rotation = None
        if getattr(options, "positions", "original") == "cache":
            rotation = layer_rotation(KeyRotation, self.binding.config, self.binding.decoder_class, layer_idx)
        return kind(layer_idx, self.session, policy, options.reserve, options.backend, rotation)
