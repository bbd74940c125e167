"""Giving every `generate()` of a model a cache of its own: pipelines, evaluation harnesses, chat loops."""

from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

from transformers import PreTrainedModel

from .errors import KVSparseError
from .hf import compat
from .hf.attention import base_of, detach, is_attached
from .hf.binding import unwrap
from .presets import load_preset

_HOOK = "_prepare_cache_for_generation"


def enable(model: PreTrainedModel, preset: str | Path | Callable) -> None:
    """From now on every `generate()` of `model` that is given no cache gets a fresh one.

    Args:
        model: the model (a PEFT wrapper is fine).
        preset: a preset's name, a YAML file, or a function from the model to a new cache.
    """
    model = unwrap(model)
    factory = preset if callable(preset) else lambda target: load_preset(preset, target)
    factory(model)  # refuses a bad preset or model now, not in the middle of an evaluation
    original = getattr(type(model), _HOOK, None)
    if original is None:
        raise KVSparseError(f"{type(model).__name__} has no {_HOOK}; pass the cache to generate() yourself.")

    def prepare(generation_config, model_kwargs, *args, **kwargs):
        wants_cache = generation_config.use_cache is not False and generation_config.cache_implementation is None
        if wants_cache and model_kwargs.get(compat.CACHE_ARGUMENT) is None:
            model_kwargs[compat.CACHE_ARGUMENT] = factory(model)
            return None
        return original(model, generation_config, model_kwargs, *args, **kwargs)

    model.__dict__[_HOOK] = prepare


def disable(model: PreTrainedModel) -> None:
    """Undoes `enable`, and gives the model its own attention back."""
    model = unwrap(model)
    model.__dict__.pop(_HOOK, None)
    detach(model)


@contextmanager
def use(model: PreTrainedModel, preset: str | Path | Callable):
    """`enable` for a `with` block; afterwards the model is as it was before.

    Example:
        >>> with kvsparse_hf.use(model, "snapkv-1024"):
        ...     pipe("A long prompt …")
    """
    inner = unwrap(model)
    before = inner.__dict__.get(_HOOK)
    config = compat.text_config(inner.config)
    was_attached, base = is_attached(config), base_of(config)
    try:
        enable(model, preset)
        yield model
    finally:
        if before is None:
            inner.__dict__.pop(_HOOK, None)
        else:
            inner.__dict__[_HOOK] = before
        if not was_attached:
            config._attn_implementation = base
