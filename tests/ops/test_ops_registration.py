"""Backends, errors, registered torch ops, compilation, and autograd."""

from __future__ import annotations

import pathlib
import subprocess
import sys
import warnings

import pytest
import torch
from ops_oracle import assert_near, ragged_store

from kvsparse_hf import ops
from kvsparse_hf.ops import backend as backends


def _decode_inputs(device="cpu", dtype=torch.float32):
    k, v, start, length, capacity = ragged_store(torch.tensor([[9, 4]]), 16, 16, dtype, device)
    return torch.randn(1, 4, 16, dtype=dtype, device=device), k, v, start, length


def test_import_needs_neither_triton_nor_transformers_nor_a_gpu():
    """The kernel layer stands alone: it is imported here below an empty package, with the rest unavailable."""
    code = """if True:
        import sys, types
        package = types.ModuleType("kvsparse_hf")
        package.__path__ = [sys.argv[1]]
        sys.modules.update(kvsparse_hf=package, triton=None, transformers=None)
        import torch, kvsparse_hf.ops as ops
        assert ops.topk_pages(torch.tensor([[[1.0, 3.0, 2.0]]]), 2).tolist() == [[[1, 2]]]
        assert not torch.cuda.is_initialized()
    """
    package = pathlib.Path(ops.__file__).parents[1]
    subprocess.run([sys.executable, "-c", code, str(package)], check=True)


def test_unknown_backend():
    with pytest.raises(ops.BackendError, match="auto, triton, flash, torch"):
        ops.decode_attention(*_decode_inputs(), max_len=9, scale=1.0, backend="cuda")


def test_error_is_a_value_error():
    assert issubclass(ops.BackendError, ValueError)


def test_triton_on_the_cpu_is_an_error_that_says_why(monkeypatch):
    monkeypatch.setattr(backends, "interpreting", lambda: False)
    with pytest.raises(ops.BackendError, match="'cpu'|not installed"):
        ops.decode_attention(*_decode_inputs(), max_len=9, scale=1.0, backend="triton")


def test_other_ops_have_no_flash_backend():
    with pytest.raises(ops.BackendError, match="no flash backend"):
        ops.topk_pages(torch.randn(1, 1, 4), 2, backend="flash")


def test_environment_variable(monkeypatch):
    monkeypatch.setenv(backends.ENV_BACKEND, "nonsense")
    with pytest.raises(ops.BackendError, match="nonsense"):
        ops.topk_pages(torch.randn(1, 1, 4), 2)
    assert ops.topk_pages(torch.randn(1, 1, 4), 2, backend="torch").shape == (1, 1, 2)
    monkeypatch.setenv(backends.ENV_BACKEND, "flash")  # ops without a flash backend are not affected
    assert ops.topk_pages(torch.randn(1, 1, 4), 2).shape == (1, 1, 2)
    monkeypatch.setenv(backends.ENV_BACKEND, "torch")
    assert ops.decode_attention(*_decode_inputs(), max_len=9, scale=1.0)[0].shape == (1, 4, 16)


@pytest.mark.parametrize("dtype, dims, reason", [
    (torch.float64, (16,), "float64"), (torch.float32, (512,), "512"),
])
def test_what_the_kernels_do_not_take(monkeypatch, dtype, dims, reason):
    """On a GPU: the reference with one warning under auto, an error when the kernels were asked for."""
    monkeypatch.setattr(backends, "HAS_TRITON", True)
    backends._warn_once.cache_clear()

    class OnCuda:
        device = torch.device("cuda")

        def __init__(self):
            self.dtype = dtype

    with pytest.warns(UserWarning, match=reason):
        assert backends.resolve("decode_attention", "auto", OnCuda(), dims=dims) == "torch"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert backends.resolve("decode_attention", "auto", OnCuda(), dims=dims) == "torch"
    with pytest.raises(ops.BackendError, match=reason):
        backends.resolve("decode_attention", "triton", OnCuda(), dims=dims)


def test_every_op_documents_its_backend():
    for name in ops.__all__:
        if name != "BackendError":
            assert "backend" in getattr(ops, name).__doc__


def _step(q, k, v, pos, start, capacity, length, pinned, cursor, summary, key, new_pos, backend):
    ops.store_token(k, v, pos, key, key, new_pos, start, capacity, length, pinned, cursor, None, summary, 4,
                    backend=backend)
    scores = ops.page_scores(q, summary, length, page_size=4, scale=0.2, sink_pages=1, backend=backend)
    pages = ops.topk_pages(scores, 2, backend=backend)
    out, lse, _ = ops.decode_attention(q, k, v, start, length, max_len=8, scale=0.2, pages=pages, page_size=4,
                                       return_lse=True, backend=backend)
    chunk = ops.chunk_attention(q.unsqueeze(2), k, v, start, length, key.unsqueeze(2), key.unsqueeze(2), max_len=8,
                                scale=0.2, backend=backend)
    received = ops.window_scores(q.unsqueeze(2), key.unsqueeze(2).repeat(1, 1, 3, 1), scale=0.2, backend=backend)
    return out, lse, chunk, received


