"""Budgets that differ from layer to layer, at an exact total."""

import torch
from torch import Tensor

from .budgets import largest_remainder


def pyramid(average: int, length: int, reserved: int, depths: int, beta: int, exact: bool) -> Tensor:
    """Entries per layer, beside the reserved ones, that shrink linearly with depth.

    The last layer gets `average // beta`, the first what is left of twice the average, at most all there are. Where the
    whole prompt is shorter than twice the average, every layer gets the average (a published rule).

    Args:
        average: entries per layer on average.
        length: tokens of the prompt; reserved: how many of them every layer keeps anyway.
        depths: layers.
        exact: True spreads the rounding so that the sum is `depths * average`. False is the published arithmetic, whose
            step is rounded down, so that the sum is up to a few per cent larger.

    Returns:
        `[depths]` int64, first layer first.
    """
    if length < 2 * average or depths == 1 or average == 0:
        return torch.full((depths,), average)
    lowest = average // beta
    highest = 2 * average - lowest
    if highest >= length - reserved:
        highest = length - reserved
        lowest = 2 * average - highest
    layer = torch.arange(depths)
    if not exact:
        return highest - layer * ((highest - lowest) // (depths - 1))
    return largest_remainder(highest - layer.double() * (highest - lowest) / (depths - 1), depths * average)


def weighted(average: int, weights: list[float]) -> Tensor:
    """Entries per layer in proportion to `weights` `[depths]`, with the sum `depths * average`."""
    return largest_remainder(torch.tensor(weights, dtype=torch.float64), len(weights) * average)
