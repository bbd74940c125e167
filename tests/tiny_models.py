"""Tiny random models, built from configs alone. Weights are large enough for greedy text to be varied."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import transformers
from transformers import PretrainedConfig, PreTrainedModel

VOCAB = 97
PAD, BOS = 0, 1
NEVER = 10**6  # an end-of-sequence id that no model can produce: every run has its full length

DEFAULTS = dict(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=2048,
    initializer_range=0.2,
    pad_token_id=PAD,
    bos_token_id=BOS,
    eos_token_id=NEVER,
)
_MOE = dict(num_experts_per_tok=2, moe_intermediate_size=32, num_experts=4, num_local_experts=4)


@dataclass(frozen=True)
class Family:
    """One architecture. `attentions` are the base attentions it runs on; `all_sliding` has no layer for us to compress."""

    name: str
    model: str
    config: str
    options: dict
    attentions: tuple[str, ...] = ("sdpa", "eager")
    all_sliding: bool = False
    sliding_window: int = 0

    def build(self, attention: str = "sdpa", seed: int = 0, dtype: torch.dtype = torch.float32, **overrides) -> PreTrainedModel:
        torch.manual_seed(seed)
        options = {**DEFAULTS, **self.options, **overrides, "attn_implementation": attention}
        model = getattr(transformers, self.model)(self.make_config(options)).eval()
        with torch.no_grad():
            model.get_output_embeddings().weight.mul_(0.5)  # logits of size 3, for which 1e-5 is a fair fp32 tolerance
        return model.to(dtype)

    def make_config(self, options: dict) -> PretrainedConfig:
        return getattr(transformers, self.config)(**options)


_HYBRID = dict(tie_word_embeddings=False, num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2, sliding_window=8)

FAMILIES = {
    family.name: family
    for family in (
        Family("llama-gqa2", "LlamaForCausalLM", "LlamaConfig", {}),
        Family("llama-mha", "LlamaForCausalLM", "LlamaConfig", dict(num_key_value_heads=4)),
        Family("llama-gqa4", "LlamaForCausalLM", "LlamaConfig", dict(num_attention_heads=8, num_key_value_heads=2)),
        Family("llama-mqa8", "LlamaForCausalLM", "LlamaConfig", dict(num_attention_heads=8, num_key_value_heads=1)),
        Family("qwen3", "Qwen3ForCausalLM", "Qwen3Config", dict(head_dim=16)),
        Family("qwen2-hybrid", "Qwen2ForCausalLM", "Qwen2Config", dict(use_sliding_window=True, max_window_layers=1, sliding_window=8),
               sliding_window=8),
        Family("gemma3", "Gemma3ForCausalLM", "Gemma3TextConfig", dict(head_dim=16, query_pre_attn_scalar=16, **_HYBRID),
               sliding_window=8),
        Family("gemma2", "Gemma2ForCausalLM", "Gemma2Config", dict(head_dim=16, query_pre_attn_scalar=16, **_HYBRID),
               attentions=("eager",), sliding_window=8),
        Family("gpt-oss", "GptOssForCausalLM", "GptOssConfig", dict(head_dim=16, **_HYBRID, **_MOE), attentions=("eager",),
               sliding_window=8),
        Family("mistral-sliding", "MistralForCausalLM", "MistralConfig", dict(sliding_window=8), all_sliding=True, sliding_window=8),
        Family("mixtral", "MixtralForCausalLM", "MixtralConfig", _MOE),
        Family("qwen3-moe", "Qwen3MoeForCausalLM", "Qwen3MoeConfig", dict(head_dim=16, decoder_sparse_step=1, **_MOE)),
        Family("phi3-partial", "Phi3ForCausalLM", "Phi3Config", dict(partial_rotary_factor=0.5)),
        Family("gpt-neox", "GPTNeoXForCausalLM", "GPTNeoXConfig", dict(rotary_pct=0.25, hidden_act="gelu", num_key_value_heads=4)),
    )
}


def build(name: str = "llama-gqa2", attention: str | None = None, **overrides) -> PreTrainedModel:
    """A fresh model of a family, always with the same weights."""
    family = FAMILIES[name]
    return family.build(attention or family.attentions[0], **overrides)


def each_family(select: Callable[[Family], bool] = lambda family: True, every_attention: bool = True) -> list:
    """`(family name, attention)` parameters for `pytest.mark.parametrize`."""
    return [
        pytest.param(family.name, attention, id=f"{family.name}-{attention}")
        for family in FAMILIES.values()
        if select(family)
        for attention in family.attentions[: None if every_attention else 1]
    ]
