"""page_scores and topk_pages."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from ops_oracle import assert_near

from kvsparse_hf import ops
from kvsparse_hf.ops.backend import interpreting


def _pages_oracle(q, summary, length, page_size, scale, how, sinks=0, recent=0):
    q, summary = q.double().cpu(), summary.double().cpu()
    batch, heads, pages = summary.shape[:3]
    group = q.shape[1] // heads
    out = torch.full((batch, heads, pages), -math.inf, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            count = min(pages, -(-int(length[b, h]) // page_size))
            if count == 0:
                continue
            high, low = summary[b, h, :count, 0], summary[b, h, :count, 1]
            rows = torch.stack([
                torch.maximum(q[b, h * group + g] * high, q[b, h * group + g] * low).sum(-1) * scale
                for g in range(group)
            ])
            if how == "softmax_mean":
                rows = rows.softmax(-1)
            out[b, h, :count] = rows.amax(0) if how == "max" else rows.mean(0)
            out[b, h, : min(sinks, count)] = math.inf
            out[b, h, max(0, count - recent) : count] = math.inf
    return out


def _summary(batch, heads, pages, page_size, dim, dtype, device):
    keys = torch.randn(batch, heads, pages, page_size, dim)
    return torch.stack([keys.amax(3), keys.amin(3)], dim=3).to(dtype).to(device)


@pytest.mark.parametrize("how", ["softmax_mean", "max", "mean"])
@pytest.mark.parametrize("heads, group, dim", [(1, 1, 32), (2, 4, 64), (3, 7, 80)])
def test_scores(target, heads, group, dim, how):
    summary = _summary(2, heads, 45, 8, dim, torch.float32, target.device)
    length = torch.randint(0, 360, (2, heads), dtype=torch.int32)
    length[0, 0], length[1, 0] = 0, 360
    length = length.to(target.device)
    summary[0, 0] = float("nan")  # nothing valid there
    q = torch.randn(2, heads * group, dim, device=target.device)
    got = ops.page_scores(q, summary, length, page_size=8, scale=0.2, group_reduce=how, backend=target.backend)
    assert_near(got, _pages_oracle(q, summary, length, 8, 0.2, how))


@pytest.mark.parametrize("how", ["softmax_mean", "max"])
def test_scores_half_precision(target, how):
    dtype = target.runnable(torch.bfloat16)
    summary = _summary(1, 2, 130, 16, 128, dtype, target.device)
    length = torch.tensor([[2000, 777]], dtype=torch.int32, device=target.device)
    q = torch.randn(1, 8, 128).to(dtype).to(target.device)
    got = ops.page_scores(q, summary, length, page_size=16, scale=0.05, group_reduce=how, backend=target.backend)
    assert_near(got, _pages_oracle(q, summary, length, 16, 0.05, how), torch.float32, factor=10)


@pytest.mark.parametrize("how", ["softmax_mean", "max"])
def test_forced_pages(target, how):
    summary = _summary(1, 3, 40, 4, 32, torch.float32, target.device)
    length = torch.tensor([[160, 9, 1]], dtype=torch.int32, device=target.device)
    q = torch.randn(1, 3, 32, device=target.device)
    got = ops.page_scores(q, summary, length, page_size=4, scale=0.2, group_reduce=how, sink_pages=1, recent_pages=2,
                          backend=target.backend)
    assert_near(got, _pages_oracle(q, summary, length, 4, 0.2, how, 1, 2))
    chosen = ops.topk_pages(got, 4, backend=target.backend)
    assert {0, 38, 39} <= set(chosen[0, 0].tolist())
    assert chosen[0, 1].tolist() == [0, 1, 2, -1] and chosen[0, 2].tolist() == [0, -1, -1, -1]


def test_bound_holds_for_every_key(target):
    keys = torch.randn(1, 2, 20, 8, 32, device=target.device)
    summary = torch.stack([keys.amax(3), keys.amin(3)], dim=3)
    q = torch.randn(1, 2, 32, device=target.device)
    length = torch.full((1, 2), 160, dtype=torch.int32, device=target.device)
    bound = ops.page_scores(q, summary, length, page_size=8, scale=1.0, group_reduce="max", backend=target.backend)
    best = (keys * q[:, :, None, None]).sum(-1).amax(-1)
    assert (bound >= best - 1e-4).all()


def _tokens_oracle(q, keys, length, dims, scale, how, softcap=0.0, sinks=0, recent=0):
    q, keys = q.double().cpu(), keys.double().cpu()
    batch, heads, tokens, _ = keys.shape
    group = q.shape[1] // heads
    out = torch.full((batch, heads, tokens), -math.inf, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            count = int(length[b, h])
            if count == 0:
                continue
            rows = q[b, h * group : (h + 1) * group] @ keys[b, h, :count, :dims].T * scale
            if softcap:
                rows = (rows / softcap).tanh() * softcap
            if how == "softmax_mean":
                rows = rows.softmax(-1)
            out[b, h, :count] = rows.amax(0) if how == "max" else rows.mean(0)
            out[b, h, : min(sinks, count)] = math.inf
            out[b, h, max(0, count - recent) : count] = math.inf
    return out


@pytest.mark.parametrize("how", ["softmax_mean", "max", "mean"])
@pytest.mark.parametrize("heads, group, dim, dims", [(1, 1, 32, 32), (2, 4, 64, 16), (3, 7, 80, 20)])
@pytest.mark.parametrize("softcap", [0.0, 1.5])
def test_token_scores(target, heads, group, dim, dims, how, softcap):
    keys = torch.randn(2, heads, 301, dim, device=target.device)
    length = torch.randint(1, 300, (2, heads), dtype=torch.int32)
    length[0, 0], length[1, 0] = 0, 301
    length = length.to(target.device)
    keys[0, 0] = float("nan")  # nothing valid there
    keys[..., dims:] = float("nan")  # not to be read
    q = torch.randn(2, heads * group, dims, device=target.device)
    got = ops.token_scores(q, keys, length, dims=dims, scale=0.3, softcap=softcap, group_reduce=how, sinks=2, recent=3,
                           backend=target.backend)
    assert_near(got, _tokens_oracle(q, keys, length, dims, 0.3, how, softcap, 2, 3))


def test_token_scores_half_precision(target):
    dtype = target.runnable(torch.bfloat16)
    keys = torch.randn(1, 2, 1500, 128).to(dtype).to(target.device)
    q = torch.randn(1, 8, 128).to(dtype).to(target.device)
    length = torch.tensor([[1500, 77]], dtype=torch.int32, device=target.device)
    got = ops.token_scores(q, keys, length, dims=128, scale=0.1, backend=target.backend)
    assert_near(got, _tokens_oracle(q, keys, length, 128, 0.1, "softmax_mean"), torch.float32, factor=10)


def _topk_oracle(row: list[float], k: int) -> list[int]:
    usable = [i for i, x in enumerate(row) if x > -math.inf]  # False for NaN
    best = sorted(sorted(usable, key=lambda i: (-row[i], i))[:k])
    return best + [-1] * (k - len(best))


def _check_topk(scores, k, target):
    got = ops.topk_pages(scores.to(target.device), k, backend=target.backend)
    assert got.dtype == torch.int32
    for row, chosen in zip(scores.flatten(0, 1).tolist(), got.flatten(0, 1).tolist(), strict=True):
        assert chosen == _topk_oracle(row, k)


@pytest.mark.parametrize("pages", [1, 15, 16, 17, 100, 1023])
@pytest.mark.parametrize("k", [1, 16, 40])
def test_topk(target, pages, k):
    _check_topk(torch.randn(2, 3, pages), k, target)


@pytest.mark.parametrize("row", [
    [-math.inf] * 5,
    [math.inf, 1.0, math.inf, -math.inf, 0.5],
    [0.0, -0.0, 0.0, -0.0, -1.0],
    [math.nan, 3.0, math.nan, 2.0, 1.0],
    [2.0] * 5,
    [1e-45, -1e-45, 1e38, -1e38, 0.0],
], ids=["nothing", "forced", "signed zeros", "nan", "ties", "extremes"])
@pytest.mark.parametrize("k", [1, 3, 5, 7])
def test_topk_edges(target, row, k):
    _check_topk(torch.tensor(row).view(1, 1, -1), k, target)


def test_topk_many_ties(target):
    _check_topk(torch.randint(0, 4, (2, 2, 300)).float(), 120, target)


values = st.one_of(st.floats(width=32, allow_nan=False), st.sampled_from([math.inf, -math.inf, 0.0, -0.0, 1.0]))


@settings(max_examples=40, deadline=None)
@given(st.lists(values, min_size=1, max_size=40), st.integers(1, 45))
@example([0.0], 1)
def test_topk_any_row(row, k):
    scores = torch.tensor(row, dtype=torch.float32).view(1, 1, -1)
    expected = _topk_oracle(scores.flatten().tolist(), k)
    for backend in ("torch", "triton") if interpreting() else ("torch",):
        assert ops.topk_pages(scores, k, backend=backend).flatten().tolist() == expected


@pytest.mark.parametrize("k", [1, 5, 20])
def test_topk_in_chunks(target, k, monkeypatch):
    """Long rows go through chunks: candidates of each, then the best of those."""
    if target.backend == "triton":
        from kvsparse_hf.ops.kernels import topk

        monkeypatch.setattr(topk, "topk_chunk", lambda pages, k: 64 if pages == 250 else 0)
    scores = torch.randint(-30, 30, (1, 3, 250)).float()
    scores[0, 0, 64:] = -math.inf  # chunks without a candidate
    scores[0, 1, 3:] = -math.inf
    scores[0, 2, ::5] = math.inf
    _check_topk(scores, k, target)


def test_topk_of_rows_too_long_for_one_program():
    pytest.importorskip("triton")
    from kvsparse_hf.ops.kernels import topk

    scores = torch.randint(-50, 50, (1, 2, 400)).float()
    scores[0, 0, ::7] = -math.inf
    scores[0, 1, :5] = math.nan
    for k in (1, 30, 395, 450):
        assert torch.equal(topk._topk_large(scores, k), ops.topk_pages(scores, k, backend="torch"))


@pytest.mark.parametrize("chunk", [0, 64])
@pytest.mark.parametrize("heads, group, k, how", [(1, 1, 5, "softmax_mean"), (2, 4, 20, "max"), (3, 7, 47, "softmax_mean")])
def test_choice_is_the_best_by_score(target, heads, group, k, how, chunk, monkeypatch):
    """In one go and in chunks, the same pages (and tokens) as by way of the scores."""
    if chunk and target.backend == "triton":
        from kvsparse_hf.ops.kernels import topk

        monkeypatch.setattr(topk, "topk_chunk", lambda pages, k: chunk if pages in (200, 300) else 0)
    summary = _summary(2, heads, 200, 4, 32, torch.float32, target.device)
    length = torch.randint(0, 800, (2, heads), dtype=torch.int32)
    length[0, 0], length[1, 0] = 0, 800
    length = length.to(target.device)
    q = torch.randn(2, heads * group, 32, device=target.device)
    options = dict(page_size=4, scale=0.2, group_reduce=how, sink_pages=1, recent_pages=2, backend=target.backend)
    got = ops.choose_pages(q, summary, length, k, **options)
    oracle = _pages_oracle(q, summary, length, 4, 0.2, how, 1, 2)
    assert got.flatten(0, 1).tolist() == [_topk_oracle(row, k) for row in oracle.flatten(0, 1).tolist()]
    keys, length = torch.randn(2, heads, 300, 40, device=target.device), length.clamp(max=300)
    options = dict(dims=32, scale=0.3, group_reduce=how, sinks=2, recent=3, softcap=2.0, backend=target.backend)
    got = ops.choose_tokens(q, keys, length, k, **options)
    oracle = _tokens_oracle(q, keys, length, 32, 0.3, how, 2.0, 2, 3)
    assert got.flatten(0, 1).tolist() == [_topk_oracle(row, k) for row in oracle.flatten(0, 1).tolist()]


def test_choice_of_nothing(target):
    summary = torch.zeros(1, 2, 0, 2, 16, device=target.device)
    length = torch.zeros(1, 2, dtype=torch.int32, device=target.device)
    q = torch.randn(1, 4, 16, device=target.device)
    for k in (0, 3):
        got = ops.choose_pages(q, summary, length, k, page_size=4, scale=1.0, backend=target.backend)
        assert got.tolist() == [[[-1] * k] * 2]
        keys = torch.zeros(1, 2, 0, 16, device=target.device)
        assert torch.equal(ops.choose_tokens(q, keys, length, k, dims=16, scale=1.0, backend=target.backend), got)


def test_topk_in_chunks_of_chunks(monkeypatch):
    """Candidates that are still too many for one program are cut again, or left to torch."""
    pytest.importorskip("triton")
    if not interpreting():
        pytest.skip("the interpreter is not on")
    from kvsparse_hf.ops.kernels import topk

    scores = torch.randint(-50, 50, (1, 2, 900)).float()
    scores[0, 0, ::7] = -math.inf
    monkeypatch.setattr(topk, "topk_chunk", lambda pages, k: {900: 64, 15 * 20: 100}.get(pages, 0))
    for most in (1000, 40):
        monkeypatch.setattr(topk, "TOPK_MOST", most)
        assert torch.equal(ops.topk_pages(scores, 20, backend="triton"), ops.topk_pages(scores, 20, backend="torch"))
