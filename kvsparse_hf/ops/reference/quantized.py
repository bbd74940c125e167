"""Keys and values of few bits: groups of channels share a range, and attention reads them without a full-precision copy.

A format is "int8" or "int4" (an unsigned code between the group's least and greatest value) or "fp8" (float8_e4m3fn, scaled
so that the group's largest magnitude becomes the largest code). The ends of a range are kept in the dtype of the values and
are themselves values of the group, so that quantizing what was dequantized gives the same values again.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ._common import NEG_INF, acc_dtype, filled_width
from .attention import _first_rows, decode_attention

LEVELS = {"int8": 255, "int4": 15, "fp8": 448}  # the largest code
FORMATS = tuple(LEVELS)


def code_bytes(dim: int, format: str) -> int:
    """Bytes of the codes of `dim` values."""
    return dim // 2 if format == "int4" else dim


def range_ends(format: str) -> int:
    """Numbers that describe a group: least and greatest value, or the largest magnitude."""
    return 1 if format == "fp8" else 2


def quantize(x: Tensor, format: str, group: int) -> tuple[Tensor, Tensor]:
    """Rounds values to the nearest code of their group. Between decode steps, in plain torch on any device: there is no
    ``backend``.

    Args:
        x: [..., D], finite. D is a multiple of ``group``, and even for "int4".
        format: "int8", "int4" or "fp8".
        group: neighbouring channels that share a range.

    Returns:
        codes uint8 [..., D], for "int4" [..., D / 2]: channel d in the low half of byte d, channel d + D / 2 in the high one;
        ranges [..., D / group, 2] (least, greatest) or, for "fp8", [..., D / group, 1] (largest magnitude), in x's dtype.

    The error is at most half a step, (greatest - least) / 2 / 255 or / 2 / 15 (and what the dtype of ``ranges`` rounds when
    the value is rebuilt); for "fp8" 1/16 of the value, or 2^-10 / 448 of the largest magnitude.
    """
    values = x.to(acc_dtype(x)).unflatten(-1, (-1, group))
    if format == "fp8":
        peak = values.abs().amax(-1, keepdim=True)
        scaled = torch.where(peak > 0, values / peak * LEVELS[format], 0.0)
        codes = scaled.clamp(-LEVELS[format], LEVELS[format]).to(torch.float8_e4m3fn).view(torch.uint8)
        return codes.flatten(-2), peak.to(x.dtype)
    low, high = values.aminmax(dim=-1, keepdim=True)
    part = torch.where(high > low, (values - low) / (high - low), 0.0)
    codes = (part * LEVELS[format]).round().to(torch.uint8).flatten(-2)
    if format == "int4":
        first, second = codes.chunk(2, dim=-1)
        codes = first | (second << 4)
    return codes, torch.cat((low, high), dim=-1).to(x.dtype)


def dequantize(codes: Tensor, ranges: Tensor, format: str, group: int, dtype: torch.dtype | None = None) -> Tensor:
    """The values [..., D] that codes stand for. As :func:`quantize` it has no ``backend``.

    Args:
        codes, ranges, format, group: as :func:`quantize` gives and takes them.
        dtype: of the result; default: that of ``ranges``.
    """
    acc = acc_dtype(ranges)
    if format == "fp8":
        numbers = codes.view(torch.float8_e4m3fn).to(acc).unflatten(-1, (-1, group))
        peak, top = ranges.to(acc), float(LEVELS[format])
        values = torch.where(numbers.abs() == top, peak * numbers.sign(), numbers * (peak / top))
    else:
        if format == "int4":
            codes = torch.cat((codes & 15, codes >> 4), dim=-1)
        numbers = codes.to(acc).unflatten(-1, (-1, group))
        (low, high), top = ranges.to(acc).split(1, dim=-1), LEVELS[format]
        values = torch.where(numbers == top, high, low + numbers * ((high - low) / top))  # both ends exactly
    return values.flatten(-2).to(ranges.dtype if dtype is None else dtype)


def decode_attention_quantized(
    q: Tensor,
    k: Tensor,
    k_ranges: Tensor,
    v: Tensor,
    v_ranges: Tensor,
    start: Tensor,
    length: Tensor,
    *,
    format: str,
    group: int,
    max_len: int,
    scale: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    return_logits: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """:func:`decode_attention` over keys and values that are dequantized as they are read.

    Args:
        q: [B, Hq, D].
        k, v: uint8 [R, D] and [R, Dv] codes ([R, D / 2] and [R, Dv / 2] for "int4"), see :func:`quantize`.
        k_ranges, v_ranges: [R, D / group, 2 or 1], [R, Dv / group, 2 or 1].
        format, group: how they were quantized.
        start, length, max_len, scale, softcap, sinks, return_lse, return_logits: as in :func:`decode_attention`.

    Returns:
        As :func:`decode_attention`.
    """
    batch, heads = start.shape
    width = filled_width(length, max_len)
    valid = (torch.arange(width, device=q.device) < length.unsqueeze(-1)).expand(batch, heads, width)
    acc = acc_dtype(q)

    def values(codes: Tensor, ranges: Tensor) -> Tensor:
        codes, held = _first_rows((codes, ranges.flatten(1)), start, width, valid)
        return dequantize(codes, held.unflatten(-1, ranges.shape[1:]), format, group, acc).flatten(0, 2)

    first = torch.arange(batch * heads, device=q.device).view(batch, heads) * width
    out, lse, logits = decode_attention(
        q, values(k, k_ranges), values(v, v_ranges), first, length, max_len=width, scale=scale, softcap=softcap,
        sinks=sinks, return_lse=return_lse, return_logits=return_logits,
    )
    return out, lse, F.pad(logits, (0, max_len - width), value=NEG_INF) if return_logits else None
