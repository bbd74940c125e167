"""Models in named shapes with random weights, and caches filled as if a prompt had been read."""

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen2Config
from transformers.utils import logging

from ..cache import SparseCache
from ..hf import compat
from ..layers.base import AttentionCall

SHAPES = {
    "llama-3.1-8b": (
        LlamaConfig,
        dict(vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
             num_key_value_heads=8, max_position_embeddings=262144, eos_token_id=None, bos_token_id=None),
    ),
    "qwen2.5-32b": (
        Qwen2Config,
        dict(vocab_size=152064, hidden_size=5120, intermediate_size=27648, num_hidden_layers=64, num_attention_heads=40,
             num_key_value_heads=8, max_position_embeddings=262144),
    ),
    "qwen2.5-0.5b": (
        Qwen2Config,
        dict(vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
             num_key_value_heads=2, max_position_embeddings=262144, tie_word_embeddings=True),
    ),
    "llama-4-layers": (
        LlamaConfig,
        dict(vocab_size=32000, hidden_size=1024, intermediate_size=2816, num_hidden_layers=4, num_attention_heads=16,
             num_key_value_heads=8, max_position_embeddings=262144, eos_token_id=None, bos_token_id=None),
    ),
}  # fmt: skip


def random_model(
    shape: str, device: str = "cuda", dtype: torch.dtype = torch.bfloat16, layers: int | None = None
) -> PreTrainedModel:
    """A model of a named shape with random weights, made on the device.

    Args:
        shape: a key of `SHAPES`.
        layers: decoder layers, if not the shape's own number.
    """
    config_class, fields = SHAPES[shape]
    config = config_class(**{**fields, **({"num_hidden_layers": layers} if layers else {})})
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config)
    finally:
        torch.set_default_dtype(default)
    return model.eval()


def shared_model(shape: str, dtype: torch.dtype = torch.bfloat16, layers: int | None = None) -> PreTrainedModel:
    """A model of a named shape with random weights, of which each process of the running group holds its share (tensor
    parallelism as `from_pretrained` sets it up, with every weight missing from the checkpoint)."""
    config_class, fields = SHAPES[shape]
    config = config_class(**fields | ({"num_hidden_layers": layers} if layers else {}))
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # it would list every weight
    try:
        model_class = AutoModelForCausalLM._model_mapping[config_class]
        return model_class.from_pretrained(None, config=config, state_dict={}, dtype=dtype, **compat.tensor_parallel()).eval()
    finally:
        logging.set_verbosity(verbosity)


def wait_for(model: PreTrainedModel) -> None:
    """Until the device of a model has done everything it was given."""
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)


@torch.no_grad()
def fill(cache, model: PreTrainedModel, batch: int, context: int, spread: float = 1.0) -> None:
    """Puts `context` random tokens per row into an empty cache, layer by layer, as a first forward would.

    Args:
        spread: the keys of the last head are so many times as long as those of the first, with equal ratios between: long
            keys attract attention to few tokens, and heads that share a budget get unequal parts of it.
    """
    config, device, dtype = model.config, model.device, model.dtype
    ranks = compat.ranks_of(model).size
    heads, dim = config.num_key_value_heads // ranks, config.hidden_size // config.num_attention_heads
    heads_q = config.num_attention_heads // ranks
    generator = torch.Generator(device).manual_seed(0)

    def noise(count: int, tokens: int) -> torch.Tensor:
        # Rounded in bf16 first, so that models of any precision get the same numbers.
        return torch.randn(batch, count, tokens, dim, device=device, dtype=torch.bfloat16, generator=generator).to(dtype)

    longer = (spread ** torch.linspace(0, 1, heads, device=device)).to(dtype).view(1, -1, 1, 1)
    for index in range(config.num_hidden_layers):
        key, value = noise(heads, context) * longer, noise(heads, context)
        if not isinstance(cache, SparseCache):
            cache.update(key, value, index)
            continue
        layer = cache.layers[index]
        cache.session.begin(index, key, has_mask=False)
        layer.device = key.device
        positions = torch.arange(context, device=device).expand(batch, heads, -1)
        pad = torch.zeros(batch, heads, dtype=torch.int64, device=device)
        query = torch.randn_like(key[:, :1, -64:]).expand(-1, heads_q, -1, -1)
        layer.absorb_prompt(query, key, value, positions, pad, AttentionCall(dim**-0.5))
        layer.is_initialized = True
