"""The attention and mask functions `kvsparse`, registered with Transformers' own interfaces.

The name in the config carries the base attention it stands on: `kvsparse` (sdpa), `kvsparse_eager`,
`kvsparse_flash_attention_2`, … So the base survives a deepcopy or a change of thread, and `detach` needs no registry.
Whenever the cache is not ours (or there is none), both functions pass everything through to the base untouched.
"""

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.masking_utils import causal_mask_function

from ..errors import UnsupportedModelError, UnsupportedOperationError
from . import compat, handoff
from .sharing import check_declared

NAME = "kvsparse"
WINDOWED = torch.int16  # the type of a mask that our layers cannot follow; that of theirs is int32
BASES = ("sdpa", "eager", "flash_attention_2", "flash_attention_3", "flash_attention_4")


def is_attached(config: PretrainedConfig) -> bool:
    """Whether the model of this (decoder) config calls our attention function."""
    return (config._attn_implementation or "").startswith(NAME)


def base_of(config: PretrainedConfig) -> str:
    """The attention implementation below ours, or the plain one where ours is not attached."""
    name = config._attn_implementation or "sdpa"
    if not name.startswith(NAME):
        return name
    return name.removeprefix(NAME).removeprefix("_") or "sdpa"


def check_base(config: PretrainedConfig) -> None:
    """Refuses a base attention we do not know how to stand on."""
    base = base_of(config)
    if base not in BASES:
        hint = "load the model with attn_implementation='sdpa'"
        raise UnsupportedModelError(
            f"attention {base!r} is not supported as a base (known: {', '.join(BASES)}); {hint}."
        )


def attach(config: PretrainedConfig) -> None:
    """Switches the attention of the model of this (decoder) config to ours, on top of what it uses now."""
    base = base_of(config)
    name = NAME if base == "sdpa" else f"{NAME}_{base}"
    compat.register_attention(name, kvsparse_attention_forward, kvsparse_mask)
    if config._attn_implementation != name:
        config._attn_implementation = name


def detach(model: PreTrainedModel | PretrainedConfig) -> None:
    """Gives a model its own attention back. Caches of ours made for it then refuse to run.

    Args:
        model: the model (or its config) that a cache was constructed on. Does nothing if none was.
    """
    config = compat.text_config(getattr(model, "config", model))
    if is_attached(config):
        config._attn_implementation = base_of(config)


class _BaseConfigView:
    """A config as the base attention must see it: Transformers' flash functions read the kernel from its name."""

    def __init__(self, config: PretrainedConfig, base: str):
        self._config = config
        self._attn_implementation = base

    def __getattr__(self, name: str):
        return getattr(self._config, name)


class _BaseModuleView:
    """An attention module with `_BaseConfigView` in place of its config."""

    def __init__(self, module: nn.Module, base: str):
        self._module = module
        self.config = _BaseConfigView(module.config, base)

    def __getattr__(self, name: str):
        return getattr(self._module, name)


def base_attention(module: nn.Module, *args, **kwargs) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The attention the model would have run without us, bit for bit."""
    base = base_of(module.config)
    function = compat.base_attention_function(base, module)
    if base.startswith("flash"):
        module = _BaseModuleView(module, base)
    return function(module, *args, **kwargs)


def kvsparse_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *args,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention through the cache layer whose `update()` ran just before; the base attention otherwise.

    Args:
        module: the attention module.
        query: `[B, Hq, T, D]`.
        key, value: `[B, Hkv, T, D]`, the *new* tokens when the layer is ours, whatever `update()` returned otherwise.
        attention_mask: what `kvsparse_mask` returned for this forward.

    Returns:
        `([B, T, Hq, Dv], weights or None)`. Weights exist only where the base attention gives them (eager prefill).
    """
    if torch.compiler.is_compiling():
        waiting = handoff.pending_attention() or handoff.pending_reader(getattr(module, "layer_idx", None))
        if waiting is not None and not waiting.is_plain_step(query.shape[2]):
            return _attend_outside(module, query, key, value, attention_mask, *args, **kwargs)
    return _attend(module, query, key, value, attention_mask, *args, **kwargs)


