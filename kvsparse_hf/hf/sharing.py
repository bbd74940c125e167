"""Whose keys and values each layer reads: what a model does by itself, and what a checkpoint's config says it was trained for."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PretrainedConfig

from ..errors import OptionError, UnsupportedOperationError
from . import compat

DECLARED = "kvsparse_sharing"


@dataclass(frozen=True)
class LayerMap:
    """One source per decoder layer; an owner is its own.

    Attributes:
        sources: the layer whose keys and values each layer reads.
        native: the model shares like this by itself; otherwise it computes keys and values everywhere, and those of readers
            are dropped.
    """

    sources: tuple[int, ...]
    native: bool

    @classmethod
    def of_model(cls, config: PretrainedConfig) -> "LayerMap":
        """What the model of this (decoder) config does.

        Raises:
            UnsupportedModelError: it shares in a way this library does not know.
        """
        return cls(tuple(compat.shared_sources(config)), native=True)

    def readers_of(self, layer: int) -> list[int]:
        """The layers that read this one, without itself."""
        return [index for index, source in enumerate(self.sources) if source == layer != index]

    @property
    def shares(self) -> bool:
        return any(source != index for index, source in enumerate(self.sources))


def check_sources(sources: Sequence[int], full: Sequence[int], config: PretrainedConfig, what: str) -> tuple[int, ...]:
    """A map for a model that does not share by itself, checked.

    Args:
        sources: one source per decoder layer.
        full: the layers with plain full attention.
        what: names the map in errors.

    Raises:
        OptionError: another length, a layer that reads a later one, a chain, or layers whose keys and values cannot stand for
            one another: sliding windows, other head counts or dimensions.
    """
    layers = config.num_hidden_layers
    if len(sources) != layers:
        raise OptionError(f"{what} names {len(sources)} layers, the model has {layers}.")
    for layer, source in enumerate(sources):
        if isinstance(source, bool) or not isinstance(source, int) or not 0 <= source < layers:
            raise OptionError(f"{what}: layer {layer} reads {source!r}, which is no layer of the model.")
        if source > layer:
            raise OptionError(f"{what}: layer {layer} reads layer {source}, which runs later; it can only read an earlier one.")
        if sources[source] != source:
            raise OptionError(
                f"{what}: layer {layer} reads layer {source}, which itself reads layer {sources[source]}; name the owner instead."
            )
        if source == layer:
            continue
        for index in (layer, source):
            if index not in full:
                raise OptionError(f"{what}: layer {index} has no plain full attention; only such layers can share keys and values.")
        mine, theirs = compat.kv_shape(config, layer), compat.kv_shape(config, source)
        if mine != theirs:
            raise OptionError(
                f"{what}: layer {layer} has {mine[0]} key/value heads of dimension {mine[1]}, layer {source} has {theirs[0]} of "
                f"{theirs[1]}; they cannot share."
            )
    return tuple(sources)


def declared(config: PretrainedConfig) -> dict[str, Any] | None:
    """The sharing that the model of this (decoder) config was trained for: `sources` and, for YOCO, `window`."""
    return getattr(config, DECLARED, None)


def declare(config: PretrainedConfig, sources: Sequence[int], window: int | None = None) -> None:
    """Writes the sharing into the (decoder) config, so that checkpoints carry it and `check_declared` guards it."""
    setattr(config, DECLARED, {"sources": list(sources), "window": window})


def check_undeclared(config: PretrainedConfig, method: str) -> None:
    """Refuses a cache that imposes no map on a model that was trained with one."""
    if declared(config) is not None:
        raise UnsupportedOperationError(
            f"this model was trained with keys and values shared between layers ({DECLARED} in its config), which {method} alone "
            f"does not do: use CLACache(model, inner={method!r}, ...) or YOCOCache."
        )


def check_declared(module: nn.Module) -> None:
    """Refuses a forward without one of our caches in a model that was trained to share keys and values: its layers would
    attend to keys that were never trained.

    Raises:
        UnsupportedOperationError: this attention module belongs to such a model.
    """
    if declared(getattr(module, "config", None)) is None:
        return
    raise UnsupportedOperationError(
        "this model was trained with keys and values shared between layers, and the sharing lives in the cache: pass a fresh one "
        "to every forward, also in training (CLACache(model), YOCOCache(model) or load_preset). use_cache=False, gradient "
        "checkpointing (which takes the cache away) and other caches would run other layers than those that were trained."
    )
