"""Principal components of keys."""

import torch
from torch import Tensor


def key_covariance(keys: Tensor) -> Tensor:
    """`[H, D, D]` fp64 covariances of the keys `[H, n, D]` of each head, few as they may be.

    Fewer keys than dimensions leave directions without any variance, whose order would be left to rounding. So the
    covariance is mixed with a little of a fixed diagonal one that prefers the lower dimensions, the less the more keys
    there are.
    """
    keys = keys.double()
    count, dim = keys.shape[1:]
    centred = keys - keys.mean(1, keepdim=True)
    prior = torch.linspace(1.0, 0.5, dim, dtype=keys.dtype, device=keys.device).diag()
    weight = 0.1 * dim / count * keys.square().mean((1, 2)).clamp(min=1e-12)
    return centred.transpose(1, 2) @ centred / count + weight.view(-1, 1, 1) * prior


def components_of(covariance: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvectors (columns) and eigenvalues of `[…, D, D]` covariances, strongest first, fp32."""
    values, vectors = torch.linalg.eigh(covariance.double())
    return vectors.flip(-1).float(), values.flip(-1).float().clamp(min=0)


def query_metric(queries: Tensor) -> Tensor:
    """The map in which distances between keys are differences of logits, in the mean over the given queries.

    With M = E[q q^T], a query's logits on two keys differ by (k - k')^T M (k - k') in the mean square, which is the squared
    distance of M^(1/2) k and M^(1/2) k'.

    Args:
        queries: `[H, n, D]`, the queries that read the keys of each head.

    Returns:
        `[H, D, D]` fp32 symmetric root of M. A hundredth of the mean eigenvalue is added to each, so that a direction that
        no given query looks at still counts for a little.
    """
    queries = queries.double()
    values, vectors = torch.linalg.eigh(queries.transpose(1, 2) @ queries / queries.shape[1])
    values = values.clamp(min=0) + 0.01 * values.mean(-1, keepdim=True).clamp(min=1e-12)
    return ((vectors * values.sqrt().unsqueeze(1)) @ vectors.transpose(1, 2)).float()
