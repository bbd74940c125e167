"""What offloading can give at best: tokens per second from bytes and bandwidths."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """Bandwidths in bytes per second, and the seconds that planning and starting a fetch take in one layer.

    The defaults are those measured on one H200 (zero-copy reads of pages over PCIe 5, copies within HBM).
    """

    memory: float = 4.0e12
    link: float = 47e9
    swap: float = 7.1e-6


@dataclass(frozen=True)
class Work:
    """One decode step of one row, in bytes.

    Attributes:
        weights: that a step reads, once for the whole batch.
        selected: keys and values of the selected tokens, all layers.
        metadata: that the selection reads, all layers.
        layers: that offload.
    """

    weights: float
    selected: float
    metadata: float
    layers: int


def throughput(work: Work, batch: int, hit_rate: float, machine: Machine, overlapped: bool = False) -> float:
    """Tokens per second of a batch whose selected pages are on the device with this rate.

    Serial: T = weights / memory + B (selected + metadata) / memory + B (1 - h) selected / link + layers * swap. Overlapped, the
    link works while the device reads. With h = 1 and no layers this is the selection alone; with `selected` = everything,
    dense attention.
    """
    device = (work.weights + batch * (work.selected + work.metadata)) / machine.memory
    link = batch * (1 - hit_rate) * work.selected / machine.link
    return batch / ((max(device, link) if overlapped else device + link) + work.layers * machine.swap)


def needed_hit_rate(best: float, selected: float, machine: Machine) -> float:
    """The rate above which offloading can beat `best` tokens per second at all, whatever the batch."""
    return 1 - machine.link / (best * selected)
