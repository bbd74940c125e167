"""What a cache must know of its model, read once at construction and checked again at each forward."""

from dataclasses import dataclass

from transformers import AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM, PretrainedConfig, PreTrainedModel

from ..errors import UnsupportedModelError, UnsupportedOperationError
from ..ranks import ALONE, Ranks, several_processes
from . import compat
from .attention import attach, base_of, check_base, is_attached

_WHY_ENCODER = "an encoder-decoder keeps a second, cross-attention cache that this library does not serve"

# Attention that goes through the interface, and does something beside it that no cache of ours would see. By model type.
_OTHER_ATTENTION = {
    "diffllama": "attends twice to the same keys, with other values each time",
    "doge": "masks tokens by what their values say",
    "glm_moe_dsa": "reads the tokens that an indexer selects",
    "hrm_text": "runs its layers several times over",
    "inkling2_loop_text": "adds a bias of its own to the logits",
    "inkling2_text": "adds a bias of its own to the logits",
    "jetmoe": "repeats its keys after the cache has seen them",
    "minimax_m3_vl_text": "reads the blocks that an indexer selects",
}


@dataclass(eq=False)
class Binding:
    """The model a cache belongs to: its decoder config and the shape facts that identify it.

    Attributes:
        config: the decoder's config, shared with the model (attention is switched through it).
        model_class: the class of the whole model, where it is known.
        of_config: made from a config alone, which does not tell whether the model is divided among processes.
        decoder_class: a class from the file that holds the decoder's attention; of a composite model, its text model.
        layers: decoder layers.
        query_heads, kv_heads, head_dim: attention shape of the full-attention layers, as the config states it (0 where it does
            not), counted over all ranks.
        ranks: who shares the heads with this process (tensor parallelism).
        processes: who shares the model: the same, or more, each of which then has all heads and decides alike.
    """

    config: PretrainedConfig
    model_class: type | None
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    ranks: Ranks = ALONE
    processes: Ranks = ALONE
    decoder_class: type | None = None
    of_config: bool = False

    def __deepcopy__(self, memo: dict) -> "Binding":
        # A forked cache still belongs to the same model; copying weights or config would break that.
        return self

    @classmethod
    def of(cls, model: PreTrainedModel | PretrainedConfig) -> "Binding":
        """Reads a model (or its config) and refuses what cannot work. Changes nothing yet."""
        model = unwrap(model)
        whole = getattr(model, "config", model)
        if not isinstance(whole, PretrainedConfig):
            raise UnsupportedModelError(f"expected a Transformers model or its config, got {type(model).__name__}.")
        if getattr(whole, "is_encoder_decoder", False):
            raise UnsupportedModelError(f"{whole.model_type}: {_WHY_ENCODER}.")
        config = compat.text_config(whole)
        model_class = type(model) if isinstance(model, PreTrainedModel) else _class_of(whole)
        decoder_class = model_class if config is whole else _class_of(config) or model_class
        _check_decoder(config, model_class, model if isinstance(model, PreTrainedModel) else None)
        _check_attention(config, model_class, decoder_class)
        _check_softcap(config)
        check_base(config)
        query_heads = getattr(config, "num_attention_heads", 0) or 0
        kv_heads, head_dim = compat.kv_shape(config)
        ranks = compat.ranks_of(model)
        if kv_heads % ranks.size:
            raise UnsupportedModelError(
                f"{config.model_type} has {kv_heads} key/value heads, which {ranks.size} tensor-parallel ranks cannot share equally; use "
                "a number of ranks that divides them."
            )
        shape = (config.num_hidden_layers, query_heads, kv_heads, head_dim)
        return cls(config, model_class, *shape, ranks, compat.processes_of(model), decoder_class, of_config=model is whole)

    def attach(self) -> None:
        """Switches the model's attention to ours."""
        attach(self.config)

    def check_attached(self) -> None:
        """Refuses to run once the model's attention was switched back."""
        if not is_attached(self.config):
            raise UnsupportedOperationError(
                f"the model's attention is {self.config._attn_implementation!r}, not 'kvsparse': it was switched after this "
                "cache was constructed. Construct a new cache on the model."
            )

    def check_config(self, config: PretrainedConfig | None) -> None:
        """Refuses a forward of a model with another shape."""
        if config is None or config is self.config:
            return
        names = ("model_type", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size", "head_dim")
        for name in names:
            mine, theirs = getattr(self.config, name, None), getattr(config, name, None)
            if mine != theirs:
                raise UnsupportedOperationError(
                    f"this cache was made for a model with {name}={mine}, the running model has {theirs}; construct the cache "
                    "on the model it is used with."
                )

    def check_heads(self, kv_heads: int, head_dim: int) -> None:
        """Refuses keys of another model, with more heads than a rank's share, or with a share that the cache does not know of.
        Fewer heads are fine otherwise (layers may differ), and latent attention (MLA) has key dimensions of its own."""
        latent = getattr(self.config, "kv_lora_rank", None) is not None
        if self.head_dim and head_dim != self.head_dim and not latent:
            raise UnsupportedOperationError(
                f"this cache was made for a model with head dimension {self.head_dim}, got keys with {head_dim}."
            )
        everywhere = kv_heads * self.ranks.size
        wrong_heads = self.kv_heads and (everywhere > self.kv_heads or self.kv_heads % everywhere)
        if wrong_heads and everywhere != self.query_heads:
            where = f" on each of {self.ranks.size} ranks" if self.ranks.size > 1 else ""
            raise UnsupportedOperationError(
                f"this cache was made for a model with {self.kv_heads} key/value heads, got keys with {kv_heads}{where}."
            )
        if self.of_config and everywhere < self.kv_heads and several_processes():
            raise UnsupportedOperationError(
                f"this cache was made from a config, with {self.kv_heads} key/value heads, and got keys with {kv_heads}: the model seems "
                "to be divided among processes, whose heads may have to decide together. Construct the cache on the model itself."
            )

    def fingerprint(self) -> dict:
        """JSON facts that a saved cache must match when it is loaded."""
        return {
            "model_type": self.config.model_type,
            "layers": self.layers,
            "query_heads": self.query_heads,
            "kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "ranks": self.ranks.size,
            "rank": self.ranks.rank,
        }


def unwrap(model):
    """The Transformers model inside a PEFT adapter or a compiled wrapper."""
    model = getattr(model, "_orig_mod", model)
    get_base = getattr(model, "get_base_model", None)
    return get_base() if callable(get_base) else model


def _class_of(config: PretrainedConfig) -> type | None:
    for auto in (AutoModelForCausalLM, AutoModel):
        if type(config) in auto._model_mapping:
            found = auto._model_mapping[type(config)]
            return found[0] if isinstance(found, tuple) else found
    return None


def _check_decoder(config: PretrainedConfig, model_class: type | None, model: PreTrainedModel | None) -> None:
    kind = config.model_type
    # A type with a masked-language-model head is an encoder, unless it was switched to a decoder. One more has no such head.
    masked = type(config) in AutoModelForMaskedLM._model_mapping or kind == "bert-generation"
    encoder = masked and not getattr(config, "is_decoder", False)
    if encoder or not getattr(config, "is_causal", True):
        raise UnsupportedModelError(f"{kind} is not a causal decoder: its tokens attend to later ones.")
    if model is not None and not model.can_generate():
        raise UnsupportedModelError(f"{type(model).__name__} cannot generate; pass a causal language model.")
    if not getattr(config, "num_hidden_layers", 0):
        raise UnsupportedModelError(f"{kind} has no decoder layers.")


def _check_attention(config: PretrainedConfig, model_class: type | None, decoder_class: type | None) -> None:
    kind = config.model_type
    for found in (model_class, decoder_class):
        if found is not None and not compat.routes_attention(found):
            raise UnsupportedModelError(
                f"{found.__name__} does not route its attention through Transformers' AttentionInterface, so no cache can see its "
                "queries."
            )
    if kind in _OTHER_ATTENTION:
        raise UnsupportedModelError(
            f"{kind} {_OTHER_ATTENTION[kind]}, which no cache of this library follows; use the model's own cache."
        )
    if compat.has_own_cache(decoder_class):
        raise UnsupportedModelError(f"{kind} works with a cache of its own alone, in this version of Transformers.")
    if compat.caches_latents(config, decoder_class):
        raise UnsupportedModelError(
            f"{kind} caches one compressed latent for all heads (MLA) and makes keys and values from it in every step. Those would "
            "take far more room than the latents, whatever is evicted; use Transformers' own cache."
        )


def _check_softcap(config: PretrainedConfig) -> None:
    base = base_of(config)
    if getattr(config, "attn_logit_softcapping", None) and base == "sdpa":
        raise UnsupportedModelError(
            f"{config.model_type} caps its attention logits, which 'sdpa' cannot do (some versions of Transformers ignore the "
            "cap without a word); load the model with attn_implementation='eager' or 'flash_attention_2'."
        )

