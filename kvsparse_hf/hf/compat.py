"""Every difference between the supported versions of Transformers (>= 5.6.2), in one place."""

import inspect
import sys
from collections.abc import Callable

from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PretrainedConfig
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer
from transformers.generation.utils import GENERATION_MODES_MAPPING
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function, create_causal_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..errors import UnsupportedModelError

__all__ = [
    "CACHE_ARGUMENT",
    "COMPILEABLE_CACHE_NEEDS_MASK",
    "CROP_IS_RELATIVE",
    "base_attention_function",
    "base_mask_function",
    "can_crop_sliding",
    "check_layer_kinds",
    "generate_locals",
    "is_full_attention_layer",
    "is_plain_causal",
    "is_sliding_layer",
    "layer_template",
    "plain_decoding",
    "register_attention",
    "reset_layer",
    "text_config",
]

# `past_key_values` became `cache` with 5.23/5.24; the mask functions take the same name as `generate()` and `forward`.
CACHE_ARGUMENT = "cache" if "cache" in inspect.signature(create_causal_mask).parameters else "past_key_values"

# Old versions build a mask of [N, N] for every prompt of a cache that can be compiled, which also costs the base attention its
# causal kernel; newer ones do so for one-token steps alone, and let models have a say.
COMPILEABLE_CACHE_NEEDS_MASK = "allow_is_causal_skip" not in inspect.signature(create_causal_mask).parameters

# `crop(max_length)` with a final size up to 5.13, `crop(tokens_to_remove)` with a negative count since 5.16.
CROP_IS_RELATIVE = "tokens_to_remove" in inspect.signature(DynamicLayer.crop).parameters


def text_config(config: PretrainedConfig) -> PretrainedConfig:
    """The decoder's own config: the config itself, or the text part of a composite one."""
    return config.get_text_config(decoder=True)


def layer_template(config: PretrainedConfig) -> list[CacheLayerMixin]:
    """Transformers' own choice of one cache layer per decoder layer. `config` is the decoder's."""
    return DynamicCache(config=config).layers


def is_full_attention_layer(layer: CacheLayerMixin) -> bool:
    """True for the layers we replace: exactly plain full attention, no subclass with further state."""
    return type(layer) is DynamicLayer


def is_sliding_layer(layer: CacheLayerMixin) -> bool:
    """True for Transformers' plain sliding-window (or chunked-attention) layer."""
    return type(layer) is DynamicSlidingWindowLayer


def reset_layer(layer: CacheLayerMixin) -> None:
    """Empties a cache layer of Transformers' own. Before 5.18 its sliding-window layer only zeroed its tensors."""
    layer.reset()
    if is_sliding_layer(layer) and layer.is_initialized:
        layer.keys = layer.values = None
        layer.is_initialized = False
        layer.cumulative_length = 0


def can_crop_sliding(layer: DynamicSlidingWindowLayer) -> bool:
    """Whether Transformers' sliding-window layer can still take tokens back."""
    return layer.get_seq_length() < layer.sliding_window or getattr(layer, "record_past", False)


def is_plain_causal(mask_function: Callable) -> bool:
    """False when a model overlays its own pattern (bidirectional image blocks, prefix-LM) on the causal mask."""
    return mask_function is causal_mask_function


def register_attention(name: str, attention: Callable, mask: Callable) -> None:
    """Adds an attention and a mask function under one name. Existing names are left as they are."""
    if name not in ALL_ATTENTION_FUNCTIONS:
        AttentionInterface.register(name, attention)
    if name not in ALL_MASK_ATTENTION_FUNCTIONS:
        AttentionMaskInterface.register(name, mask)


def base_mask_function(base: str) -> Callable:
    """The mask function that Transformers itself uses for the attention implementation `base`."""
    return ALL_MASK_ATTENTION_FUNCTIONS[base]


def base_attention_function(base: str, module: nn.Module) -> Callable:
    """The attention function that `module` would have called had its attention stayed `base`."""
    if base != "eager":
        return ALL_ATTENTION_FUNCTIONS[base]
    # The eager function is a global of the file that defines the module's forward.
    forward = inspect.unwrap(type(module).forward)
    eager = forward.__globals__.get("eager_attention_forward")
    if eager is None:
        eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if eager is None:
        raise UnsupportedModelError(
            f"{type(module).__name__} has no eager attention function; load the model with attn_implementation='sdpa'."
        )
    return eager


def check_layer_kinds(layers: list[CacheLayerMixin], model_type: str) -> None:
    """Refuses cache layers that mix full attention with further state, which a replacement would lose.

    Plain full attention becomes ours; sliding-window, pure linear-attention and empty layers stay Transformers' own.
    """
    if not any(is_full_attention_layer(layer) or is_sliding_layer(layer) for layer in layers):
        raise UnsupportedModelError(f"{model_type} has no attention layers with keys and values to keep.")
    for index, layer in enumerate(layers):
        plain = is_full_attention_layer(layer) or is_sliding_layer(layer)
        if not plain and isinstance(layer, CacheLayerMixin):
            raise UnsupportedModelError(
                f"{model_type}: layer {index} keeps a {type(layer).__name__}, which this library does not know how to replace."
            )


def generate_locals() -> dict:
    """Arguments of the running `generate()` that it does not pass on to a `custom_generate` callable.

    `streamer`, `assistant_model` and the tokenizers are named parameters of `generate()`, which drops them for callables;
    the only place that still has them is its frame.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "generate" and "generation_mode" in frame.f_locals:
            names = ("streamer", "assistant_model", "assistant_tokenizer", "tokenizer")
            found = {name: frame.f_locals.get(name) for name in names}
            kwargs = frame.f_locals.get("kwargs") or {}
            return {name: value if value is not None else kwargs.get(name) for name, value in found.items()}
        frame = frame.f_back
    return {}


def plain_decoding(model, generation_config, assistant_model) -> Callable:
    """Transformers' own loop for the mode that `generation_config` asks for, as an unbound method."""
    mode = generation_config.get_generation_mode(assistant_model)
    return getattr(type(model), GENERATION_MODES_MAPPING[mode])
