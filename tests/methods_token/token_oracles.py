"""The published rules in fp64, by brute force, for one row without padding. Written from the maths, with no code shared.

Kept sets are Python lists of positions. The papers' size is `budget - 1`: attend to what is kept and the new token, then
drop; so what a layer holds during a step is what was kept, and the new token.
"""

import math

import torch
from torch import Tensor


def weights(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """`q [G, D]`, `k [N, D]` -> `[G, N]`."""
    return torch.softmax(q.double() @ k.double().T * scale, dim=-1)


def causal(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """`q [G, N, D]`, `k [N, D]` -> the whole attention matrix `[G, N, N]`."""
    logits = q.double() @ k.double().T * scale
    n = k.shape[0]
    logits = logits.masked_fill(torch.ones(n, n).triu(1).bool(), -math.inf)
    return torch.softmax(logits, dim=-1)


def group(row, head: int) -> slice:
    """Query heads of a key/value head."""
    size = row.q.shape[0] // row.k.shape[0]
    return slice(head * size, (head + 1) * size)


def best(score: dict[int, float], count: int) -> list[int]:
    """Positions with the highest scores; ties go to the lower position."""
    return sorted(sorted(score, key=lambda j: (-score[j], j))[:count])


def top_with_protected(score: dict[int, float], count: int, sinks: int, recent: int) -> list[int]:
    """The newest `recent`, the first `sinks` and the best of the others."""
    order = sorted(score)
    safe = set(order[len(order) - recent :] if recent else []) | {j for j in order if j < sinks}
    others = {j: s for j, s in score.items() if j not in safe}
    return sorted(safe | set(best(others, max(count - len(safe), 0))))


class H2O:
    """Heavy hitters of one key/value head: `heavy + recent = budget`, the token being decoded among the recent."""

    def __init__(self, row, head, scale, heavy, recent, sinks=0, normalize=False, decay=1.0):
        self.row, self.head, self.scale, self.decay, self.normalize = row, head, scale, decay, normalize
        self.size, self.recent, self.sinks = heavy + recent + sinks - 1, recent - 1, sinks
        self.score: dict[int, float] = {}

    def _worth(self, newest: int) -> dict[int, float]:
        if not self.normalize:
            return self.score
        return {j: s / sum(self.decay**age for age in range(newest - j + 1)) for j, s in self.score.items()}

    def prompt(self, n: int) -> None:
        a = causal(self.row.q[group(self.row, self.head), :n], self.row.k[self.head, :n], self.scale)
        age = torch.arange(n - 1, -1, -1).double()
        self.score = dict(enumerate((a * (self.decay**age)[:, None]).sum(1).mean(0).tolist()))
        self._drop(n - 1)

    def step(self, t: int) -> list[int]:
        """Returns what the step reads."""
        read = sorted(self.score) + [t]
        a = weights(self.row.q[group(self.row, self.head), t], self.row.k[self.head, read], self.scale).mean(0)
        self.score = {j: self.score.get(j, 0.0) * self.decay + float(w) for j, w in zip(read, a, strict=True)}
        self._drop(t)
        return read

    def turn(self, first: int, last: int) -> None:
        """Queries `first … last - 1` in one forward: each reads what was kept and its own turn, causally."""
        kept = sorted(self.score)
        for t in range(first, last):
            read = kept + list(range(first, t + 1))
            a = weights(self.row.q[group(self.row, self.head), t], self.row.k[self.head, read], self.scale).mean(0)
            self.score = {j: self.score.get(j, 0.0) * self.decay + float(w) for j, w in zip(read, a, strict=True)}
        self._drop(last - 1)

    def _drop(self, newest: int) -> None:
        if len(self.score) > self.size:
            kept = top_with_protected(self._worth(newest), self.size, self.sinks, self.recent)
            self.score = {j: self.score[j] for j in kept}

    @property
    def kept(self) -> list[int]:
        return sorted(self.score)


class TOVA:
    """One set for all heads of a layer."""

    def __init__(self, row, scale, budget):
        self.row, self.scale, self.size, self.kept = row, scale, budget - 1, []

    def _last(self, t: int, read: list[int]) -> dict[int, float]:
        rows = [
            weights(self.row.q[group(self.row, h), t], self.row.k[h, read], self.scale) for h in range(self.row.k.shape[0])
        ]
        return dict(zip(read, torch.cat(rows).mean(0).tolist(), strict=True))

    def prompt(self, n: int) -> None:
        self.kept = list(range(n))
        if n > self.size:
            self.kept = best(self._last(n - 1, self.kept), self.size)

    def step(self, t: int) -> list[int]:
        read = self.kept + [t]
        self.kept = best(self._last(t, read), self.size) if len(read) > self.size else read
        return read


class Scissorhands:
    """One key/value head. Keeps the rows of the last `window` queries as they are, booleans and attention."""

    def __init__(self, row, head, scale, budget, window, recent, dropped, sinks=0, use="mean"):
        self.row, self.head, self.scale, self.use = row, head, scale, use
        self.budget, self.window, self.recent, self.dropped, self.sinks = budget, window, recent, dropped, sinks
        self.kept: list[int] = []
        self.history: list[dict[int, bool]] = []
        self.received: dict[int, float] = {}

    def _observe(self, t: int, read: list[int]) -> None:
        a = weights(self.row.q[group(self.row, self.head), t], self.row.k[self.head, read], self.scale)
        used = a.mean(0) if self.use == "mean" else a.amax(0)
        self.history = (self.history + [{j: float(u) < (1 - 1e-5) / len(read) for j, u in zip(read, used, strict=True)}])[-self.window :]
        fade = 1 - 1 / self.window
        self.received = {j: self.received.get(j, 0.0) * fade + float(w) for j, w in zip(read, a.mean(0), strict=True)}

    def _cut(self, count: int) -> None:
        below = {j: sum(row.get(j, False) for row in self.history) for j in self.kept}
        order = sorted(self.kept)
        safe = set(order[len(order) - self.recent :] if self.recent else []) | {j for j in order if j < self.sinks}
        others = sorted((j for j in order if j not in safe), key=lambda j: (below[j], -self.received.get(j, 0.0), j))
        self.kept = sorted(safe | set(others[: count - len(safe)]))

    def prompt(self, n: int) -> None:
        self.kept = list(range(n))
        for t in range(max(n - self.window, 0), n):
            self._observe(t, list(range(t + 1)))
        if n > self.budget:
            self._cut(self.budget)

    def step(self, t: int) -> list[int]:
        if len(self.kept) >= self.budget:
            self._cut(self.budget - self.dropped)
        self.kept = self.kept + [t]
        self._observe(t, self.kept)
        return self.kept


def window_choice(row, head, scale, read: list[int], queries: list[int], count, sinks, recent, kernel, pooling="max") -> list[int]:
    """SnapKV: the last queries score all earlier tokens; pooled over neighbours."""
    total = torch.zeros(len(read), dtype=torch.float64)
    for t in queries:
        visible = [i for i, j in enumerate(read) if j <= t]
        a = weights(row.q[group(row, head), t], row.k[head, [read[i] for i in visible]], scale).mean(0)
        total[visible] += a
    n = len(read) - len(queries)
    half = kernel // 2
    score = {}
    for i in range(n):
        near = [float(total[x]) if 0 <= x < n else (-math.inf if pooling == "max" else 0.0) for x in range(i - half, i + half + 1)]
        score[read[i]] = max(near) if pooling == "max" else sum(near) / kernel
    for j in read[n:]:
        score[j] = 0.0
    return top_with_protected(score, count, sinks, max(recent, len(queries)))


def keydiff_choice(row, head, kept: list[int], fresh: list[int], count, block, sinks=0, recent=0) -> list[int]:
    """Block by block: the least like the mean of the unit keys stay."""
    for first in range(0, len(fresh), block):
        pool = kept + fresh[first : first + block]
        k = row.k[head, pool].double()
        unit = k / k.norm(dim=-1, keepdim=True)
        anchor = unit.mean(0)
        score = -(unit @ anchor) / anchor.norm()
        kept = pool
        if len(pool) > count:
            kept = top_with_protected(dict(zip(pool, score.tolist(), strict=True)), count, sinks, recent)
    return kept


def rotation_matrix(position: float, inv_freq: Tensor) -> Tensor:
    """Half-split rotary layout as a matrix, fp64."""
    angle = position * inv_freq.double()
    cos, sin = torch.diag(angle.cos()), torch.diag(angle.sin())
    return torch.cat((torch.cat((cos, -sin), 1), torch.cat((sin, cos), 1)), 0)


def expected_choice(row, head, scale, read, queries, newest, inv_freq, count, sinks, recent, future, epsilon, covariance, vnorm):
    """Expected attention from explicit rotation matrices."""
    turn = sum(rotation_matrix(newest + 1 + i, inv_freq) for i in range(future)) / future
    k, v = row.k[head, read].double(), row.v[head, read].double()
    allowed = torch.tensor([j >= sinks for j in read])
    total = torch.zeros(len(read), dtype=torch.float64)
    heads = range(*group(row, head).indices(row.q.shape[0]))
    for h in heads:
        back = torch.stack([rotation_matrix(-t, inv_freq) @ row.q[h, t].double() for t in queries if t >= sinks])
        mean = back.mean(0)
        sigma = turn @ ((back - mean).T @ (back - mean) / len(back)) @ turn.T
        logits = k @ (turn @ mean) * scale
        if covariance:
            logits = logits + torch.einsum("nd,de,ne->n", k, sigma, k) * scale**2 / 2
        total += torch.softmax(logits.masked_fill(~allowed, -math.inf), 0) / len(heads)
    score = (total + epsilon) * v.norm(dim=-1) if vnorm else total
    return top_with_protected(dict(zip(read, score.tolist(), strict=True)), count, sinks, recent)


def rkv_redundancy(k: Tensor, threshold: float, count_self: bool = True) -> Tensor:
    """`[N]` from the full similarity matrix."""
    unit = k.double() / k.double().norm(dim=-1, keepdim=True)
    similar = unit @ unit.T
    n = len(k)
    blamed = similar.clone().fill_diagonal_(0.0)
    for i in range(n):
        close = [j for j in range(n) if (j == i and count_self) or (j != i and similar[i, j] > threshold)]
        blamed[i, max(close) if close else 0] = 0.0
    return torch.softmax(blamed.mean(0), 0)


def rkv_choice(row, head, scale, read, queries, count, sinks, kernel, balance, threshold, count_self=True) -> list[int]:
    n = len(read) - len(queries)
    k = row.k[head, read]
    repeats = rkv_redundancy(k, threshold, count_self)
    logits = torch.stack([(row.q[group(row, head), t].double() @ k[:n].double().T * scale).amax(0) for t in queries])
    importance = torch.softmax(logits, -1).mean(0)
    half = kernel // 2
    score = {}
    for i, j in enumerate(read[:n]):
        pooled = max(float(importance[x]) for x in range(max(i - half, 0), min(i + half + 1, n)))
        score[j] = balance * pooled - (1 - balance) * float(repeats[i])
    for j in read[n:]:
        score[j] = 0.0
    return top_with_protected(score, count, sinks, len(queries))
