"""Every difference between the supported versions of Transformers (>= 5.6.2), in one place."""

import copy
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer
from transformers.distributed import DistributedConfig
from transformers.generation.utils import GENERATION_MODES_MAPPING
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING,
    causal_mask_function,
    create_causal_mask,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..errors import UnsupportedModelError
from ..ranks import ALONE, Ranks

__all__ = [
    "CACHE_ARGUMENT",
    "COMPILEABLE_CACHE_NEEDS_MASK",
    "CROP_IS_RELATIVE",
    "base_attention_function",
    "base_mask_function",
    "builds_every_mask",
    "caches_latents",
    "can_crop_linear",
    "can_crop_sliding",
    "check_layer_kinds",
    "drafted_tokens",
    "drops_caches",
    "generate_locals",
    "has_own_cache",
    "is_full_attention_layer",
    "is_linear_layer",
    "is_plain_causal",
    "is_reader",
    "is_sliding_layer",
    "kv_shape",
    "layer_template",
    "local_part",
    "only_stops_late",
    "plain_decoding",
    "processes_of",
    "ranks_of",
    "register_attention",
    "reset_layer",
    "routes_attention",
    "shared_sources",
    "tensor_parallel",
    "text_config",
]

# `past_key_values` became `cache` with 5.23/5.24; the mask functions take the same name as `generate()` and `forward`.
CACHE_ARGUMENT = "cache" if "cache" in inspect.signature(create_causal_mask).parameters else "past_key_values"

# Old versions build a mask of [N, N] for every prompt of a cache that can be compiled, which also costs the base attention its
# causal kernel; newer ones do so for one-token steps alone, and let models have a say.
COMPILEABLE_CACHE_NEEDS_MASK = "allow_is_causal_skip" not in inspect.signature(create_causal_mask).parameters

# `crop(max_length)` with a final size up to 5.13, `crop(tokens_to_remove)` with a negative count since 5.16.
CROP_IS_RELATIVE = "tokens_to_remove" in inspect.signature(DynamicLayer.crop).parameters


_FLAG = "_supports_attention_backend"


def text_config(config: PretrainedConfig) -> PretrainedConfig:
    """The decoder's own config: the config itself, or the text part of a composite one."""
    return config.get_text_config(decoder=True)


def layer_template(config: PretrainedConfig) -> list[CacheLayerMixin]:
    """Transformers' own choice of one cache layer per decoder layer. `config` is the decoder's.

    Layers that read other layers' keys and values have an empty layer since 5.18, and before come last and have none.
    """
    layers = DynamicCache(config=config).layers
    if not layers and getattr(config, "num_kv_shared_layers", None) == 0:
        # Old versions cut the list at minus this number, which for 0 leaves nothing.
        config = copy.copy(config)
        config.num_kv_shared_layers = -config.num_hidden_layers
        layers = DynamicCache(config=config).layers
    for index, kind in enumerate(getattr(config, "layer_types", None) or ()):
        if kind == "mlp" and index < len(layers):
            layers[index] = (
                LinearAttentionLayer()
            )  # stays empty; old versions give a layer without attention keys and values
    return layers


def shared_sources(config: PretrainedConfig) -> list[int]:
    """The layer whose keys and values each layer of the model reads, its own index where it has some.

    Gemma 3n and Gemma 4: each of the last `num_kv_shared_layers` reads the last layer before them that has its layer type.

    Raises:
        UnsupportedModelError: sharing of another kind.
    """
    layers, shared = config.num_hidden_layers, getattr(config, "num_kv_shared_layers", 0) or 0
    modes = getattr(config, "kv_sharing_modes", None)
    other = getattr(config, "kv_source_layers", None) not in (None, list(range(layers)))
    if other or getattr(config, "n_recurrent_loops", 1) > 1 or (modes is not None and modes.count("reuse") != shared):
        raise UnsupportedModelError(
            f"{config.model_type} shares keys and values between layers in a way this library does not know."
        )
    if shared >= layers:
        raise UnsupportedModelError(f"{config.model_type} has no keys and values of its own: all its layers read another model's.")
    if not shared:
        return list(range(layers))
    first, types = layers - shared, config.layer_types
    last = {kind: index for index, kind in enumerate(types[:first])}
    return [*range(first), *(last[kind] for kind in types[first:])]


