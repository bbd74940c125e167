"""Selection: scores of pages from their summaries, of tokens from their keys, and the exact top-k of them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ._common import NEG_INF, acc_dtype, apply_softcap, filled_width, rank_scores


def page_scores(
    q: Tensor,
    summary: Tensor,
    length: Tensor,
    page_size: int,
    scale: float,
    group_reduce: str = "softmax_mean",
    sink_pages: int = 0,
    recent_pages: int = 0,
) -> Tensor:
    """Quest's upper bound of q @ k over the keys of each page, reduced over the query heads of a KV head.

    The bound is sum_d max(q_d * max_d, q_d * min_d) = relu(q) @ max + min(q, 0) @ min, times ``scale``.

    Args:
        q: [B, Hq, D].
        summary: [B, H, P, 2, D], elementwise maximum (row 0) and minimum (row 1) of the keys of each page.
        length: [B, H], valid entries of each segment; pages from ceil(length / page_size) on give -inf.
        group_reduce: "softmax_mean" = softmax over the pages per query head, then the mean over the group;
            "max" or "mean" = of the bounds themselves. With one query head per KV head all three rank the pages alike;
            otherwise softmax_mean lets a head that is sure of its pages outvote one that is not.
        sink_pages, recent_pages: so many first and last valid pages get +inf: they are always chosen.

    Returns:
        fp32 [B, H, P].
    """
    heads, pages = summary.shape[1:3]
    acc = acc_dtype(q)
    queries = q.to(acc).unflatten(1, (heads, -1))
    valid_pages = ((length + page_size - 1) // page_size).unsqueeze(-1)
    width = filled_width(valid_pages, pages)
    summary, page = summary[:, :, :width], torch.arange(width, device=q.device)
    valid = page < valid_pages  # [B, H, P]
    bounds = torch.where(valid[..., None, None], summary, 0).to(acc)
    upper = queries.clamp(min=0) @ bounds[:, :, :, 0].transpose(-1, -2)
    lower = queries.clamp(max=0) @ bounds[:, :, :, 1].transpose(-1, -2)
    forced = (page < sink_pages) | (page >= valid_pages - recent_pages)
    scores = rank_scores((upper + lower) * scale, group_reduce, valid, forced)
    return F.pad(scores, (0, pages - width), value=NEG_INF)


def token_scores(
    q: Tensor,
    keys: Tensor,
    length: Tensor,
    dims: int,
    scale: float,
    softcap: float = 0.0,
    group_reduce: str = "softmax_mean",
    sinks: int = 0,
    recent: int = 0,
) -> Tensor:
    """Logits of q against the first ``dims`` components of every key, reduced over the query heads of a KV head.

    Args:
        q: [B, Hq, dims].
        keys: [B, H, C, D] with D >= dims.
        length: [B, H], valid entries; later ones give -inf.
        scale: factor of q @ k; softcap: c > 0 turns a logit s into c * tanh(s / c).
        group_reduce: as in :func:`page_scores`.
        sinks, recent: so many first and last valid tokens get +inf: they are always chosen.

    Returns:
        fp32 [B, H, C].
    """
    acc = acc_dtype(q)
    queries = q.to(acc).unflatten(1, (keys.shape[1], -1))
    width = filled_width(length, keys.shape[2])
    token = torch.arange(width, device=q.device)
    valid = token < length.unsqueeze(-1)  # [B, H, C]
    leading = torch.where(valid.unsqueeze(-1), keys[:, :, :width, :dims], 0).to(acc)
    logits = apply_softcap(queries @ leading.transpose(-1, -2) * scale, softcap)
    scores = rank_scores(logits, group_reduce, valid, (token < sinks) | (token >= length.unsqueeze(-1) - recent))
    return F.pad(scores, (0, keys.shape[2] - width), value=NEG_INF)


def topk_pages(scores: Tensor, k: int) -> Tensor:
    """Indices of the k largest scores of each row.

    Args:
        scores: [B, H, P] fp32. -inf (and NaN) is never chosen; ties go to the lower index.

    Returns:
        int32 [B, H, k], ascending, padded with -1 behind the last when fewer than k scores are above -inf.
    """
    pages = scores.shape[-1]
    clean = torch.where(scores.isnan(), NEG_INF, scores)
    order = torch.sort(clean, dim=-1, descending=True, stable=True)
    take = min(k, pages)
    chosen = torch.where(order.values[..., :take] > NEG_INF, order.indices[..., :take], pages)
    chosen = chosen.sort(dim=-1).values
    chosen = torch.where(chosen == pages, -1, chosen).int()
    return torch.nn.functional.pad(chosen, (0, k - take), value=-1)


def choose_pages(
    q: Tensor,
    summary: Tensor,
    length: Tensor,
    k: int,
    page_size: int,
    scale: float,
    group_reduce: str = "softmax_mean",
    sink_pages: int = 0,
    recent_pages: int = 0,
) -> Tensor:
    """The pages of the k largest `page_scores`, without writing the scores: int32 [B, H, k] as of `topk_pages`.

    Args:
        q, summary, length, page_size, scale, group_reduce, sink_pages, recent_pages: as of :func:`page_scores`.
    """
    return topk_pages(page_scores(q, summary, length, page_size, scale, group_reduce, sink_pages, recent_pages), k)


def choose_tokens(
    q: Tensor,
    keys: Tensor,
    length: Tensor,
    k: int,
    dims: int,
    scale: float,
    softcap: float = 0.0,
    group_reduce: str = "softmax_mean",
    sinks: int = 0,
    recent: int = 0,
) -> Tensor:
    """The tokens of the k largest `token_scores`, without writing the scores: int32 [B, H, k] as of `topk_pages`.

    Args:
        q, keys, length, dims, scale, softcap, group_reduce, sinks, recent: as of :func:`token_scores`.
    """
    return topk_pages(token_scores(q, keys, length, dims, scale, softcap, group_reduce, sinks, recent), k)
