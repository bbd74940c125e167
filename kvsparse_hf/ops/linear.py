"""The linear layer of a few rows, as a torch op: what a step multiplies beside its attention."""

import torch
from torch import Tensor

from . import reference
from .backend import resolve, through_dispatcher
from .custom import _register, on_device_of


def _launch_few_rows_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    from .kernels.linear import few_rows_linear as launch

    with on_device_of(x):
        return launch(x, weight, bias)


_few_rows_linear = _register("few_rows_linear", _launch_few_rows_linear)


@_few_rows_linear.register_fake
def _(x, weight, bias=None):
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def few_rows_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, backend: str = "auto") -> Tensor:
    reference.check_rows(x)
    if resolve("few_rows_linear", backend, x, weight) == "torch":
        return reference.few_rows_linear(x, weight, bias)
    if through_dispatcher(x, weight):
        return torch.ops.kvsparse.few_rows_linear(x, weight, bias)
    return _launch_few_rows_linear(x, weight, bias)


few_rows_linear.__doc__ = (reference.few_rows_linear.__doc__ or "").rstrip() + (
    '\n\n    ``backend``: "auto", "triton", "torch"; see :func:`kvsparse_hf.ops.backend.resolve`.\n    '
)
