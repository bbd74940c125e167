"""few_rows_linear."""

import pytest
import torch

from kvsparse_hf import ops


def _oracle(x, weight, bias):
    """Dot product by dot product, in fp64."""
    rows = [[sum(a * b for a, b in zip(row, column, strict=True)) for column in weight.double().tolist()] for row in x.double().tolist()]
    return torch.tensor(rows, dtype=torch.float64) + (0 if bias is None else bias.double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows, features, inner", [(1, 1, 1), (2, 33, 40), (8, 32, 256), (9, 70, 300), (16, 64, 17)])
def test_few_rows_linear(target, rows, features, inner, bias, dtype):
    dtype = target.runnable(dtype)
    x, weight = torch.randn(rows, inner).to(dtype), torch.randn(features, inner).to(dtype)
    b = torch.randn(features).to(dtype) if bias else None
    placed = [None if t is None else t.to(target.device) for t in (x.unsqueeze(1), weight, b)]
    got = ops.few_rows_linear(*placed, backend=target.backend)
    assert got.shape == (rows, 1, features) and got.dtype == dtype
    expected = _oracle(x, weight, b)
    exact = 1e-5 if dtype == torch.float32 else torch.finfo(dtype).eps
    assert (got.squeeze(1).cpu().double() - expected).abs().max() <= exact * (1 + expected.abs().max())


def test_rows_that_are_not_contiguous_and_too_many(target):
    x, weight = torch.randn(24, 16, device=target.device), torch.randn(8, 16, device=target.device)
    got = ops.few_rows_linear(x[::2], weight, backend=target.backend)
    assert torch.equal(got, ops.few_rows_linear(x[::2].contiguous(), weight, backend=target.backend))
    with pytest.raises(ValueError, match="at most 16 rows, got 24"):
        ops.few_rows_linear(x, weight, backend=target.backend)


@pytest.mark.gpu
@pytest.mark.parametrize("features, inner", [(6144, 4096), (4096, 14336), (1000, 896)])
@pytest.mark.parametrize("rows", [2, 8, 16])
def test_real_shapes(cuda, rows, features, inner):
    x = torch.randn(rows, inner, device=cuda, dtype=torch.bfloat16)
    weight = torch.randn(features, inner, device=cuda, dtype=torch.bfloat16)
    got = ops.few_rows_linear(x, weight, backend="triton").double()
    expected = x.double() @ weight.double().T
    assert (got - expected).norm() < 3e-3 * expected.norm()
