"""A layer that sees the newest tokens alone, also within a prompt."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import KVSparseError, UnsupportedOperationError
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

    def check_crop(self, first_removed: Tensor) -> None:
        raise UnsupportedOperationError(
            f"tokens cannot be taken back: layer {self.layer_idx} sees a window of {self.window} tokens, and those that left it are "
            "gone. reset() the cache, or fork() it before tokens that may be taken back."
        )

    @torch.compiler.disable
    def first_forward(self, module, query, *args, **kwargs):
        check_plain(AttentionCall.of(module, query.shape[-1], kwargs))  # before the prompt is counted
        return super().first_forward(module, query, *args, **kwargs)

    def prompt_attention(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *args, **kwargs
    ):
        """The model's own attention, in blocks of queries and of the keys that they see. Weights only where they are asked for:
        `[B, Hq, N, N]`."""
        base, tokens = base_of(module.config), query.shape[2]
        if base.startswith("flash"):
            return base_attention(module, query, key, value, mask, *args, **{**kwargs, "sliding_window": self.window})
        if tokens <= self.window:
            return base_attention(module, query, key, value, mask, *args, **kwargs)
        with_weights = kwargs.get("output_attentions") or getattr(module.config, "output_attentions", False)
        out, weights = [], []
        for rows, columns, seen in bands(tokens, tokens, self.window, key.device):
            part = _within(
                seen, None if mask is None else mask[:, :, rows, columns], query.dtype, additive=base == "eager"
            )
            states = query[:, :, rows], key[:, :, columns], value[:, :, columns]
            block, attention = base_attention(module, *states, part, *args, **kwargs)
            out.append(block)
            if with_weights and attention is not None:
                weights.append(F.pad(attention, (columns.start, tokens - columns.stop)))
        return torch.cat(out, dim=1), torch.cat(weights, dim=2) if weights else None

    def attend_turn(self, query, key, value, pad, call: AttentionCall) -> tuple[Tensor, None]:
        kept = self._kept()
        keys, values = (torch.cat((old, new.to(old.dtype)), dim=2) for old, new in ((kept[0], key), (kept[1], value)))
        return banded_attention(query, keys, values, self.window, call, kept[3] + pad.unsqueeze(1)), None

    def restore(self, tensors: dict[str, Tensor], saved: dict, device: torch.device) -> None:
        super().restore(tensors, saved, device)
        if int(self._limit.max()) > self.window:
            raise KVSparseError(f"layer {self.layer_idx} was saved with another window than {self.window} tokens.")


def check_plain(call: AttentionCall) -> None:
    """Refuses attention that a window cannot be put over."""
    if call.softcap or call.sinks is not None:
        raise UnsupportedOperationError(
            "a sliding window over attention with a logit cap or learned sinks is not supported."
        )


def bands(tokens: int, length: int, window: int, device: torch.device) -> Iterator[tuple[slice, slice, Tensor]]:
    """The newest `tokens` of `length` in blocks of queries: no mask of [tokens, length] is made.

    Yields:
        The block's queries, the keys that they see, and which of them each sees, `[T, S]` bool.
    """
    step, earlier = max(window, _SMALLEST_BLOCK), length - tokens
    for first in range(0, tokens, step):
        last = min(first + step, tokens)
        low, high = max(earlier + first - window + 1, 0), earlier + last
        row = torch.arange(earlier + first, high, device=device).unsqueeze(1)
        column = torch.arange(low, high, device=device)
        yield slice(first, last), slice(low, high), (column <= row) & (column > row - window)


def _within(seen: Tensor, mask: Tensor | None, dtype: torch.dtype, additive: bool) -> Tensor:
    """The part `mask` `[B, 1, T, S]` of the model's own mask, of its kind, where `seen` `[T, S]`."""
    if mask is None and not additive:
        return seen[None, None]
    if mask is None:
        mask = torch.zeros(1, 1, *seen.shape, dtype=dtype, device=seen.device)
    return mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, torch.finfo(dtype).min)


def banded_attention(
    query: Tensor, key: Tensor, value: Tensor, window: int, call: AttentionCall, pad: Tensor | None
) -> Tensor:
    """Attention in which each query sees its own token and the `window - 1` before it.

    Args:
        query: `[B, Hq, T, D]`, of the newest T tokens.
        key, value: `[B, H, S, D]`, S >= T, in order.
        pad: `[B, H]` leading entries that are none; None where all are real. A query that is padding sees itself.

    Returns:
        `[B, Hq, T, Dv]`.
    """
    check_plain(call)
    group, earlier, parts = query.shape[1] // key.shape[1], key.shape[2] - query.shape[2], []
    for rows, columns, seen in bands(query.shape[2], key.shape[2], window, key.device):
        if pad is not None:
            row = torch.arange(earlier + rows.start, earlier + rows.stop, device=key.device).unsqueeze(1)
            column = torch.arange(columns.start, columns.stop, device=key.device)
            seen = seen & (column >= pad[:, :, None, None]) | (column == row)
            seen = seen.repeat_interleave(group, dim=1)
        block = (states[:, :, columns].repeat_interleave(group, dim=1) for states in (key, value))
        parts.append(F.scaled_dot_product_attention(query[:, :, rows], *block, attn_mask=seen, scale=call.scale))
    return torch.cat(parts, dim=2)
