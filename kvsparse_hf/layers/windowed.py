"""A layer that sees the newest tokens alone, also within a prompt."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import UnsupportedOperationError
from ..hf.attention import base_attention, base_of
from .evicting import EvictingLayer
from .owning import AttentionCall

_SMALLEST_BLOCK = 128


class WindowLayer(EvictingLayer):
    """Sliding-window attention in a model whose own mask is a full one: a token sees itself and the `window - 1` before it.

    Holds a ring of `window` entries. Unlike with StreamingLLM, the window also holds inside a prompt, whose attention costs
    O(N * window) time and memory.

    Args:
        window: tokens seen; the policy's budget is the same number.
    """

    def __init__(self, *args, window: int):
        super().__init__(*args)
        self.window = window

    def prompt_attention(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *args, **kwargs):
        call = AttentionCall.of(module, query.shape[-1], kwargs)
        if base_of(module.config).startswith("flash"):
            return base_attention(module, query, key, value, mask, *args, **{**kwargs, "sliding_window": self.window})
        pad = self.session.pad if bool(self.session.pad.any()) else None
        if pad is not None:
            pad = pad.to(key.device).unsqueeze(1).expand(-1, key.shape[1])
        return banded_attention(query, key, value, self.window, call, pad).transpose(1, 2).contiguous(), None

    def attend_turn(self, query, key, value, pad, call: AttentionCall) -> tuple[Tensor, None]:
        kept = self._kept()
        keys, values = (torch.cat((old, new.to(old.dtype)), dim=2) for old, new in ((kept[0], key), (kept[1], value)))
        return banded_attention(query, keys, values, self.window, call, kept[3] + pad.unsqueeze(1)), None


def banded_attention(query: Tensor, key: Tensor, value: Tensor, window: int, call: AttentionCall, pad: Tensor | None) -> Tensor:
    """Attention in which each query sees its own token and the `window - 1` before it.

    Args:
        query: `[B, Hq, T, D]`, of the newest T tokens.
        key, value: `[B, H, S, D]`, S >= T, in order.
        pad: `[B, H]` leading entries that are none; None where all are real. A query that is padding sees itself.

    Returns:
        `[B, Hq, T, Dv]`, in blocks of queries: no mask of [T, S] is made.
    """
    if call.softcap or call.sinks is not None:
        raise UnsupportedOperationError("a sliding window over attention with a logit cap or learned sinks is not supported.")
    tokens, group, earlier = query.shape[2], query.shape[1] // key.shape[1], key.shape[2] - query.shape[2]
    step, parts = max(window, _SMALLEST_BLOCK), []
    for first in range(0, tokens, step):
        last = min(first + step, tokens)
        low, high = max(earlier + first - window + 1, 0), earlier + last
        row = torch.arange(earlier + first, high, device=key.device).unsqueeze(1)
        column = torch.arange(low, high, device=key.device)
        seen = (column <= row) & (column > row - window)
        if pad is not None:
            seen = seen & (column >= pad[:, :, None, None]) | (column == row)
            seen = seen.repeat_interleave(group, dim=1)
        block = (states[:, :, low:high].repeat_interleave(group, dim=1) for states in (key, value))
        parts.append(F.scaled_dot_product_attention(query[:, :, first:last], *block, attn_mask=seen, scale=call.scale))
    return torch.cat(parts, dim=2)
