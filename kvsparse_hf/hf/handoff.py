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
import weakref
from typing import Any

import torch
from torch import Tensor

from ..errors import UnsupportedOperationError


class _Slots(threading.local):
    attention: Any = None
    keys: Tensor | None = None
    values: Tensor | None = None
    served: Any = None  # a weak reference to the keys whose attention our layer answered last
    readers: tuple = ()
    mask: Any = None


_slots = _Slots()


class _LengthOf(int):
    """A mask length that knows the cache layer it was asked of."""

    layer: Any


def offer_attention(layer: Any, keys: Tensor, values: Tensor) -> None:
    """`update()` of one of our layers ran with `keys` and `values`; the attention call with these belongs to it."""
    _slots.attention = layer
    _slots.keys, _slots.values = keys, values


@torch.compiler.disable
def offer_outside(layer: Any, keys: Tensor, values: Tensor, readers: tuple) -> None:
    """`offer_attention`, and `offer_readers` where there are some, in plain Python, whoever traces the caller."""
    offer_attention(layer, keys, values)
    if readers:
        offer_readers(readers, keys)


def take_attention(keys: Tensor, values: Tensor) -> Any:
    """The layer whose `update()` returned exactly `keys` just before in this thread, or None.

    Raises:
        UnsupportedOperationError: the values are not those that `update()` returned with them.
    """
    layer, offered, offered_values = _slots.attention, _slots.keys, _slots.values
    drop_attention()
    if layer is None or torch.compiler.is_compiling():
        return layer
    if _same(offered, keys):
        # Values may come padded to the width of the keys, for flash attention.
        if not _same(offered_values, values) and values.shape[-1] <= offered_values.shape[-1]:
            raise UnsupportedOperationError(
                f"layer {layer.layer_idx} attends to other values than those it gave the cache: this library cannot serve the model."
            )
        _slots.served = weakref.ref(keys)
        return layer
    layer.session.unclaimed = layer.layer_idx
    return None


def check_unserved(layer_idx: int | None, keys: Tensor) -> None:
    """Refuses an attention call that nothing was offered for, with the keys of the call before: it would see only new tokens.

    Raises:
        UnsupportedOperationError: our layer has answered these keys already.
    """
    if not torch.compiler.is_compiling() and _slots.served is not None and _slots.served() is keys:
        raise UnsupportedOperationError(
            f"layer {layer_idx} attends twice to the keys it gave the cache once: this library cannot serve the model."
        )


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


def _same(offered: Tensor, given: Tensor) -> bool:
    return offered is given or (offered.shape == given.shape and offered.data_ptr() == given.data_ptr())


def _same_keys(offered: Tensor, keys: Tensor) -> bool:
    return _same(offered, keys) or (offered.shape == keys.shape and offered.device != keys.device)


def pending_attention() -> Any:
    """The layer that was offered and not taken: its attention is not ours."""
    return _slots.attention


def drop_attention() -> None:
    """Forgets an offer that nobody took."""
    _slots.attention = _slots.keys = _slots.values = None


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
