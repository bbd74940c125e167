"""Which layers of a cache are offloaded, and how large their hot buffers are."""

from dataclasses import dataclass

from ..errors import BudgetError
from .selectors.base import Selector


@dataclass(frozen=True)
class Placement:
    """Where the layers of a cache are.

    Attributes:
        hot_tokens: tokens per key/value head in the hot buffer of an offloaded layer, None: twice what a step reads.
        device_bytes: what keys, values and tables of all offloading layers may take on the device; None: as little as can be.
        prefetch: pages that are brought in early after a step.
        layers: layers that share this.
    """

    hot_tokens: int | None
    device_bytes: int | None
    prefetch: int
    layers: int

    def slots(self, selector: Selector, width: int) -> int:
        """Slots of a hot buffer for steps that read `width` pages.

        Raises:
            BudgetError: the buffer cannot hold what a step lists, the sinks and the page that is being filled.
        """
        least = selector.listed_pages(width) + self.prefetch + pinned_pages(selector) + 1
        if self.hot_tokens is None:
            return max(2 * width, least)
        if self.hot_tokens // selector.page_size < least:
            raise BudgetError(
                f"hot_tokens={self.hot_tokens} is below what a step may need at once: {least * selector.page_size} tokens (the "
                "pages it reads, those of the sinks, those fetched early, and the newest). Raise hot_tokens or lower the budget."
            )
        return self.hot_tokens // selector.page_size

    def resident(self, dense: int, hot: int) -> int:
        """How many layers stay wholly on the device, where they take `dense` bytes there, and offloaded ones `hot`.

        Raises:
            BudgetError: not even the hot buffers fit.
        """
        if dense <= hot:
            return self.layers
        if self.device_bytes is None:
            return 0
        if self.layers * hot > self.device_bytes:
            raise BudgetError(
                f"device_bytes={self.device_bytes} cannot hold the hot buffers of {self.layers} layers, {self.layers * hot} bytes: "
                "raise device_bytes, or lower hot_tokens, the budget or the batch."
            )
        return min((self.device_bytes - self.layers * hot) // (dense - hot), self.layers)


def pinned_pages(selector: Selector) -> int:
    """First pages that never leave the device."""
    return -(-selector.sinks // selector.page_size)
