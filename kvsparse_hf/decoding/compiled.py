"""The forward that `FastDecode(compile=…)` records: a model's own, compiled by Inductor, once per model and mode."""

import itertools
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch._inductor import config as inductor
from transformers import PreTrainedModel

_TUNED = {"max_autotune": True, "coordinate_descent_tuning": True}
OPTIONS = {"default": {}, "max-autotune": _TUNED, "freeze": {**_TUNED, "freezing": True}}


@dataclass(frozen=True)
class _Compiled:
    """A compiled forward, and the weights that are constants in it (None where none are)."""

    forward: Callable
    weights: tuple | None


# So that a second generate() compiles nothing.
_COMPILED: "weakref.WeakKeyDictionary[PreTrainedModel, dict[str, _Compiled]]" = weakref.WeakKeyDictionary()
_numbers = itertools.count()


def compiled_forward(model: PreTrainedModel, mode: str) -> Callable:
    """The model's forward, compiled in a mode of `OPTIONS`; anew where constants are no longer the model's weights."""
    forwards = _COMPILED.setdefault(model, {})
    weights = _marks(model) if mode == "freeze" else None
    known = forwards.get(mode)
    if known is None or known.weights != weights:
        known = forwards[mode] = _Compiled(_compile(model, mode), weights)
    return known.forward


def _forward(model: PreTrainedModel, **inputs):
    return model.forward(**inputs)


def _compile(model: PreTrainedModel, mode: str) -> Callable:
    # Dynamo keeps what it compiled with the code: new code, so that weights that were constants before are not found again.
    code = _forward.__code__.replace(co_name=f"forward_{next(_numbers)}")
    compiled = torch.compile(types.FunctionType(code, globals()), options=OPTIONS[mode])
    owner = weakref.ref(model)  # an entry that held its own key would never go

    def forward(**inputs):
        # Dynamo looks at this setting, not at `options`: without it weights are arguments of the graph, and nothing is joined.
        with inductor.patch(freezing=mode == "freeze"):
            return compiled(owner(), **inputs)

    return forward


def _marks(model: PreTrainedModel) -> tuple:
    """Changes with every weight that is replaced or written to."""
    tensors = itertools.chain(model.parameters(), model.buffers())
    return tuple((tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version) for tensor in tensors)
