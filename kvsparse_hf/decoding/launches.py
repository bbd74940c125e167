"""Fewer and earlier launches of the kernels that Inductor writes, where that is safe.

With programmatic dependent launch a kernel is placed while its predecessor still runs, and waits, before it reads what that one
wrote, for all of it to end. That orders it after every earlier kernel only because its predecessor waited likewise. Inductor
writes no wait into a kernel that reads nothing (one that fills a buffer): the kernel behind it could then read what the one
before it has not written yet (torch 2.11 and 2.13). So the source is looked at, and a graph with such a kernel is compiled again
without.
"""

import re
from collections.abc import Callable
from pathlib import Path

import torch
import torch._inductor
from torch._inductor.codecache import PyCodeCache

EARLY = "triton.enable_pdl"
_OPTIONS = {EARLY: True, "combo_kernels": True}  # and kernels that depend on nothing of each other become one
PLACED_EARLY = "'launch_pdl': True"
_BRANCH = re.compile(r"^\s+(?:el)?if pid\b.*:$", re.MULTILINE)  # of a kernel of several


def available() -> dict[str, bool]:
    """The options of this torch: an older one has not all of them."""
    known = torch._inductor.list_options()
    return {name: value for name, value in _OPTIONS.items() if name in known}


def compile_ordered(build: Callable[[], tuple[torch.fx.GraphModule, list]], options: dict) -> Callable:
    """Inductor on the graph, and the example inputs, that `build` makes afresh; without early launches where not every kernel
    waits."""
    if not options.get(EARLY):
        return torch._inductor.compile(*build(), options=options)
    before = written()
    compiled = torch._inductor.compile(*build(), options=options)
    new = written() - before or written()  # none is new where the same graph was compiled before
    if all(path.exists() and every_kernel_waits(path.read_text()) for path in new):
        return compiled
    return torch._inductor.compile(*build(), options={**options, EARLY: False})


def written() -> set[Path]:
    """The modules that Inductor has written, or read from its cache, and loaded in this process."""
    return {Path(module.__file__) for module in PyCodeCache.modules if getattr(module, "__file__", None)}


def every_kernel_waits(source: str) -> bool:
    """Whether all kernels of a module, and all branches of those that are several in one, wait where they are placed early."""
    kernels = source.split("async_compile.triton(")[1:]
    return all(_waits(kernel.split("''', ")[0]) for kernel in kernels if PLACED_EARLY in kernel)


def _waits(kernel: str) -> bool:
    parts = _BRANCH.split(kernel)
    return all("gdc_wait()" in part for part in (parts[1:] or parts))
