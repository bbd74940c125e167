"""Tiny random models that share keys and values between their layers by themselves."""

import torch
import transformers
from transformers import PreTrainedModel

TYPES = ["sliding_attention", "full_attention", "full_attention", "full_attention", "sliding_attention", "full_attention"]
OWNER, READERS = 2, [3, 5]  # of the full-attention layers that share; layer 4 reads the sliding layer 0
_COMMON = dict(
    vocab_size=97, vocab_size_per_layer_input=97, hidden_size=32, hidden_size_per_layer_input=8, intermediate_size=48,
    num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_kv_shared_layers=3, layer_types=TYPES,
    sliding_window=8, initializer_range=0.2, pad_token_id=0, bos_token_id=1, eos_token_id=96,
)  # fmt: skip


def gemma3n(attention: str = "sdpa", **options) -> PreTrainedModel:
    """The text model of Gemma 3n."""
    torch.manual_seed(0)
    settings = {**_COMMON, "laurel_rank": 4, "activation_sparsity_pattern": [0.0] * 6, "attn_implementation": attention, **options}
    return transformers.Gemma3nForCausalLM(transformers.Gemma3nTextConfig(**settings)).eval()


def gemma4(attention: str = "sdpa", **options) -> PreTrainedModel:
    """The text model of Gemma 4, with larger heads in its full-attention layers."""
    torch.manual_seed(0)
    settings = {**_COMMON, "global_head_dim": 32, "attn_implementation": attention, **options}
    return transformers.Gemma4ForCausalLM(transformers.Gemma4TextConfig(**settings)).eval()


NATIVE = {"gemma3n": gemma3n, "gemma4": gemma4}
