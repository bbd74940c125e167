"""Clusters of keys: k-means, and groups of bounded size with their summaries."""

from typing import NamedTuple

import torch
from torch import Tensor


def kmeans(points: Tensor, clusters: int, iterations: int = 10, spherical: bool = True) -> Tensor:
    """Assigns points to clusters, each head by itself. Deterministic: it starts from evenly spaced points.

    Args:
        points: `[H, n, D]` fp32.
        clusters: how many, at most n.
        spherical: compare directions instead of distances.

    Returns:
        `[H, n]` int64 cluster of each point; a cluster may be empty.
    """
    if spherical:
        points = torch.nn.functional.normalize(points, dim=-1)
    first = torch.linspace(0, points.shape[1] - 1, clusters, device=points.device).round().long()
    centres = points[:, first]
    number = torch.arange(clusters, device=points.device).view(1, -1, 1)
    for _ in range(iterations):
        member = (nearest(points, centres, spherical).unsqueeze(1) == number).to(points.dtype)  # [H, clusters, n]
        size = member.sum(-1, keepdim=True)
        means = member @ points / size.clamp(min=1)
        if spherical:
            means = torch.nn.functional.normalize(means, dim=-1)
        centres = torch.where(size > 0, means, centres)
    return nearest(points, centres, spherical)


def nearest(points: Tensor, centres: Tensor, spherical: bool) -> Tensor:
    """`[H, n]` the closest of `centres` `[H, M, D]` to each of `points` `[H, n, D]`."""
    likeness = points @ centres.transpose(1, 2)
    if not spherical:
        likeness = likeness - centres.square().sum(-1).unsqueeze(1) / 2
    return likeness.argmax(-1)


class Groups(NamedTuple):
    """Tokens in groups, each head by itself.

    Attributes:
        order: `[H, n]` tokens, group after group.
        size: `[H, M]` tokens of each group; 0 behind the last.
        centroid: `[H, M, D]` mean key; mean_value: `[H, M, Dv]`.
    """

    order: Tensor
    size: Tensor
    centroid: Tensor
    mean_value: Tensor


def group_tokens(keys: Tensor, values: Tensor, assigned: Tensor, most: int, groups: int) -> Groups:
    """Turns clusters into groups of at most `most` tokens: a larger cluster is cut, so that any of them fits a budget.

    Args:
        keys: `[H, n, D]`; values: `[H, n, Dv]`; assigned: `[H, n]` cluster of each token.
        groups: M; at least the clusters and `n / most` (see `groups_for`).
    """
    heads, tokens = assigned.shape
    order = torch.argsort(assigned, dim=-1, stable=True)
    ordered = assigned.gather(1, order)
    at = torch.arange(tokens, device=keys.device).expand(heads, -1)
    starts = torch.ones_like(ordered, dtype=torch.bool)
    starts[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    rank = at - torch.where(starts, at, 0).cummax(-1).values
    group = (rank % most == 0).cumsum(-1) - 1  # [H, n] of the ordered tokens
    member = group.unsqueeze(1) == torch.arange(groups, device=keys.device).view(1, -1, 1)  # [H, M, n]
    size = member.sum(-1)
    weight = member.float() / size.clamp(min=1).unsqueeze(-1)
    return Groups(
        order,
        size,
        weight @ keys.gather(1, order.unsqueeze(-1).expand(-1, -1, keys.shape[-1])).float(),
        weight @ values.gather(1, order.unsqueeze(-1).expand(-1, -1, values.shape[-1])).float(),
    )


def groups_for(tokens: int, per_cluster: int, most: int) -> tuple[int, int]:
    """Clusters for so many tokens, and the groups that cutting the large ones can make of them."""
    clusters = max(1, tokens // per_cluster)
    return clusters, clusters + tokens // most
