"""Cases of the kernel benchmark: choosing what a step reads."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from .. import ops
from .kernel_cases import BUDGET, DIM, HEADS, HEADS_Q, PAGE, SCALE, Case, random, relative_error


def _page_inputs(batch: int, pages: int) -> tuple:
    summary = random(batch, HEADS, pages, 2, DIM).sort(3, descending=True).values
    length = torch.full((batch, HEADS), pages * PAGE, dtype=torch.int32, device="cuda")
    return random(batch, HEADS_Q, DIM), summary, length


def _page_scores(inputs: tuple, how: str, backend: str) -> Tensor:
    return ops.page_scores(*inputs, page_size=PAGE, scale=SCALE, group_reduce=how, backend=backend)


def _check_page_scores(inputs: tuple, got: Tensor, how: str) -> float:
    return relative_error(got, _page_scores(inputs, how, "torch"))


def _token_inputs(batch: int, tokens: int, dims: int) -> tuple:
    length = torch.full((batch, HEADS), tokens, dtype=torch.int32, device="cuda")
    return random(batch, HEADS_Q, dims), random(batch, HEADS, tokens, DIM), length


def _token_scores(inputs: tuple, backend: str) -> Tensor:
    return ops.token_scores(*inputs, dims=inputs[0].shape[-1], scale=SCALE, backend=backend)


def _topk(inputs: tuple, k: int, backend: str) -> Tensor:
    return ops.topk_pages(*inputs, k, backend=backend)


def _torch_topk(inputs: tuple, k: int) -> Tensor:
    """What one would write instead: the same indices, ascending, as int32."""
    return torch.topk(*inputs, k, dim=-1, sorted=False).indices.sort(-1).values.int()


def _topk_case(batch: int, scores: int, k: int, shape: dict) -> Case:
    return Case(
        "topk_pages/-", shape | {"k": k}, 0, batch * HEADS * scores * 4,
        lambda: (torch.rand(batch, HEADS, scores, device="cuda"),),
        {"triton": functools.partial(_topk, k=k, backend="triton"), "torch": functools.partial(_torch_topk, k=k)},
        lambda inputs, got: relative_error(got, _topk(inputs, k, "torch")),
    )


def _choice(inputs: tuple, op: Callable, k: int, backend: str, **options) -> Tensor:
    return op(*inputs, k, scale=SCALE, backend=backend, **options)


def _choice_case(name: str, shape: dict, nbytes: int, make: Callable, op: Callable, k: int, **options) -> Case:
    """What a step reads, chosen in one go. Near ties may fall otherwise in fp32: the error is the share that does."""

    def check(inputs: tuple, got: Tensor) -> float:
        mine, theirs = got, _choice(inputs, op, k, "torch", **options)
        return 1 - torch.isin(_unique(mine), _unique(theirs)).float().mean().item()

    run = functools.partial(_choice, op=op, k=k, backend="triton", **options)
    return Case(name, shape | {"k": k}, nbytes, nbytes, make, {"triton": run}, check)


def _unique(chosen: Tensor) -> Tensor:
    """Ids that differ between rows: [B, H, k] -> [B * H * k]."""
    rows = torch.arange(chosen[..., 0].numel(), device=chosen.device).view(*chosen.shape[:2], 1)
    return (chosen.long() + (rows << 32)).flatten()


def selection_cases() -> Iterator[Case]:
    for batch, pages in ((1, 512), (1, 2048), (1, 8192), (8, 2048), (8, 8192)):
        shape = {"batch": batch, "context": pages * PAGE, "page": PAGE, "pages": pages}
        size = batch * HEADS * pages * DIM * 4
        for how in ("softmax_mean", "max"):
            yield Case(f"page_scores/{how}", shape, size, size, functools.partial(_page_inputs, batch, pages),
                       {"triton": functools.partial(_page_scores, how=how, backend="triton")},
                       functools.partial(_check_page_scores, how=how))
        yield _topk_case(batch, pages, BUDGET // PAGE, shape)
        yield _choice_case("choose_pages/softmax_mean", shape, size, functools.partial(_page_inputs, batch, pages),
                           ops.choose_pages, BUDGET // PAGE, page_size=PAGE)
    for batch, tokens in ((1, 32768), (1, 131072), (8, 32768)):
        shape = {"batch": batch, "context": tokens}
        for dims in (DIM // 4, DIM):
            size = batch * HEADS * tokens * dims * 2
            yield Case("token_scores/softmax_mean", shape | {"dims": dims}, size, size,
                       functools.partial(_token_inputs, batch, tokens, dims),
                       {"triton": functools.partial(_token_scores, backend="triton")},
                       lambda inputs, got: relative_error(got, _token_scores(inputs, "torch")))
        yield _topk_case(batch, tokens, BUDGET, shape)
        dims = DIM // 4
        yield _choice_case("choose_tokens/softmax_mean", shape | {"dims": dims}, batch * HEADS * tokens * dims * 2,
                           functools.partial(_token_inputs, batch, tokens, dims), ops.choose_tokens, BUDGET, dims=dims)
