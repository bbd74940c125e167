"""Quantized stores: what rounding costs, that it costs once, and attention over codes against plain loops."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from ops_oracle import assert_near, decode_oracle, ragged_store

from kvsparse_hf import ops
from kvsparse_hf.ops.backend import interpreting

FORMATS = ("int8", "int4", "fp8")
formats = pytest.mark.parametrize("format", FORMATS)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)


def _code_value(byte: int, place: int, ends: list[float], format: str) -> float:
    """What one code means, from its definition."""
    if format == "fp8":
        exponent, mantissa = byte >> 3 & 15, byte & 7
        size = (8 + mantissa) * 2.0 ** (exponent - 10) if exponent else mantissa * 2.0**-9
        return (-size if byte & 128 else size) * ends[0] / 448
    if format == "int4":
        byte = byte >> 4 if place else byte & 15
    return ends[0] + byte * (ends[1] - ends[0]) / (15 if format == "int4" else 255)


def _values(codes: torch.Tensor, ranges: torch.Tensor, format: str, group: int) -> torch.Tensor:
    """[R, D] fp64, one number at a time."""
    dim = ranges.shape[1] * group
    out = torch.zeros(len(codes), dim, dtype=torch.float64)
    for row, bytes_ in enumerate(codes.tolist()):
        for d in range(dim):
            place, at = divmod(d, dim // 2) if format == "int4" else (0, d)
            out[row, d] = _code_value(bytes_[at], place, ranges[row, d // group].tolist(), format)
    return out


@formats
@dtypes
def test_the_error_is_within_half_a_step(format, dtype):
    x = (torch.randn(40, 32, dtype=torch.float64) * torch.logspace(-3, 3, 40, dtype=torch.float64)[:, None] + 0.3).to(dtype)
    codes, ranges = ops.quantize(x, format, 8)
    assert codes.dtype == torch.uint8 and codes.shape == (40, 16 if format == "int4" else 32)
    assert ranges.dtype == dtype and ranges.shape == (40, 4, 1 if format == "fp8" else 2)
    exact, given = _values(codes, ranges, format, 8), x.double()
    groups = given.view(40, 4, 8)
    if format == "fp8":
        peak = groups.abs().amax(-1, keepdim=True).expand_as(groups).reshape(40, 32)
        allowed = torch.maximum(given.abs() / 16, peak * 2.0**-10 / 448)
    else:
        span = groups.amax(-1) - groups.amin(-1)
        allowed = (span / (30 if format == "int4" else 510)).repeat_interleave(8, dim=1)
    assert bool(((exact - given).abs() <= allowed * 1.001 + 1e-30).all())
    assert (exact - given).abs().max() > 0  # it does round
    back = ops.dequantize(codes, ranges, format, 8)
    assert back.dtype == dtype
    rounding = 2 * torch.finfo(dtype).eps * given.abs().view(40, 4, 8).amax(-1).repeat_interleave(8, dim=1)
    assert bool(((back.double() - exact).abs() <= rounding).all())


@formats
@dtypes
def test_a_second_rounding_changes_nothing(format, dtype):
    """Also where a group is flat, far from zero, tiny, or zero: what was dequantized is quantized to the same values."""
    rows = [torch.randn(64) * 10.0**power for power in (-6, -3, 0, 2)]
    rows += [torch.randn(64) * 0.01 + 100, torch.zeros(64), torch.full((64,), 3.14159), torch.randn(64).abs() * -1]
    rows += [torch.tensor([1.0, -1.0] * 32), torch.rand(64) * 1e-7 + 1]
    x = torch.stack(rows).repeat(20, 1).mul(torch.rand(200, 1) + 0.5).to(dtype)
    first = ops.dequantize(*ops.quantize(x, format, 16), format, 16)
    assert first.isfinite().all()
    again = first
    for _ in range(4):
        again = ops.dequantize(*ops.quantize(again, format, 16), format, 16)
        assert torch.equal(again, first)


@formats
def test_bytes(format):
    codes, ranges = ops.quantize(torch.randn(10, 128, dtype=torch.bfloat16), format, 32)
    held = (codes.numel() * codes.element_size() + ranges.numel() * ranges.element_size()) / 10
    assert held == {"int8": 128 + 16, "int4": 64 + 16, "fp8": 128 + 8}[format]


def _quantized_store(lengths, dim, dim_v, format, group, dtype, device):
    """A ragged store in codes, poisoned where nothing is valid, and what it means in fp64."""
    k, v, start, length, _ = ragged_store(lengths, dim, dim_v, dtype, "cpu")
    store, meant = [], []
    for x in (k, v):
        poison = x.isnan()
        codes, ranges = ops.quantize(torch.where(poison, 0, x), format, group)
        empty = poison.any(1)
        codes[empty], ranges[empty] = 127, float("nan")  # 127 is fp8's NaN
        store += [codes.to(device), ranges.to(device)]
        meant.append(_values(codes, ranges, format, group))
    return store, meant, start, length


def _check(target, lengths, group_q, dim, dim_v, format, channels, dtype=torch.float32, sinks=None, softcap=0.0, slack=3):
    dtype = target.runnable(dtype)
    store, (k, v), start, length = _quantized_store(lengths, dim, dim_v, format, channels, dtype, target.device)
    q = torch.randn(len(lengths), lengths.shape[1] * group_q, dim).to(dtype)
    width, scale = int(lengths.max()) + slack, dim**-0.5
    out, lse, logits = ops.decode_attention_quantized(
        q.to(target.device), *store, start.to(target.device), length.to(target.device), format=format, group=channels,
        max_len=width, scale=scale, softcap=softcap, sinks=None if sinks is None else sinks.to(target.device),
        return_lse=True, return_logits=True, backend=target.backend,
    )
    expected = decode_oracle(q, k, v, start, length, scale=scale, width=width, softcap=softcap, sinks=sinks)
    assert out.dtype == q.dtype
    factor = 1.0 if dtype == torch.float32 else 3.0  # the dequantized tile is rounded to q's dtype
    for got, wanted in zip((out, lse, logits), expected, strict=True):
        assert_near(got, wanted, dtype, factor)
    return out, lse


@formats
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_against_plain_loops(target, format, dtype):
    _check(target, torch.tensor([[17, 0], [1, 40]]), 2, 32, 32, format, 16, dtype)


@formats
@pytest.mark.parametrize("dim, dim_v, channels, group_q", [(80, 48, 16, 3), (64, 32, 32, 1), (24, 16, 8, 5)])
def test_odd_shapes(target, format, dim, dim_v, channels, group_q):
    _check(target, torch.tensor([[33, 16, 5]]), group_q, dim, dim_v, format, channels)


@formats
def test_many_splits_sinks_and_softcap(target, format):
    lengths = torch.tensor([[600, 0]])
    out, lse = _check(target, lengths, 2, 16, 16, format, 8, sinks=torch.randn(4), softcap=4.0)
    assert (out[:, 2:] == 0).all() and lse[:, 2:].isfinite().all()
    _check(target, lengths, 2, 16, 16, format, 8)


def test_stores_must_be_contiguous(target):
    if target.backend == "torch":
        pytest.skip("the reference takes any strides")
    codes, ranges = ops.quantize(torch.randn(8, 32, device=target.device), "int8", 16)
    start, length = torch.zeros(1, 1, device=target.device).long(), torch.ones(1, 1, device=target.device).int()
    with pytest.raises(ValueError, match="k must be contiguous"):
        ops.decode_attention_quantized(torch.randn(1, 1, 32, device=target.device), codes[:, ::2], ranges, codes, ranges, start,
                                       length, format="int8", group=16, max_len=8, scale=1.0, backend="triton")


@pytest.mark.parametrize("cut", [(40,), (13, 27), (0, 40), (5, 0, 35), (1, 2, 3, 34)], ids=str)
@pytest.mark.parametrize("sinks", [False, True])
def test_parts_merge_to_the_whole(target, cut, sinks):
    k, v, start, length, _ = ragged_store(torch.tensor([[40, 40]]), 16, 24, torch.float32, target.device)
    q = torch.randn(1, 4, 16, device=target.device)
    sink = torch.randn(4, device=target.device) if sinks else None
    options = dict(scale=0.3, return_lse=True, backend=target.backend)
    whole, lse, _ = ops.decode_attention(q, k, v, start, length, max_len=40, sinks=sink, **options)
    parts, first = [], 0
    for size in cut:
        held = torch.full_like(length, size)
        parts.append(ops.decode_attention(q, k, v, start + first, held, max_len=40, sinks=None if parts else sink, **options))
        first += size
    merged, merged_lse = ops.merge_attention([part[0] for part in parts], [part[1] for part in parts], backend=target.backend)
    assert_near(merged, whole)
    assert_near(merged_lse, lse)


def test_nothing_to_merge_gives_zero(target):
    out = torch.zeros(2, 4, 8, device=target.device)
    lse = torch.full((2, 4), -math.inf, device=target.device)
    merged, merged_lse = ops.merge_attention([out, out], [lse, lse], backend=target.backend)
    assert (merged == 0).all() and (merged_lse == -math.inf).all()


def _step(q, codes, ranges, start, length, format: str, backend: str):
    options = dict(format=format, group=8, max_len=9, scale=0.3, return_lse=True, return_logits=True, backend=backend)
    out, lse, logits = ops.decode_attention_quantized(q, codes, ranges, codes, ranges, start, length, **options)
    return *ops.merge_attention([out, out * 2], [lse, lse + 1], backend=backend), logits


def _step_inputs(device, format):
    codes, ranges = ops.quantize(torch.randn(18, 16, device=device), format, 8)
    start = torch.tensor([[0, 9]], device=device)
    return torch.randn(1, 4, 16, device=device), codes, ranges, start, torch.tensor([[9, 4]], device=device, dtype=torch.int32)


@formats
def test_one_step_compiles_without_a_break(target, format):
    args = _step_inputs(target.device, format)
    compiled = torch.compile(_step, fullgraph=True, backend="aot_eager")
    for got, expected in zip(compiled(*args, format, target.backend), _step(*args, format, target.backend), strict=True):
        assert_near(got, expected)


@pytest.fixture
def opcheck_device():
    if interpreting():
        return "cpu"
    if torch.cuda.is_available():
        return "cuda"
    pytest.skip("needs TRITON_INTERPRET=1 or a GPU")


@formats
def test_opcheck(opcheck_device, format):
    q, codes, ranges, start, length = _step_inputs(opcheck_device, format)
    check: Callable = torch.library.opcheck
    tests = dict(test_utils=("test_schema", "test_autograd_registration", "test_faketensor"))
    for wanted in (False, True):
        options = dict(format=format, group=8, max_len=9, scale=0.3, return_lse=wanted, return_logits=wanted)
        args = (q, codes, ranges, codes, ranges, start, length)
        check(torch.ops.kvsparse.decode_attention_quantized, args, options, **tests)
    lse = torch.randn(1, 4, device=opcheck_device)
    check(torch.ops.kvsparse.merge_attention, ([q, q], [lse, lse]), {}, **tests)
