"""The forward that `FastDecode(compile=…)` records: a model's own, compiled by Inductor, once per model and mode."""

import functools
import itertools
import types
import weakref
from collections.abc import Callable

import torch
from transformers import PreTrainedModel

TUNING = ("max_autotune", "coordinate_descent_tuning")
_TUNED = dict.fromkeys(TUNING, True)
# "freezing" here reaches Inductor alone: its passes for inference run, and weights stay arguments. Were Dynamo told, too, they
# would become constants, stored transposed: products of one row with those take twice the time (H200, torch 2.11).
_FROZEN = {**_TUNED, "freezing": True}
OPTIONS = {"default": {}, "max-autotune": _TUNED, "freeze": _FROZEN, "joined": _FROZEN}

# So that a second generate() compiles nothing.
_COMPILED: "weakref.WeakKeyDictionary[PreTrainedModel, dict[str, Callable]]" = weakref.WeakKeyDictionary()
_numbers = itertools.count()


def compiled_forward(model: PreTrainedModel, mode: str) -> Callable:
    """The model's forward, compiled in a mode of `OPTIONS`."""
    if mode == "joined":
        from .joined import join_weights

        join_weights(model)  # also where a weight was replaced since
    forwards = _COMPILED.setdefault(model, {})
    if mode not in forwards:
        forwards[mode] = _compile(model, mode)
    return forwards[mode]


def _forward(model: PreTrainedModel, **inputs):
    return model.forward(**inputs)


def _compile(model: PreTrainedModel, mode: str) -> Callable:
    how: dict = {"options": OPTIONS[mode]}
    if mode in ("freeze", "joined"):
        from . import joined, launches

        options = {**OPTIONS[mode], **(launches.available() if model.device.type == "cuda" else {})}
        how = {"backend": functools.partial(joined.compile_products, options=options, join=mode == "joined")}
    # Dynamo counts recompilations by code: each model and mode has its own.
    code = _forward.__code__.replace(co_name=f"forward_{next(_numbers)}")
    compiled = torch.compile(types.FunctionType(code, globals()), **how)
    owner = weakref.ref(model)  # an entry that held its own key would never go
    return lambda **inputs: compiled(owner(), **inputs)
