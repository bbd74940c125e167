"""One row and key/value head of a tiered cache in plain Python and fp64, one token at a time."""

import math

import torch
from torch import Tensor

LEVELS = {"int8": 255, "int4": 15}


def rounded(x: Tensor, format: str, group: int) -> Tensor:
    """`[D]` after one trip through few bits, from the definition of the formats."""
    out = []
    for part in x.double().split(group):
        low, high = float(part.min()), float(part.max())
        if format == "fp8":
            peak = float(part.abs().max())
            out += [_fp8(float(value) / peak * 448) * peak / 448 if peak else 0.0 for value in part]
        else:
            step = (high - low) / LEVELS[format]
            out += [low + round((float(value) - low) / step) * step if step else low for value in part]
    return torch.tensor(out, dtype=torch.float64)


def _fp8(value: float) -> float:
    """The nearest number with three bits behind the leading one, multiples of 2^-9 below 2^-6."""
    if value == 0:
        return 0.0
    unit = 2.0 ** (max(math.floor(math.log2(abs(value))), -6) - 3)
    return round(value / unit) * unit


class Tiers:
    """Follows what the published rule does to one head: `row` is the `Row` of the driver that feeds the layer.

    Attributes:
        tier: position -> "device", "host" or "quantized"; score: position -> attention received.
        keys, values: position -> `[D]` fp64 as they are held.
        coded: positions that were rounded once.
    """

    def __init__(self, row, head: int, scale: float, shares: dict, sinks: int, recent: int, format: str = "int8", group: int = 8):
        self.row, self.head, self.scale = row, head, scale
        self.shares, self.sinks, self.recent = shares, sinks, recent
        self.format, self.group = format, group
        self.tier, self.score, self.keys, self.values = {}, {}, {}, {}
        self.coded: set[int] = set()
        self.center, self.spread = 0.0, 1.0  # of each channel of the keys
        heads = row.k.shape[0]
        size = row.q.shape[0] // heads
        self.queries = range(head * size, head * size + size)

    def feed(self, first: int, last: int) -> Tensor:
        """Tokens `first` to `last` (exclusive) arrive together: `[group, T, D]` outputs. They land on the device."""
        if first == 0 and last >= 32:
            prompt = self.row.k[self.head, :last].double()
            self.center = prompt.mean(0)
            self.spread = (prompt - self.center).abs().amax(0)
        outs = torch.zeros(len(self.queries), last - first, self.row.v.shape[-1], dtype=torch.float64)
        for position in range(first, last):
            self.tier[position], self.score[position] = "device", 0.0
            self.keys[position] = self.row.k[self.head, position].double()
            self.values[position] = self.row.v[self.head, position].double()
            held = sorted(self.tier)
            keys, values = (torch.stack([kind[p] for p in held]) for kind in (self.keys, self.values))
            for index, query in enumerate(self.queries):
                weights = torch.softmax(keys @ self.row.q[query, position].double() * self.scale, dim=0)
                outs[index, position - first] = weights @ values
                for p, weight in zip(held, weights.tolist(), strict=True):
                    self.score[p] += weight / len(self.queries)
        return outs

    def rounded_key(self, key: Tensor) -> Tensor:
        """Every channel is coded as its distance from what the prompt showed, in units of that."""
        return self.center + self.spread * rounded((key.double() - self.center) / self.spread, self.format, self.group)

    def rank(self, seen: int) -> None:
        """Everybody to his tier; `seen` tokens so far."""
        newest = max(self.tier)
        protected = [p for p in self.tier if p < self.sinks or p > newest - self.recent]
        others = sorted((p for p in self.tier if p not in protected), key=lambda p: (-self.score[p], p))
        order = sorted(protected) + others
        gone, coded, host = (math.floor(seen * self.shares.get(name, 0.0) + 1e-9) for name in ("evicted", "quantized", "host"))
        ends = [max(seen - gone - coded - host, len(protected)), max(seen - gone - coded, len(protected)),
                max(seen - gone, len(protected))]
        for place, p in enumerate(order):
            index = sum(place >= end for end in ends)
            if index == 3:
                for facts in (self.tier, self.score, self.keys, self.values):
                    del facts[p]
                continue
            self.tier[p] = ("device", "host", "quantized")[index]
            if index == 2 and p not in self.coded:
                self.coded.add(p)
                self.keys[p] = self.rounded_key(self.keys[p])
                self.values[p] = rounded(self.values[p], self.format, self.group)


def tiers_of(layer, row: int, head: int) -> dict[int, str]:
    """Where the layer holds each position."""
    out = {}
    for name, store in zip(("device", "host", "quantized"), layer.tiers, strict=True):
        if store is not None:
            first, count = int(store.start[row, head]), int(store.length[row, head])
            positions = store.positions[first : first + count].tolist()
            assert not set(positions) & set(out), "a position lies in two tiers"
            out |= dict.fromkeys(positions, name)
    return out


def held_values(layer, row: int, head: int) -> dict[int, tuple[Tensor, Tensor]]:
    """Key and value of each position, as a step would use them."""
    out = {}
    for store in layer.stores:
        rows = torch.arange(int(store.length[row, head])) + store.start[row, head]
        for position, key, value in zip(store.positions[rows].tolist(), *store.fetch(rows), strict=True):
            out[position] = key, value
    return out
