"""Shared by the methods that evict: they differ in their policy alone."""

from typing import ClassVar

from ..cache import SparseCache
from ..hf.rotary import KeyRotation
from ..layers.evicting import EvictingLayer
from ..layers.periodic import BlockDroppingLayer, RecompressingLayer
from ..layers.scored import FollowingLayer, ScoredLayer
from ..options import EvictingOptions
from ..policy.base import Policy
from ..policy.scored import DroppingPolicy, FollowingPolicy, ObservingPolicy

# How a layer decodes follows from what its policy decides; the most particular comes first.
_LAYERS = (
    (DroppingPolicy, BlockDroppingLayer),
    (FollowingPolicy, FollowingLayer),
    (ObservingPolicy, ScoredLayer),
    (Policy, EvictingLayer),
)


class EvictingCache(SparseCache):
    """A cache of `EvictingLayer`s. A method gives `Options` and `make_policy`."""

    action: ClassVar[str] = "evict"
    Options: ClassVar[type] = EvictingOptions

    def make_policy(self, layer_idx: int) -> Policy:
        """What stays in one layer."""
        raise TypeError(f"{type(self).__name__} does not say what it keeps.")

    def prepare(self) -> None:
        self._rotations = {}
        if getattr(self.options, "positions", "original") == "cache":
            types = getattr(self.binding.config, "layer_types", None) or [None] * self.binding.layers
            for layer_type in dict.fromkeys(types):
                if layer_type in (None, "full_attention"):
                    self._rotations[layer_type] = KeyRotation(self.binding.config, self.binding.model_class, layer_type)

    def make_layer(self, layer_idx: int) -> EvictingLayer:
        options, policy = self.options, self.make_policy(layer_idx)
        interval = getattr(options, "recompress_every", None)
        if interval is not None and policy.budget is not None:
            return RecompressingLayer(layer_idx, self.session, policy, options.reserve, options.backend, interval)
        kind = next(layer for decides, layer in _LAYERS if isinstance(policy, decides))
        types = getattr(self.binding.config, "layer_types", None)
        rotation = self._rotations.get(types[layer_idx] if types else None)
        return kind(layer_idx, self.session, policy, options.reserve, options.backend, rotation)
