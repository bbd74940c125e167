"""Attention over several stores, one partial result each."""

from __future__ import annotations

import torch
from torch import Tensor

from ._common import acc_dtype


def merge_attention(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    """What attention over all stores together gives, from what it gave over each of them.

    Args:
        outs: up to 4 outputs [B, Hq, Dv], as :func:`decode_attention` returns them.
        lses: their logs of the softmax denominators, [B, Hq] fp32. Learned sinks must be counted in one of them only.

    Returns:
        out [B, Hq, Dv] in the dtype of ``outs``, lse [B, Hq] fp32. Where no store had anything: 0 and -inf.
    """
    stacked = torch.stack(lses)
    lse = stacked.logsumexp(0)
    weights = torch.exp(stacked - torch.where(torch.isinf(lse), 0.0, lse)).unsqueeze(-1)
    out = (torch.stack(outs).to(acc_dtype(outs[0])) * weights).sum(0)
    return out.to(outs[0].dtype), lse