def is_reader(module: nn.Module) -> bool:
    """Whether the model itself gives this attention module another layer's keys and values."""
    return bool(getattr(module, "is_kv_shared_layer", False))


def kv_shape(config: PretrainedConfig, layer: int | None = None) -> tuple[int, int]:
    """Key/value heads and their dimension in one layer (default: the first with full attention), 0 where the config is silent."""
    types = getattr(config, "layer_types", None) or []
    if layer is None:
        layer = types.index("full_attention") if "full_attention" in types else 0
    per_layer = getattr(config, "per_layer_config", None)
    heads = getattr(config, "num_attention_heads", 0) or 0
    of_layer = config if per_layer is None else per_layer[layer]
    kv_heads = getattr(of_layer, "num_key_value_heads", None) or heads
    head_dim = getattr(of_layer, "head_dim", None) or (config.hidden_size // heads if heads else 0)
    if per_layer is None and types[layer : layer + 1] == ["full_attention"]:
        # Gemma 4, before configs told layers apart.
        head_dim = getattr(config, "global_head_dim", None) or head_dim
        if getattr(config, "attention_k_eq_v", False):
            kv_heads = getattr(config, "num_global_key_value_heads", None) or kv_heads
    return kv_heads, head_dim


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


def is_linear_layer(layer) -> bool:
    """True for Transformers' layer of a recurrent or convolution state."""
    return isinstance(layer, LinearAttentionLayer)


def can_crop_linear(layer: LinearAttentionLayer) -> bool:
    """Whether a linear layer can still take tokens back: newer versions record what a convolution saw, if they are asked to."""
    return getattr(layer, "record_past", False) and getattr(layer, "is_croppable", False)


def is_plain_causal(mask_function: Callable) -> bool:
    """False when a model overlays its own pattern (bidirectional image blocks, prefix-LM) on the causal mask."""
    return mask_function is causal_mask_function


def routes_attention(model_class: type) -> bool:
    """Whether the attention of a model goes through `AttentionInterface`: its class says so, or says nothing and its file uses it
    (the hybrids with linear attention)."""
    said = next(
        (vars(base)[_FLAG] for base in model_class.__mro__ if _FLAG in vars(base) and base is not PreTrainedModel),
        None,
    )
    if said is not None:
        return bool(said)
    return hasattr(sys.modules[model_class.__module__], "ALL_ATTENTION_FUNCTIONS")


def builds_every_mask(config: PretrainedConfig) -> bool:
    """Whether `generate()` knows a mask for each kind of layer, and the model takes them. It builds them ahead for a cache that can
    be compiled; old versions know none for linear attention, and their LFM2 takes none."""
    known = LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING
    if config.model_type == "lfm2" and "linear_attention" not in known:
        return False
    return all(kind in known for kind in getattr(config, "layer_types", None) or ())


def caches_latents(config: PretrainedConfig, decoder_class: type | None) -> bool:
    """Whether a model with latent attention (MLA) gives the cache its latents, as newer versions do, instead of the keys and
    values of each head."""
    if getattr(config, "kv_lora_rank", None) is None or decoder_class is None:
        return False
    classes = (item for item in vars(sys.modules[decoder_class.__module__]).values() if isinstance(item, type))
    return any(hasattr(item, "expand_kv") for item in classes)


def drops_caches(model_class: type | None) -> bool:
    """Whether `generate()` takes the cache from the model, if it is true, when the text passes `original_max_position_embeddings`
    (the Phi-3 family, with every rotary type). What follows would run on a cache of Transformers' own, without a word."""
    prepare = inspect.unwrap(getattr(model_class, "prepare_inputs_for_generation", drops_caches))
    return "original_max_position_embeddings" in prepare.__code__.co_names + prepare.__code__.co_consts


def has_own_cache(decoder_class: type | None) -> bool:
    """Whether the model's file defines the cache that it works with: some of the first hybrids, fewer with every version."""
    if decoder_class is None:
        return False
    module = sys.modules[decoder_class.__module__]
    classes = (item for item in vars(module).values() if isinstance(item, type) and item.__module__ == module.__name__)
    names = [item.__name__ for item in classes if not issubclass(item, CacheLayerMixin)]
    return any(name.endswith("Cache") and not name.endswith("PaddingCache") for name in names)  # those pad convolutions of sound


def processes_of(model) -> Ranks:
    """The processes among which Transformers divided a model (`tp_plan=`, `tp_size=`); alone for a config."""
    size, mesh = getattr(model, "_tp_size", None) or 1, getattr(model, "_device_mesh", None)
    if size == 1 or mesh is None:
        return ALONE
    if "tp" in (mesh.mesh_dim_names or ()):
        mesh = mesh["tp"]
    return Ranks(mesh.get_local_rank(), size, mesh.get_group())


def ranks_of(model) -> Ranks:
    """Those of `processes_of` that share the heads of a model. Alone where each has all heads: the plan gathers what it projected
    (Phi-3; OLMo 2, whose norms look at all heads) or leaves the attention whole (LFM2, gpt-oss)."""
    processes = processes_of(model)
    return processes if processes.size > 1 and _divides_heads(model) else ALONE


def _divides_heads(model: PreTrainedModel) -> bool:
    """Whether the plan of a model lets the projections of its decoder's attention end divided. Other attention, as that of an
    image tower, has no layer index."""
    attention = re.compile(r"\b(self_)?(attn|attention)$")
    indexed = (name for name, module in model.named_modules() if hasattr(module, "layer_idx"))
    names = {re.sub(r"\b\d+\b", "*", name) for name in indexed if attention.search(name)}
    divided = ("colwise", "packed_colwise")
    return any(style in divided and name.rpartition(".")[0] in names for name, style in (model.tp_plan or {}).items())


def tensor_parallel() -> dict[str, Any]:
    """What `from_pretrained` takes to divide a model by its own plan among the processes of torchrun."""
    if "tp_plan" in inspect.signature(DistributedConfig).parameters:
        return {"distributed_config": DistributedConfig(tp_plan="auto")}
    return {"tp_plan": "auto"}


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a parameter: newer versions divide it as a DTensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


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
    for index, layer in enumerate(layers):
        plain = is_full_attention_layer(layer) or is_sliding_layer(layer)
        if not plain and isinstance(layer, CacheLayerMixin):
            raise UnsupportedModelError(
                f"{model_type}: layer {index} keeps a {type(layer).__name__}, which this library does not know how to replace; use "
                "Transformers' own cache."
            )
    if not any(isinstance(layer, CacheLayerMixin) for layer in layers):
        raise UnsupportedModelError(f"{model_type} has no attention layers with keys and values to keep.")


def _callers() -> Iterator[FrameType]:
    """The frames of the running call, innermost first."""
    frame = inspect.currentframe()
    while frame is not None:
        yield frame
        frame = frame.f_back


def generate_locals() -> dict:
    """Arguments of the running `generate()` that it does not pass on to a `custom_generate` callable.

    `streamer`, `assistant_model` and the tokenizers are named parameters of `generate()`, which drops them for callables;
    the only place that still has them is its frame.
    """
    for frame in _callers():
        if frame.f_code.co_name == "generate" and "generation_mode" in frame.f_locals:
            names = ("streamer", "assistant_model", "assistant_tokenizer", "tokenizer")
            found = {name: frame.f_locals.get(name) for name in names}
            kwargs = frame.f_locals.get("kwargs") or {}
            return {name: value if value is not None else kwargs.get(name) for name, value in found.items()}
    return {}


def drafted_tokens(cache) -> int | None:
    """How many of the newest tokens of the running forward are drafts, which `generate()` may take back from `cache`; None where
    it is not assisted.

    Only the frame of its loop tells: the first forward holds the prompt and the first drafts. An assistant's own cache does not
    find itself there.
    """
    for frame in _callers():
        if frame.f_code.co_name == "_assisted_decoding":
            names = frame.f_locals
            if (names.get("model_kwargs") or {}).get(CACHE_ARGUMENT) is cache:
                return int(names.get("candidate_length", 0))
    return None


def only_stops_late() -> bool:
    """Whether the past is recorded for nothing but a stop check that runs one step late, as on "mps" since 5.17: the newest token
    may be taken back, and there are no drafts."""
    return any(type(frame.f_locals.get("self")).__name__ == "DeferredStopCheck" for frame in _callers())


def plain_decoding(model, generation_config, assistant_model) -> Callable:
    """Transformers' own loop for the mode that `generation_config` asks for, as an unbound method."""
    mode = generation_config.get_generation_mode(assistant_model)
    return getattr(type(model), GENERATION_MODES_MAPPING[mode])
