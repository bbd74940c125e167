"""What a cache holds, measured from its storages."""

from dataclasses import asdict, dataclass, field

import torch

from .layers.base import SparseLayer
from .layers.store import storage_bytes


@dataclass(frozen=True)
class LayerReport:
    """Kept entries over the rows and heads of one layer."""

    layer: int
    kept_min: int
    kept_mean: float
    kept_max: int


@dataclass(frozen=True)
class CacheReport:
    """Figures of a cache at one moment. Bytes are those of the storages, never computed from a ratio.

    Attributes:
        method: name of the method.
        seen: real tokens each row has seen.
        layers: kept entries per budgeted layer.
        device_bytes: everything the cache holds on the device, including `reserve_bytes`.
        reserve_bytes: the part of it that waits empty for tokens to be decoded.
        host_bytes: what it holds in host memory for offloaded tokens.
        dense_bytes: what a dense cache of the same tokens would hold.
        evicted: entries (token x layer x head) that are gone.
        read_bytes: keys, values and metadata that the next decode step reads in the layers that are ours.
        hits, misses: pages that steps of a host-offload cache found on the device, or had to fetch.
        swapped_bytes: what it brought from the host to the device.
        tiers: entries by the place where they are, of a cache that has several; together all that can still be read.
    """

    method: str
    seen: list[int]
    layers: list[LayerReport] = field(repr=False)
    device_bytes: int
    reserve_bytes: int
    host_bytes: int
    dense_bytes: int
    evicted: int
    read_bytes: int = 0
    hits: int = 0
    misses: int = 0
    swapped_bytes: int = 0
    tiers: dict[str, int] = field(default_factory=dict)

    @property
    def kept(self) -> float:
        """Kept entries per row and head, averaged over the budgeted layers."""
        return sum(layer.kept_mean for layer in self.layers) / len(self.layers) if self.layers else 0.0

    @property
    def share(self) -> float:
        """Bytes held (without the reserve) as a share of dense."""
        held = self.device_bytes - self.reserve_bytes
        return held / self.dense_bytes if self.dense_bytes else 0.0

    def to_dict(self) -> dict:
        return asdict(self)

    def __str__(self) -> str:
        low = min((layer.kept_min for layer in self.layers), default=0)
        high = max((layer.kept_max for layer in self.layers), default=0)
        rows = [
            ("method", self.method),
            ("seen per row", ", ".join(map(str, self.seen)) or "nothing yet"),
            ("kept per head", f"{low} / {self.kept:.1f} / {high} (min / mean / max over {len(self.layers)} layers)"),
            ("device bytes", f"{_mib(self.device_bytes)}, of which {_mib(self.reserve_bytes)} reserved for decode"),
            ("host bytes", _mib(self.host_bytes)),
            ("dense bytes", f"{_mib(self.dense_bytes)} (held: {self.share:.1%})"),
            ("evicted", f"{self.evicted} entries"),
            ("read per step", _mib(self.read_bytes)),
        ]
        if self.hits or self.misses:
            rows.append(("hits / misses", f"{self.hits} / {self.misses}, {_mib(self.swapped_bytes)} swapped"))
        if self.tiers:
            rows.append(("entries in", ", ".join(f"{name} {count}" for name, count in self.tiers.items())))
        return "\n".join(f"{name:<14} {value}" for name, value in rows)


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.2f} MiB"


def make_report(method: str, layers: list, seen: list[int]) -> CacheReport:
    """Reads all layers of a cache. Waits for the device."""
    ours = [layer for layer in layers if isinstance(layer, SparseLayer) and layer.is_initialized]
    others = [layer for layer in layers if not isinstance(layer, SparseLayer)]
    other_tensors = [t for layer in others for t in vars(layer).values() if isinstance(t, torch.Tensor)]
    other_bytes = storage_bytes(other_tensors)
    reports, device, reserve, host, dense, evicted, read = [], 0, 0, 0, 0, 0, 0
    traffic, tiers = [0, 0, 0], {}
    for layer in ours:
        length = layer.kept_entries().cpu()
        reports.append(LayerReport(layer.layer_idx, int(length.min()), float(length.double().mean()), int(length.max())))
        device += layer.device_bytes()
        reserve += layer.reserve_bytes()
        host += layer.host_bytes()
        # A layer that reads this one's tokens reads them once more; a dense cache holds its own, unless the model shares.
        dense += layer.dense_bytes(sum(seen)) * (1 + len(layer.readers) - len(layer.native_readers))
        read += layer.bytes_read_per_step() * (1 + len(layer.readers))
        for name, count in layer.tier_entries().items():
            tiers[name] = tiers.get(name, 0) + count
        traffic = [total + new for total, new in zip(traffic, layer.traffic(), strict=True)]
        evicted += max(sum(seen) * layer.store.heads - int(layer.reachable_entries().sum()), 0)
    held = (device + other_bytes, reserve, host, dense + other_bytes)
    return CacheReport(method, seen, reports, *held, evicted, read, *traffic, tiers)
