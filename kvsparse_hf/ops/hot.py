"""The ops on two levels of memory: their launchers, registered as torch ops, and the choice of backend."""

import torch
from torch import Tensor

from . import reference
from .backend import resolve, through_dispatcher
from .custom import _register, on_device_of


def _launch_append(
    hot: Tensor,
    host: Tensor | None,
    page_table: Tensor,
    slot_page: Tensor,
    stamp: Tensor,
    tick: Tensor,
    length: Tensor,
    visible: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    capacity: int,
    pinned: int,
    summary: Tensor | None,
) -> None:
    from .kernels.hot import hot_append as launch

    with on_device_of(hot):
        launch(hot, host, page_table, slot_page, stamp, tick, length, visible, k_new, v_new, capacity, pinned, summary)


def _launch_plan(
    pages: Tensor, page_table: Tensor, slot_page: Tensor, stamp: Tensor, tick: Tensor, counters: Tensor, pinned: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from .kernels.hot import hot_plan as launch

    with on_device_of(pages):
        return launch(pages, page_table, slot_page, stamp, tick, counters, pinned)


def _launch_fetch(host: Tensor, hot: Tensor, miss_page: Tensor, miss_slot: Tensor, miss_count: Tensor) -> None:
    from .kernels.hot import hot_fetch as launch

    with on_device_of(hot):
        launch(host, hot, miss_page, miss_slot, miss_count)


_register(
    "hot_append",
    _launch_append,
    ("hot", "host", "page_table", "slot_page", "stamp", "length", "visible", "summary"),
)
_register("hot_fetch", _launch_fetch, ("hot",))
_plan = _register("hot_plan", _launch_plan, ("page_table", "slot_page", "stamp", "tick", "counters"))


@_plan.register_fake
def _(pages, *_args):
    lists = [pages.new_empty(pages.shape) for _ in range(3)]
    return (*lists, pages.new_empty(pages.shape[:2]))


def hot_append(
    hot: Tensor,
    host: Tensor | None,
    page_table: Tensor,
    slot_page: Tensor,
    stamp: Tensor,
    tick: Tensor,
    length: Tensor,
    visible: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    capacity: int,
    pinned: int = 0,
    summary: Tensor | None = None,
    *,
    backend: str = "auto",
) -> None:
    tables = (page_table, slot_page, stamp, tick, length, visible)
    args = (hot, host, *tables, k_new, v_new, capacity, pinned, summary)
    if resolve("hot_append", backend, hot, k_new, v_new, dims=(hot.shape[-1],)) == "torch":
        reference.hot_append(*args)
    elif through_dispatcher(k_new, v_new):
        torch.ops.kvsparse.hot_append(*args)
    else:
        _launch_append(*args)


def hot_plan(
    pages: Tensor,
    page_table: Tensor,
    slot_page: Tensor,
    stamp: Tensor,
    tick: Tensor,
    counters: Tensor,
    pinned: int = 0,
    *,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    args = (pages, page_table, slot_page, stamp, tick, counters, pinned)
    if resolve("hot_plan", backend, pages) == "torch":
        return reference.hot_plan(*args)
    if through_dispatcher():
        return torch.ops.kvsparse.hot_plan(*args)
    return _launch_plan(*args)


def hot_fetch(
    host: Tensor, hot: Tensor, miss_page: Tensor, miss_slot: Tensor, miss_count: Tensor, *, backend: str = "auto"
) -> None:
    args = (host, hot, miss_page, miss_slot, miss_count)
    if resolve("hot_fetch", backend, hot) == "torch":
        reference.hot_fetch(*args)
    elif through_dispatcher():
        torch.ops.kvsparse.hot_fetch(*args)
    else:
        _launch_fetch(*args)


for _op in (hot_append, hot_plan, hot_fetch):
    _op.__doc__ = (getattr(reference, _op.__name__).__doc__ or "").rstrip() + (
        '\n\n    ``backend``: "auto", "triton", "torch"; see :func:`kvsparse_hf.ops.backend.resolve`.\n    '
    )
