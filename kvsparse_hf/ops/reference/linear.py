"""The linear layer of a few rows."""

import torch
from torch import Tensor

MOST_ROWS = 16


def few_rows_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``, accumulated in fp32, for at most 16 rows.

    Args:
        x: [..., K], no more than 16 rows in all.
        weight: [N, K], as `torch.nn.Linear` holds it.
        bias: [N].

    Returns:
        [..., N] in the dtype of ``x``.

    Raises:
        ValueError: more rows.
    """
    check_rows(x)
    wide = torch.promote_types(x.dtype, torch.float32)
    return torch.nn.functional.linear(x.to(wide), weight.to(wide), None if bias is None else bias.to(wide)).to(x.dtype)


def check_rows(x: Tensor) -> None:
    rows = x.numel() // max(1, x.shape[-1])
    if rows > MOST_ROWS:
        raise ValueError(f"few_rows_linear takes at most {MOST_ROWS} rows, got {rows} (x is {tuple(x.shape)})")
