"""The ops that choose what a step reads: their launchers, registered as torch ops, and the choice of backend."""

import torch
from torch import Tensor

from . import reference
from .backend import resolve, through_dispatcher
from .custom import _register, on_device_of


def _launch_page_scores(
    q: Tensor,
    summary: Tensor,
    length: Tensor,
    page_size: int,
    scale: float,
    group_reduce: str = "softmax_mean",
    sink_pages: int = 0,
    recent_pages: int = 0,
) -> Tensor:
    from .kernels.pages import page_scores as launch

    with on_device_of(q):
        return launch(q, summary, length, page_size=page_size, scale=scale, group_reduce=group_reduce,
                      sink_pages=sink_pages, recent_pages=recent_pages)


def _launch_token_scores(
    q: Tensor,
    keys: Tensor,
    length: Tensor,
    dims: int,
    scale: float,
    softcap: float = 0.0,
    group_reduce: str = "softmax_mean",
    sinks: int = 0,
    recent: int = 0,
) -> Tensor:
    from .kernels.tokens import token_scores as launch

    with on_device_of(q):
        return launch(q, keys, length, dims=dims, scale=scale, softcap=softcap, group_reduce=group_reduce,
                      sinks=sinks, recent=recent)


def _launch_topk_pages(scores: Tensor, k: int) -> Tensor:
    from .kernels.topk import topk_pages as launch

    with on_device_of(scores):
        return launch(scores, k)


def _launch_choose_pages(
    q: Tensor,
    summary: Tensor,
    length: Tensor,
    k: int,
    page_size: int,
    scale: float,
    group_reduce: str = "softmax_mean",
    sink_pages: int = 0,
    recent_pages: int = 0,
) -> Tensor:
    from .kernels.pages import choose_pages as launch

    with on_device_of(q):
        return launch(q, summary, length, k, page_size=page_size, scale=scale, group_reduce=group_reduce,
                      sink_pages=sink_pages, recent_pages=recent_pages)


def _launch_choose_tokens(
    q: Tensor,
    keys: Tensor,
    length: Tensor,
    k: int,
    dims: int,
    scale: float,
    softcap: float = 0.0,
    group_reduce: str = "softmax_mean",
    sinks: int = 0,
    recent: int = 0,
) -> Tensor:
    from .kernels.tokens import choose_tokens as launch

    with on_device_of(q):
        return launch(q, keys, length, k, dims=dims, scale=scale, softcap=softcap, group_reduce=group_reduce,
                      sinks=sinks, recent=recent)


_page_scores = _register("page_scores", _launch_page_scores)
_token_scores = _register("token_scores", _launch_token_scores)
_topk_pages = _register("topk_pages", _launch_topk_pages)
_choose_pages = _register("choose_pages", _launch_choose_pages)
_choose_tokens = _register("choose_tokens", _launch_choose_tokens)


@_page_scores.register_fake
@_token_scores.register_fake
def _(q, scored, *_args):
    return scored.new_empty(scored.shape[:3], dtype=torch.float32)


@_topk_pages.register_fake
def _(scores, k):
    return scores.new_empty((*scores.shape[:2], k), dtype=torch.int32)


@_choose_pages.register_fake
@_choose_tokens.register_fake
def _(q, scored, length, k, *_args):
    return scored.new_empty((*scored.shape[:2], k), dtype=torch.int32)


def page_scores(
    q: Tensor,
    summary: Tensor,
    length: Tensor,
    *,
    page_size: int,
    scale: float,
    group_reduce: str = "softmax_mean",
    sink_pages: int = 0,
    recent_pages: int = 0,
    backend: str = "auto",
) -> Tensor:
    args = (q, summary, length, page_size, scale, group_reduce, sink_pages, recent_pages)
    if resolve("page_scores", backend, q, summary, dims=(summary.shape[-1],)) == "torch":
        return reference.page_scores(*args)
    if through_dispatcher(q, summary):
        return torch.ops.kvsparse.page_scores(*args)
    return _launch_page_scores(*args)


def token_scores(
    q: Tensor,
    keys: Tensor,
    length: Tensor,
    *,
    dims: int,
    scale: float,
    softcap: float = 0.0,
    group_reduce: str = "softmax_mean",
    sinks: int = 0,
    recent: int = 0,
    backend: str = "auto",
) -> Tensor:
    args = (q, keys, length, dims, scale, softcap, group_reduce, sinks, recent)
    if resolve("token_scores", backend, q, keys, dims=(dims,)) == "torch":
        return reference.token_scores(*args)
    if through_dispatcher(q, keys):
        return torch.ops.kvsparse.token_scores(*args)
    return _launch_token_scores(*args)


def topk_pages(scores: Tensor, k: int, *, backend: str = "auto") -> Tensor:
    if resolve("topk_pages", backend, scores) == "torch":
        return reference.topk_pages(scores, k)
    if through_dispatcher(scores):
        return torch.ops.kvsparse.topk_pages(scores, k)
    return _launch_topk_pages(scores, k)


def choose_pages(
    q: Tensor,
    summary: Tensor,
    length: Tensor,
    k: int,
    *,
    page_size: int,
    scale: float,
    group_reduce: str = "softmax_mean",
    sink_pages: int = 0,
    recent_pages: int = 0,
    backend: str = "auto",
) -> Tensor:
    args = (q, summary, length, k, page_size, scale, group_reduce, sink_pages, recent_pages)
    if resolve("choose_pages", backend, q, summary, dims=(summary.shape[-1],)) == "torch":
        return reference.choose_pages(*args)
    if through_dispatcher(q, summary):
        return torch.ops.kvsparse.choose_pages(*args)
    return _launch_choose_pages(*args)


def choose_tokens(
    q: Tensor,
    keys: Tensor,
    length: Tensor,
    k: int,
    *,
    dims: int,
    scale: float,
    softcap: float = 0.0,
    group_reduce: str = "softmax_mean",
    sinks: int = 0,
    recent: int = 0,
    backend: str = "auto",
) -> Tensor:
    args = (q, keys, length, k, dims, scale, softcap, group_reduce, sinks, recent)
    if resolve("choose_tokens", backend, q, keys, dims=(dims,)) == "torch":
        return reference.choose_tokens(*args)
    if through_dispatcher(q, keys):
        return torch.ops.kvsparse.choose_tokens(*args)
    return _launch_choose_tokens(*args)


for _op in (page_scores, token_scores, topk_pages, choose_pages, choose_tokens):
    _op.__doc__ = (getattr(reference, _op.__name__).__doc__ or "").rstrip() + (
        '\n\n    ``backend``: "auto", "triton", "torch"; see :func:`kvsparse_hf.ops.backend.resolve`.\n    '
    )
