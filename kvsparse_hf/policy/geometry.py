"""Scores from the keys alone: no query, no attention."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .base import Candidates
from .select import NEG_INF, protected_mask, select_top

_NOISE_BITS = 10  # of a fp32 mantissa's 23


def key_norms(keys: Tensor) -> Tensor:
    """`[…, D]` -> `[…]` fp32 lengths (in half precision most of them would tie), to 13 bits.

    In the first layer the keys of a repeated token differ by their rotation alone, so they are equally long but for rounding
    noise. Without the last bits they tie, and the earlier token stays, whatever batch it was computed in.
    """
    bits = torch.linalg.vector_norm(keys.float(), dim=-1).view(torch.int32)
    return ((bits + (1 << _NOISE_BITS - 1)) & -(1 << _NOISE_BITS)).view(torch.float32)


def distinctness(keys: Tensor, valid: Tensor) -> Tensor:
    """How far each key points away from the mean direction of all: minus its cosine with the mean of the unit keys.

    Args:
        keys: `[B, H, N, D]`; valid: `[B, H, N]` bool.

    Returns:
        `[B, H, N]` fp32.
    """
    unit = F.normalize(keys.float(), dim=-1)
    # The mean's length does not matter for a cosine, so a sum will do.
    anchor = F.normalize(torch.where(valid.unsqueeze(-1), unit, 0).sum(2), dim=-1)
    return -(unit @ anchor.unsqueeze(-1)).squeeze(-1)


def keep_by_blocks(candidates: Candidates, block: int, sinks: int, tail: int) -> Tensor:
    """Takes the fresh candidates block by block, and after each block keeps the `counts` most distinct of what is there.

    Blocks are counted from each row's first fresh token, so that padding does not shift them.

    Returns:
        `[B, H, N]` fp32: 1 for the candidates that remain in the end, -inf for the others.
    """
    keys, pad, counts, length = candidates.keys, candidates.pad, candidates.counts, candidates.length
    device = keys.device
    index = torch.arange(length, device=device)
    first = pad.clamp(min=candidates.settled).unsqueeze(-1)
    kept = torch.where((index < first) & candidates.valid, index, -1)[..., : candidates.settled]
    for offset in range(0, int(length - first.min()), block):
        fresh = first + offset + torch.arange(block, device=device)
        pool = torch.cat((kept, fresh.masked_fill(fresh >= length, -1)), dim=-1).sort(dim=-1).values
        empty = (pool < 0).sum(-1)
        here = keys.gather(2, pool.clamp(min=0).unsqueeze(-1).expand(-1, -1, -1, keys.shape[-1]))
        protect = protected_mask(empty, pool.shape[-1], counts, sinks, tail)
        chosen = select_top(distinctness(here, pool >= 0), empty, protect, counts)
        kept = pool.gather(2, chosen.clamp(min=0)).masked_fill(chosen < 0, -1)
    remains = torch.zeros(*keys.shape[:2], length + 1, dtype=torch.bool, device=device)
    remains.scatter_(2, torch.where(kept < 0, length, kept), True)
    return torch.where(remains[..., :length], 1.0, NEG_INF)