def _step_inputs(device):
    k, v, start, length, capacity = ragged_store(torch.tensor([[3, 0]]), 16, 16, torch.float32, device)
    pos = torch.zeros(k.shape[0], dtype=torch.int32, device=device)
    summary = torch.zeros(1, 2, 3, 2, 16, device=device)
    return [torch.randn(1, 4, 16, device=device), k, v, pos, start, capacity, length, torch.zeros_like(length),
            torch.zeros_like(length), summary, torch.randn(1, 2, 16, device=device),
            torch.tensor([5], dtype=torch.int32, device=device)]


def test_one_step_compiles_without_a_break(target):
    if target.device == "cpu" and target.backend == "triton":
        backend = "aot_eager"  # the registered ops are traced; Inductor would add minutes and nothing to see
    else:
        backend = "aot_eager" if target.device == "cpu" else "inductor"
    eager = _step_inputs(target.device)
    compiled = [x.clone() for x in eager]
    step = torch.compile(_step, fullgraph=True, backend=backend)
    for _ in range(4):
        expected, got = _step(*eager, target.backend), step(*compiled, target.backend)
        for a, b in zip(expected, got, strict=True):
            assert_near(b, a)
    for a, b in zip(eager, compiled, strict=True):
        assert torch.equal(torch.nan_to_num(a), torch.nan_to_num(b)), "a compiled step must leave the same state"


def test_gradients_are_refused_not_lost(target):
    if target.backend == "torch":
        pytest.skip("the reference is differentiable")
    q, k, v, start, length = _decode_inputs(target.device)
    with torch.enable_grad():
        out = ops.decode_attention(q.requires_grad_(), k, v, start, length, max_len=9, scale=1.0, backend="triton")[0]
        with pytest.raises(RuntimeError, match="autograd"):
            out.sum().backward()


@pytest.fixture
def opcheck_device(request):
    if backends.interpreting():
        return "cpu"
    if torch.cuda.is_available():
        return "cuda"
    pytest.skip("needs TRITON_INTERPRET=1 or a GPU")


CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")


@pytest.mark.parametrize("lse, logits, paged", [(False, False, False), (True, True, False), (True, False, True)])
def test_opcheck_decode(opcheck_device, lse, logits, paged):
    args = _decode_inputs(opcheck_device)
    pages = torch.zeros(1, 2, 3, dtype=torch.int32, device=opcheck_device) if paged else None
    options = dict(max_len=9, scale=0.3, pages=pages, page_size=4 if paged else 0)
    options |= dict(return_lse=lse, return_logits=logits)
    torch.library.opcheck(torch.ops.kvsparse.decode_attention, args, options, test_utils=CHECKS)


def test_opcheck_others(opcheck_device):
    device = opcheck_device
    q, k, v, start, length = _decode_inputs(device)
    new = torch.randn(1, 2, 3, 16, device=device)
    check = dict(test_utils=CHECKS)
    torch.library.opcheck(
        torch.ops.kvsparse.chunk_attention, (q.unsqueeze(2).repeat(1, 1, 3, 1), k, v, start, length, new, new),
        dict(max_len=9, scale=0.3, return_lse=True), **check)
    torch.library.opcheck(torch.ops.kvsparse.column_sums, (q.unsqueeze(2), new), dict(scale=0.3), **check)
    summary = torch.randn(1, 2, 3, 2, 16, device=device)
    tokens = torch.randn(1, 2, 40, 16, device=device)
    torch.library.opcheck(torch.ops.kvsparse.token_scores, (q, tokens, length), dict(dims=16, scale=0.3), **check)
    torch.library.opcheck(torch.ops.kvsparse.page_scores, (q, summary, length), dict(page_size=4, scale=0.3), **check)
    torch.library.opcheck(torch.ops.kvsparse.topk_pages, (torch.randn(1, 2, 9, device=device), 3), {}, **check)
    torch.library.opcheck(torch.ops.kvsparse.choose_pages, (q, summary, length, 2), dict(page_size=4, scale=0.3), **check)
    torch.library.opcheck(torch.ops.kvsparse.choose_tokens, (q, tokens, length, 2), dict(dims=16, scale=0.3), **check)


def test_opcheck_in_place(opcheck_device):
    args = _step_inputs(opcheck_device)
    q, k, v, pos, start, capacity, length, pinned, cursor, summary, key, new_pos = args
    k, v = torch.zeros_like(k), torch.zeros_like(v)  # opcheck compares states, and NaN is never equal
    state = (k, v, pos, key, key, new_pos, start, capacity, length, pinned, cursor)
    check = dict(test_utils=CHECKS)
    torch.library.opcheck(torch.ops.kvsparse.store_token, (*state, None, None, 0), {}, **check)
    torch.library.opcheck(torch.ops.kvsparse.store_token, (*state, None, summary, 4), {}, **check)
    source = torch.randn(1, 2, 5, 16, device=opcheck_device)
    index = torch.tensor([[[0, 4, -1], [2, 3, 1]]], device=opcheck_device)
    torch.library.opcheck(torch.ops.kvsparse.gather_rows, (source, source, index, start, k, v), {}, **check)
