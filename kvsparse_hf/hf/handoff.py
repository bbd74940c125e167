"""Hands the cache layer from `update()` to the attention function, and from `get_mask_sizes()` to the mask function.

Transformers gives attention and mask functions no cache. Both hand-offs happen within one thread and one model call, so
a thread-local slot carries them: set just before, taken (and cleared) just after. Nothing is stored on modules.
"""

import threading
from typing import Any


class _Slots(threading.local):
    attention: Any = None
    mask: Any = None


_slots = _Slots()


def offer_attention(layer: Any) -> None:
    """`update()` of one of our layers ran; the next attention call belongs to it."""
    _slots.attention = layer


def take_attention() -> Any:
    """The layer whose `update()` ran just before in this thread, or None."""
    layer = _slots.attention
    _slots.attention = None
    return layer


def pending_attention() -> Any:
    """The layer that was offered and not taken: its attention is not ours."""
    return _slots.attention


def offer_mask(layer: Any) -> None:
    """`get_mask_sizes()` was asked of `layer` (None: of a layer that is not ours)."""
    _slots.mask = layer


def take_mask() -> Any:
    """The layer whose mask sizes were asked just before in this thread, or None."""
    layer = _slots.mask
    _slots.mask = None
    return layer
