"""What only a GPU can show: real sizes, offsets past 2^31, graphs, streams, several devices."""

from __future__ import annotations

import pytest
import torch
from ops_oracle import assert_near

from kvsparse_hf import ops

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16


def _dense(batch, heads, length, dim, device, dtype=BF16):
    rows = batch * heads * length
    k, v = (torch.randn(rows, dim, dtype=dtype, device=device) for _ in range(2))
    start = (torch.arange(batch * heads, device=device) * length).view(batch, heads)
    return k, v, start, torch.full((batch, heads), length, dtype=torch.int32, device=device)


@pytest.mark.parametrize("batch, heads, group, length, dim", [
    (1, 8, 4, 32768, 128), (8, 8, 4, 8192, 128), (32, 8, 4, 2048, 128), (1, 4, 7, 20000, 128), (2, 8, 3, 4097, 64),
    (2, 4, 2, 5000, 256), (1, 2, 16, 9999, 96),
])
@pytest.mark.parametrize("paged", [False, True])
def test_decode(cuda, batch, heads, group, length, dim, paged):
    k, v, start, lengths = _dense(batch, heads, length, dim, cuda)
    lengths -= torch.randint(0, length, lengths.shape, device=cuda, dtype=torch.int32)
    q = torch.randn(batch, heads * group, dim, dtype=BF16, device=cuda)
    options = dict(max_len=length, scale=dim**-0.5, return_lse=True)
    if paged:
        pages = torch.stack([torch.randperm(-(-length // 16), device=cuda)[:100] for _ in range(batch * heads)])
        options |= dict(pages=pages.int().view(batch, heads, 100), page_size=16)
    out, lse, _ = ops.decode_attention(q, k, v, start, lengths, backend="triton", **options)
    expected = ops.decode_attention(q, k, v, start, lengths, backend="torch", **options)
    assert_near(out, expected[0], BF16)
    assert_near(lse, expected[1], BF16, factor=0.1)
    again = ops.decode_attention(q, k, v, start, lengths, backend="triton", **options)[0]
    assert torch.equal(out, again), "must be deterministic"


@pytest.mark.parametrize("tokens, length, pad", [(512, 4096, 0), (1000, 333, 77), (6, 32768, 0), (1, 8192, 0)])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_chunk(cuda, tokens, length, pad, dim):
    k, v, start, lengths = _dense(2, 4, length, dim, cuda)
    lengths[1] //= 3
    q = torch.randn(2, tokens, 16, dim, dtype=BF16, device=cuda).transpose(1, 2)
    k_new, v_new = (torch.randn(2, tokens, 4, dim, dtype=BF16, device=cuda).transpose(1, 2) for _ in range(2))
    options = dict(max_len=length, scale=dim**-0.5, pad=torch.tensor([pad, 0], device=cuda), return_lse=True)
    args = (q, k, v, start, lengths, k_new, v_new)
    out, lse = ops.chunk_attention(*args, backend="triton", **options)
    expected = ops.chunk_attention(*args, backend="torch", **options)
    assert_near(out, expected[0], BF16)
    assert_near(lse, expected[1], BF16, factor=0.1)


@pytest.mark.parametrize("reduce", ["mean", "max"])
@pytest.mark.parametrize("total, window, group", [(32768, 32, 4), (10001, 64, 4), (5000, 8, 7), (3000, 3000, 2)])
def test_scores(cuda, total, window, group, reduce):
    q = torch.randn(2, 4 * group, window, 128, dtype=BF16, device=cuda)
    k = torch.randn(2, total, 4, 128, dtype=BF16, device=cuda).transpose(1, 2)
    options = dict(scale=128**-0.5, pad=torch.tensor([0, 123], device=cuda), group_reduce=reduce)
    got = ops.window_scores(q, k, backend="triton", **options)
    assert_near(got, ops.window_scores(q, k, backend="torch", **options), BF16, factor=0.3)


@pytest.mark.parametrize("pages", [2048, 8192, 16384, 20000])
def test_page_scores_and_topk(cuda, pages):
    summary = torch.randn(2, 4, pages, 2, 128, dtype=BF16, device=cuda).sort(3, descending=True).values
    length = torch.randint(1, pages * 16, (2, 4), dtype=torch.int32, device=cuda)
    q = torch.randn(2, 16, 128, dtype=BF16, device=cuda)
    for how in ("softmax_mean", "max", "mean"):
        options = dict(page_size=16, scale=128**-0.5, group_reduce=how, sink_pages=1, recent_pages=2)
        scores = ops.page_scores(q, summary, length, backend="triton", **options)
        assert_near(scores, ops.page_scores(q, summary, length, backend="torch", **options), BF16, factor=0.3)
        for k in (1, 128, 1000):
            got = ops.topk_pages(scores, k, backend="triton")
            assert torch.equal(got, ops.topk_pages(scores, k, backend="torch"))


@pytest.mark.parametrize("tokens, dims", [(1000, 128), (32768, 32), (131072, 32)])
def test_token_scores_and_topk(cuda, tokens, dims):
    keys = torch.randn(1, 8, tokens, 128, dtype=BF16, device=cuda)
    q = torch.randn(1, 32, dims, dtype=BF16, device=cuda)
    length = torch.full((1, 8), tokens - 3, dtype=torch.int32, device=cuda)
    options = dict(dims=dims, scale=0.1, sinks=4, recent=16)
    scores = ops.token_scores(q, keys, length, backend="triton", **options)
    assert_near(scores, ops.token_scores(q, keys, length, backend="torch", **options), BF16, factor=0.3)
    assert torch.equal(ops.topk_pages(scores, 2048, backend="triton"), ops.topk_pages(scores, 2048, backend="torch"))


def test_offsets_past_two_to_the_31(cuda):
    if torch.cuda.get_device_properties(0).total_memory < 40e9:
        pytest.skip("needs 40 GB of GPU memory")
    dim, heads, length = 128, 2, 3000
    rows = 2**31 // dim + 3 * length
    k, v = (torch.empty(rows, dim, dtype=BF16, device=cuda) for _ in range(2))
    pos = torch.zeros(rows, dtype=torch.int32, device=cuda)
    start = torch.tensor([[rows - 2 * length, rows - length]], device=cuda)
    source_k, source_v = (torch.randn(1, heads, length, dim, dtype=BF16, device=cuda) for _ in range(2))
    index = torch.arange(length, device=cuda).expand(1, heads, length).contiguous()
    ops.gather_rows(source_k, source_v, index, start, k, v, backend="triton")
    assert torch.equal(k[rows - 2 * length:].view_as(source_k), source_k)

    zeros = torch.zeros(1, heads, dtype=torch.int32, device=cuda)
    capacity = zeros + length
    length_now = capacity.clone()
    new = torch.randn(1, heads, dim, dtype=BF16, device=cuda)
    ops.store_token(k, v, pos, new, new, zeros[:, 0] + 9, start, capacity, length_now, zeros + 5, zeros.clone(),
                    backend="triton")
    source_k[:, :, 5], source_v[:, :, 5] = new, new
    assert torch.equal(k[rows - 2 * length:].view_as(source_k), source_k) and pos[rows - length + 5] == 9

    q = torch.randn(1, 8, dim, dtype=BF16, device=cuda)
    near = (k[rows - 2 * length:], v[rows - 2 * length:], start - start[0, 0], capacity)
    for options in ({}, dict(pages=torch.arange(180, device=cuda).int().expand(1, heads, 180), page_size=16)):
        options |= dict(max_len=length, scale=dim**-0.5, backend="triton")
        got = ops.decode_attention(q, k, v, start, capacity, **options)[0]
        assert torch.equal(got, ops.decode_attention(q, *near, **options)[0])
    options = dict(max_len=length, scale=dim**-0.5, backend="triton")
    chunk = (q.unsqueeze(2), k, v, start, capacity, new.unsqueeze(2), new.unsqueeze(2))
    assert torch.equal(ops.chunk_attention(*chunk, **options),
                       ops.chunk_attention(chunk[0], *near, *chunk[5:], **options))
    del k, v

    total = 2**31 // (heads * dim) + 1000
    keys = torch.randn(1, heads, total, dim, dtype=BF16, device=cuda)
    q = torch.randn(1, heads, 8, dim, dtype=BF16, device=cuda)
    got = ops.window_scores(q, keys, scale=dim**-0.5, backend="triton")
    assert_near(got, ops.window_scores(q, keys, scale=dim**-0.5, backend="torch"), BF16, factor=0.5)


def _decode_state(device, batch=2, heads=4, dim=64, capacity=512, filled=480, page=16):
    k, v, start, _ = _dense(batch, heads, capacity, dim, device)
    per_head = torch.zeros(batch, heads, dtype=torch.int32, device=device)
    keys = k.view(batch, heads, capacity // page, page, dim)
    summary = torch.stack([keys.amax(3), keys.amin(3)], dim=3)
    return dict(k=k, v=v, pos=torch.zeros(len(k), dtype=torch.int32, device=device), start=start,
                capacity=per_head + capacity, length=per_head + filled, pinned=per_head + 4, cursor=per_head.clone(),
                summary=summary)


def _decode_step(state, q, key, value, position, backend):
    ops.store_token(state["k"], state["v"], state["pos"], key, value, position, state["start"], state["capacity"],
                    state["length"], state["pinned"], state["cursor"], None, state["summary"], 16, backend=backend)
    scores = ops.page_scores(q, state["summary"], state["length"], page_size=16, scale=0.1, sink_pages=1,
                             recent_pages=1, backend=backend)
    pages = ops.topk_pages(scores, 8, backend=backend)
    sparse = ops.decode_attention(q, state["k"], state["v"], state["start"], state["length"], max_len=512, scale=0.1,
                                  pages=pages, page_size=16, return_lse=True, backend=backend)[:2]
    dense = ops.decode_attention(q, state["k"], state["v"], state["start"], state["length"], max_len=512, scale=0.1,
                                 return_logits=True, backend=backend)
    return *sparse, dense[0], dense[2]


def test_graph_capture_and_500_replays(cuda):
    torch.use_deterministic_algorithms(False)  # the fills of poisoned memory are no part of a decode step
    state = _decode_state(cuda)
    q = torch.randn(2, 16, 64, dtype=BF16, device=cuda)
    key, value = (torch.randn(2, 4, 64, dtype=BF16, device=cuda) for _ in range(2))
    position = torch.zeros(2, dtype=torch.int32, device=cuda)
    scratch = {name: x.clone() for name, x in state.items()}
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        _decode_step(scratch, q, key, value, position, "triton")  # compiles every kernel before the capture
    torch.cuda.current_stream().wait_stream(stream)
    twin = {name: x.clone() for name, x in state.items()}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = _decode_step(state, q, key, value, position, "triton")
    for step in range(500):
        for x in (q, key, value):
            x.copy_(torch.randn_like(x))
        position.fill_(1000 + step)
        graph.replay()
        expected = _decode_step(twin, q, key, value, position, "torch")
        if step % 50 == 0 or step > 495:
            assert torch.equal(outputs[1] == float("-inf"), expected[1] == float("-inf"))
            assert_near(outputs[2], expected[2], BF16)
            assert_near(outputs[3], expected[3], BF16, factor=0.3)
    for name, x in state.items():
        assert torch.equal(x, twin[name]), name


def test_side_stream(cuda):
    state = _decode_state(cuda)
    q = torch.randn(2, 16, 64, dtype=BF16, device=cuda)
    args = (q, state["k"], state["v"], state["start"], state["length"])
    expected = ops.decode_attention(*args, max_len=512, scale=0.1, backend="triton")[0]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)  # a launch on another stream would overtake this and read the old query
        q.mul_(-1)
        got = ops.decode_attention(*args, max_len=512, scale=0.1, backend="triton")[0]
        q.mul_(-1)
        back = ops.decode_attention(*args, max_len=512, scale=0.1, backend="triton")[0]
    stream.synchronize()
    assert torch.equal(back, expected) and not torch.equal(got, expected)


def test_second_device(cuda):
    if torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device")
    state = _decode_state("cuda:1")
    twin = {name: x.clone() for name, x in state.items()}
    q = torch.randn(2, 16, 64, dtype=BF16, device="cuda:1")
    key = torch.randn(2, 4, 64, dtype=BF16, device="cuda:1")
    position = torch.zeros(2, dtype=torch.int32, device="cuda:1")
    assert torch.cuda.current_device() == 0
    got = _decode_step(state, q, key, key, position, "triton")
    expected = _decode_step(twin, q, key, key, position, "torch")
    assert_near(got[2], expected[2], BF16)
    assert torch.equal(state["k"], twin["k"]) and torch.cuda.current_device() == 0
