"""window_scores and column_sums."""

from __future__ import annotations

import pytest
import torch
from ops_oracle import assert_near, columns_oracle

from kvsparse_hf import ops


def _inputs(target, batch, heads, group, total, window, dim, dtype=torch.float32):
    q = torch.randn(batch, window, heads * group, dim).to(dtype).to(target.device).transpose(1, 2)
    k = torch.randn(batch, total, heads, dim).to(dtype).to(target.device).transpose(1, 2)
    return q, k


def _pad(values, device):
    return None if values is None else torch.tensor(values, dtype=torch.int32, device=device)


@pytest.mark.parametrize("reduce", ["mean", "max", "sum"])
@pytest.mark.parametrize("heads, group", [(1, 1), (2, 4), (1, 7)])
def test_window(target, heads, group, reduce):
    q, k = _inputs(target, 2, heads, group, 83, 8, 32)
    got = ops.window_scores(q, k, scale=0.3, group_reduce=reduce, backend=target.backend)
    assert_near(got, columns_oracle(q, k, scale=0.3, group_reduce=reduce)[0])


@pytest.mark.parametrize("dim", [64, 80, 256])
def test_window_half_precision(target, dim):
    q, k = _inputs(target, 1, 2, 3, 150, 16, dim, target.runnable(torch.bfloat16))
    got = ops.window_scores(q, k, scale=dim**-0.5, backend=target.backend)
    assert_near(got, columns_oracle(q, k, scale=dim**-0.5)[0], torch.float32, factor=10)


@pytest.mark.parametrize("total, window", [(1, 1), (15, 15), (16, 1), (17, 16), (300, 33), (260, 5)])
def test_window_sizes(target, total, window):
    q, k = _inputs(target, 1, 1, 2, total, window, 16)
    got = ops.window_scores(q, k, scale=0.5, group_reduce="max", backend=target.backend)
    assert_near(got, columns_oracle(q, k, scale=0.5, group_reduce="max")[0])


@pytest.mark.parametrize("pad", [[0, 7], [60, 33], [75, 80], [83, 0]], ids=str)
@pytest.mark.parametrize("reduce", ["mean", "max"])
def test_window_padding(target, pad, reduce):
    q, k = _inputs(target, 2, 2, 2, 83, 8, 32)
    options = dict(scale=0.3, pad=_pad(pad, target.device), group_reduce=reduce)
    got = ops.window_scores(q, k, backend=target.backend, **options)
    assert_near(got, columns_oracle(q, k, **options)[0])
    for b, count in enumerate(pad):
        assert (got[b, :, :count] == 0).all()


def test_window_softcap(target):
    q, k = _inputs(target, 1, 2, 2, 40, 8, 32)
    got = ops.window_scores(q * 5, k, scale=0.3, softcap=3.0, backend=target.backend)
    assert_near(got, columns_oracle(q * 5, k, scale=0.3, softcap=3.0)[0])


def test_window_mass_is_conserved(target):
    q, k = _inputs(target, 1, 2, 3, 200, 8, 32)
    got = ops.window_scores(q, k, scale=0.3, group_reduce="sum", backend=target.backend)
    assert_near(got.sum(-1), torch.full((1, 2), 3 * 8.0))


@pytest.mark.parametrize("reduce", ["mean", "max", "sum"])
@pytest.mark.parametrize("total, group", [(1, 2), (17, 1), (70, 2)])
def test_columns(target, total, group, reduce):
    q, k = _inputs(target, 1, 2, group, total, total, 32)
    expected, lse = columns_oracle(q, k, scale=0.3, group_reduce=reduce)
    assert_near(ops.column_sums(q, k, scale=0.3, group_reduce=reduce, backend=target.backend), expected)
    lse = lse.float().to(target.device)
    assert_near(ops.column_sums(q, k, scale=0.3, lse=lse, group_reduce=reduce, backend=target.backend), expected)


def test_columns_padding_with_garbage_lse(target):
    q, k = _inputs(target, 2, 1, 2, 70, 70, 32)
    pad = _pad([3, 66], target.device)
    expected, lse = columns_oracle(q, k, scale=0.3, pad=pad)
    assert_near(ops.column_sums(q, k, scale=0.3, pad=pad, backend=target.backend), expected)
    for garbage in (float("nan"), float("-inf")):
        lse[0, :, :3] = lse[1, :, :66] = garbage
        got = ops.column_sums(q, k, scale=0.3, pad=pad, lse=lse.float().to(target.device), backend=target.backend)
        assert_near(got, expected)


def test_columns_are_deterministic(target):
    q, k = _inputs(target, 1, 2, 1, 66, 66, 32)
    first = ops.column_sums(q, k, scale=0.3, backend=target.backend)
    assert torch.equal(first, ops.column_sums(q, k, scale=0.3, backend=target.backend))


def test_reference_takes_queries_in_blocks(monkeypatch):
    from kvsparse_hf.ops.reference import scores

    q, k = torch.randn(1, 2, 50, 16), torch.randn(1, 1, 50, 16)
    whole = ops.column_sums(q, k, scale=0.3, backend="torch")
    monkeypatch.setattr(scores, "_BLOCK_ELEMENTS", 2 * 50 * 7)
    assert_near(ops.column_sums(q, k, scale=0.3, backend="torch"), whole)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_unknown_reduction(backend, request):
    if backend == "triton":
        request.getfixturevalue("interpreter_only")
    with pytest.raises(ValueError, match="group_reduce"):
        ops.window_scores(torch.randn(1, 1, 2, 16), torch.randn(1, 1, 4, 16), scale=1.0, group_reduce="median",
                          backend=backend)
