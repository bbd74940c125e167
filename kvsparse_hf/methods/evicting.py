"""Shared by the methods that evict: they differ in their policy alone."""

from typing import ClassVar

from ..cache import SparseCache
from ..hf.rotary import KeyRotation
from ..layers.evicting import EvictingLayer
from ..options import EvictingOptions
from ..policy.base import Policy


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
        types = getattr(self.binding.config, "layer_types", None)
        rotation = self._rotations.get(types[layer_idx] if types else None)
        policy = self.make_policy(layer_idx)
        return EvictingLayer(layer_idx, self.session, policy, self.options.reserve, self.options.backend, rotation)