def _attend(module, query, key, value, attention_mask, *args, **kwargs):
    layer_idx = getattr(module, "layer_idx", None)
    layer = handoff.take_attention(key, value) or handoff.take_reader(layer_idx, key)
    if layer is None:
        handoff.check_unserved(layer_idx, key)
        check_declared(module)
        if attention_mask is None and compat.is_reader(module) and base_of(module.config) == "sdpa":
            attention_mask = _mask_of_sliced_queries(module, query, key)
        return base_attention(module, query, key, value, attention_mask, *args, **kwargs)
    if layer_idx not in (None, layer.layer_idx):
        raise UnsupportedOperationError(
            f"attention of layer {layer_idx} follows the cache update of layer {layer.layer_idx}: this model shares keys "
            "and values between layers in a way this library does not know."
        )
    return layer.attend(module, query, key, value, attention_mask, *args, **kwargs)


@torch.compiler.disable
def _attend_outside(module, query, key, value, attention_mask, *args, **kwargs):
    """`_attend` in plain Python: a prompt or a turn inside a model that its user compiled."""
    return _attend(module, query, key, value, attention_mask, *args, **kwargs)


def kvsparse_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    *args,
    **kwargs,
) -> torch.Tensor | None:
    """The mask of one forward.

    For a cache that is not ours, and for our own first forward, this is the base attention's mask, bit for bit. Later
    forwards of ours need nothing but the padding, which the cache knows: they get a fixed `[B, 1, 1, 1]` tensor (its
    four dimensions make Transformers pass it on untouched), never a mask that grows with the sequence.
    """
    layer = handoff.take_mask(kv_length)
    config = kwargs.get("config")
    if layer is not None:
        # Some models make the mask of sliding windows whether or not a layer slides. It says so if one of ours gets it.
        mask_function = causal_mask_function if kwargs.get("local_size") is not None else kwargs.get("mask_function")
        mask = layer.prepare_mask(config, batch_size, q_length, mask_function, kwargs.get("attention_mask"))
        if mask is not None and kwargs.get("local_size") is not None:
            return mask.to(WINDOWED)
        if mask is not None:
            return mask
        kv_length, q_offset, kv_offset = q_length, 0, 0  # a first forward, also where the cache starts over
        if compat.COMPILEABLE_CACHE_NEEDS_MASK and compat.is_plain_causal(kwargs.get("mask_function")):
            kwargs["allow_is_causal_skip"] = True
    base = base_of(config) if config is not None else "sdpa"
    return compat.base_mask_function(base)(batch_size, q_length, kv_length, q_offset, kv_offset, *args, **kwargs)


def first_mask(config: PretrainedConfig, query: torch.Tensor) -> torch.Tensor | None:
    """The base attention's mask of an unpadded first forward with these queries `[B, Hq, T, D]`."""
    batch, _, tokens, _ = query.shape
    options = dict(mask_function=causal_mask_function, attention_mask=None, dtype=query.dtype, device=query.device)
    return compat.base_mask_function(base_of(config))(batch, tokens, tokens, 0, 0, config=config, **options)


def newest_mask(config: PretrainedConfig, query: torch.Tensor, length: int) -> torch.Tensor | None:
    """The base attention's mask of the newest queries `[B, Hq, T, D]` of an unpadded first forward of `length` tokens."""
    batch, _, tokens, _ = query.shape
    options = dict(mask_function=causal_mask_function, attention_mask=None, dtype=query.dtype, device=query.device)
    options["allow_is_causal_skip"] = False
    return compat.base_mask_function(base_of(config))(
        batch, tokens, length, length - tokens, 0, config=config, **options
    )


def _mask_of_sliced_queries(module, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor | None:
    """Gemma 4 computes its last layers for the newest tokens alone, except where "sdpa" would take a missing mask for a square
    one. It does not see that we stand on sdpa."""
    tokens, length = query.shape[2], key.shape[2]
    return newest_mask(module.config, query, length) if 1 < tokens < length else None
