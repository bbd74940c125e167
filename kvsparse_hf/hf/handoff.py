"""Hands the cache layer from `update()` to the attention function, and from `get_mask_sizes()` to the mask function.

Transformers gives attention and mask functions no cache. Both hand-offs happen within one thread and one model call. The
attention one goes through a thread-local slot that also remembers the keys it belongs to, so that a slot left over from
an interrupted forward is never mistaken for this one. The mask one rides on the length itself: a subclass of int, which
only our mask function looks into. While a graph is traced neither trick works, nor is needed: the plain slots serve.

In a model that shares keys and values between its layers, the reading layers call no `update()`: the layer that owns them
offers its readers along with itself.

A traced forward that is no plain decode step breaks the graph at both ends of the hand-off (`offer_outside`), because what
a trace writes to a thread-local does not outlive a break.
"""

import threading
from typing import Any

import torch
from torch import Tensor


class _Slots(threading.local):
    attention: Any = None
    keys: Tensor | None = None
    readers: tuple = ()
    mask: Any = None


_slots = _Slots()


class _LengthOf(int):
    """A mask length that knows the cache layer it was asked of."""

    layer: Any


def offer_attention(layer: Any, keys: Tensor) -> None:
    """`update()` of one of our layers ran with `keys`; the attention call with these keys belongs to it."""
    _slots.attention = layer
    _slots.keys = keys


@torch.compiler.disable
def offer_outside(layer: Any, keys: Tensor, readers: tuple) -> None:
    """`offer_attention`, and `offer_readers` where there are some, in plain Python, whoever traces the caller."""
    offer_attention(layer, keys)
    if readers:
        offer_readers(readers, keys)


def take_attention(keys: Tensor) -> Any:
    """The layer whose `update()` returned exactly `keys` just before in this thread, or None."""
    layer, offered = _slots.attention, _slots.keys
    _slots.attention = _slots.keys = None
    if layer is None or torch.compiler.is_compiling() or offered is keys:
        return layer
    if offered.shape == keys.shape and offered.data_ptr() == keys.data_ptr():
        return layer
    layer.session.unclaimed = layer.layer_idx
    return None


def offer_readers(layers: tuple, keys: Tensor) -> None:
    """`update()` ran with `keys` in a layer that others read in a model that shares by itself: these `layers` have no
    `update()`, and their attention calls will come with the same keys."""
    others = tuple(pair for pair in _slots.readers if pair[0] not in layers)
    _slots.readers = (*others, *((layer, keys) for layer in layers))


def take_reader(layer_idx: int | None, keys: Tensor) -> Any:
    """The layer with this index that was offered with exactly `keys` (or their copy on another device), or None."""
    for pair in _slots.readers:
        layer, offered = pair
        if layer.layer_idx == layer_idx and (torch.compiler.is_compiling() or _same_keys(offered, keys)):
            _slots.readers = tuple(other for other in _slots.readers if other is not pair)
            return layer
    return None


def pending_reader(layer_idx: int | None) -> Any:
    """The layer with this index that was offered and not taken."""
    for layer, _ in _slots.readers:
        if layer.layer_idx == layer_idx:
            return layer
    return None


def _same_keys(offered: Tensor, keys: Tensor) -> bool:
    if offered is keys:
        return True
    return offered.shape == keys.shape and (offered.device != keys.device or offered.data_ptr() == keys.data_ptr())


def pending_attention() -> Any:
    """The layer that was offered and not taken: its attention is not ours."""
    return _slots.attention


def drop_attention() -> None:
    """Forgets an offer that nobody took."""
    _slots.attention = _slots.keys = None


def offer_mask(layer: Any, length: int) -> int:
    """`get_mask_sizes()` was asked of `layer`; returns the length in a form from which the mask function finds it."""
    if torch.compiler.is_compiling():
        _slots.mask = layer
        return length
    tagged = _LengthOf(length)
    tagged.layer = layer
    return tagged


def take_mask(length: int) -> Any:
    """The layer of ours that `length` was asked of, or None."""
    if torch.compiler.is_compiling():
        layer, _slots.mask = _slots.mask, None
        return layer
    return length.layer if isinstance(length, _LengthOf) else None
