"""One list of tiny random models, an entry for each family that users run, and what is expected of each.

Configurations come from the config classes alone. A family that the running version of Transformers does not have is left out.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import transformers
from tiny_models import Family
from transformers import PreTrainedModel
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention
from transformers.models.gptj import modeling_gptj

from kvsparse_hf import FullCache, UnsupportedModelError

WINDOW = 8
NEW = hasattr(DeepseekV3Attention, "expand_kv")  # not 5.6.2, where MLA caches keys and values, and some hybrids do less
_EXPERTS = dict(num_experts=4, num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
_ROUTED = dict(n_routed_experts=4, num_experts_per_tok=2, n_group=2, topk_group=1, moe_intermediate_size=32, n_shared_experts=1)
_MLA = dict(num_key_value_heads=4, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12, **_ROUTED)
_SLIDING = dict(num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2, sliding_window=WINDOW)
_LINEAR = dict(num_hidden_layers=4, layer_types=["linear_attention", "full_attention"] * 2)
_GRANITE = ["linear_attention", "full_attention"] * 2 if NEW else ["mamba", "attention"] * 2
_MAMBA = dict(mamba_d_state=8, mamba_d_conv=4, mamba_expand=2)
_MAMBA2 = dict(mamba_n_heads=8, mamba_n_groups=1, mamba_chunk_size=8, **_MAMBA)
_DELTA = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8)
_GEMMA_SHARED = dict(
    hidden_size_per_layer_input=8, vocab_size_per_layer_input=97, num_hidden_layers=6, num_kv_shared_layers=3, head_dim=16,
    layer_types=["sliding_attention", *["full_attention"] * 3, "sliding_attention", "full_attention"], sliding_window=WINDOW,
)  # fmt: skip
_SIGLIP = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, image_size=28, patch_size=14)
_QWEN_VISION = dict(depth=2, hidden_size=32, intermediate_size=48, num_heads=2, patch_size=4, out_hidden_size=64)


def rope(kind: str, **more) -> dict:
    """Rotary parameters of one type."""
    return dict(rope_parameters={"rope_type": kind, "rope_theta": 10000.0, **more})


def with_vision(vision: dict, **more) -> Callable[[dict], dict]:
    """The options of a composite config: the decoder's own under `text_config`, an image encoder, and `more`."""
    return lambda text: {"text_config": text, "vision_config": vision, "attn_implementation": text["attn_implementation"], **more}


@dataclass(frozen=True)
class Entry(Family):
    """One model of the zoo.

    Attributes:
        why: words of the error with which every cache refuses it at construction; empty where it must work.
        renumber: words of the error with which `positions="cache"` is refused; empty where it must be exact.
        compose: makes the options of a composite config from those of its decoder.
        turns: padded rows can go on with several tokens, with Transformers' own cache.
        note: what is particular about it.
    """

    why: str = ""
    renumber: str = ""
    compose: Callable[[dict], dict] | None = None
    turns: bool = True
    note: str = ""

    @property
    def exists(self) -> bool:
        """Whether the running version has this model."""
        return hasattr(transformers, self.config) and hasattr(transformers, self.model)

    @property
    def shares(self) -> bool:
        """Whether layers of the model read other layers' keys and values."""
        return bool(self.options.get("num_kv_shared_layers"))

    def make_config(self, options: dict):
        return getattr(transformers, self.config)(**(self.compose(options) if self.compose else options))


_MROPE = dict(rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]})
_QWEN_TOKENS = dict(image_token_id=90, video_token_id=91, vision_start_token_id=92, vision_end_token_id=93)
_LLAMA3 = rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)
_YARN = rope("yarn", factor=4.0, original_max_position_embeddings=64)
_LONGROPE = rope("longrope", factor=4.0, short_factor=[1.0] * 8, long_factor=[2.0] * 8, original_max_position_embeddings=64)
_SU = dict(original_max_position_embeddings=64, max_position_embeddings=256)
_EAGER = dict(attentions=("eager",))
_WINDOWED = dict(sliding_window=WINDOW)
_UNROTATED = "no rotary embedding"
_MIXED = "keeps a LinearAttentionAndFullAttentionLayer"
_NO_INTERFACE = "AttentionInterface"
_SLICE = "rotates only a slice"
_LATENT = "one compressed latent"

ZOO = [
    Entry("llama-2", "LlamaForCausalLM", "LlamaConfig", dict(num_key_value_heads=4)),
    Entry("llama-3", "LlamaForCausalLM", "LlamaConfig", _LLAMA3, note="llama3 rope"),
    Entry("llama-yarn", "LlamaForCausalLM", "LlamaConfig", _YARN, note="yarn"),
    Entry("llama-linear", "LlamaForCausalLM", "LlamaConfig", rope("linear", factor=4.0), note="linear rope"),
    Entry("llama-dynamic", "LlamaForCausalLM", "LlamaConfig", {**rope("dynamic", factor=4.0), "max_position_embeddings": 64},
          renumber="dynamic", note="dynamic rope"),
    Entry("llama-longrope", "LlamaForCausalLM", "LlamaConfig", _LONGROPE, renumber="longrope", note="longrope"),
    Entry("llama-4", "Llama4ForCausalLM", "Llama4TextConfig",
          dict(num_hidden_layers=4, head_dim=16, no_rope_layers=[1, 1, 1, 0], attention_chunk_size=WINDOW, floor_scale=4,
               intermediate_size_mlp=96, interleave_moe_layer_step=2, num_local_experts=4),
          sliding_window=WINDOW, note="chunked and unrotated layers, scaled queries"),
    Entry("mistral", "MistralForCausalLM", "MistralConfig", dict(sliding_window=None)),
    Entry("mistral-sliding", "MistralForCausalLM", "MistralConfig", dict(sliding_window=WINDOW), all_sliding=True, **_WINDOWED),
    Entry("ministral", "MinistralForCausalLM", "MinistralConfig", dict(head_dim=16, **_SLIDING), **_WINDOWED),
    Entry("ministral-3", "Ministral3ForCausalLM", "Ministral3Config",
          dict(head_dim=16, sliding_window=None, rope_parameters={**_YARN["rope_parameters"], "llama_4_scaling_beta": 0.1}),
          note="yarn, scaled queries"),
    Entry("mixtral", "MixtralForCausalLM", "MixtralConfig", _EXPERTS),
    Entry("qwen-2", "Qwen2ForCausalLM", "Qwen2Config", {}),
    Entry("qwen-2.5", "Qwen2ForCausalLM", "Qwen2Config", dict(use_sliding_window=True, max_window_layers=1, sliding_window=WINDOW),
          **_WINDOWED),
    Entry("qwen-2-moe", "Qwen2MoeForCausalLM", "Qwen2MoeConfig", dict(shared_expert_intermediate_size=32, **_EXPERTS)),
    Entry("qwen-3", "Qwen3ForCausalLM", "Qwen3Config", dict(head_dim=16), note="query and key norms"),
    Entry("qwen-3-moe", "Qwen3MoeForCausalLM", "Qwen3MoeConfig", dict(head_dim=16, decoder_sparse_step=1, **_EXPERTS)),
    Entry("gemma", "GemmaForCausalLM", "GemmaConfig", dict(head_dim=16, num_key_value_heads=1)),
    Entry("gemma-2", "Gemma2ForCausalLM", "Gemma2Config", dict(head_dim=16, query_pre_attn_scalar=24, attn_logit_softcapping=2.0, **_SLIDING),
          note="capped logits", **_EAGER, **_WINDOWED),
    Entry("gemma-3", "Gemma3ForCausalLM", "Gemma3TextConfig", dict(head_dim=16, query_pre_attn_scalar=24, **_SLIDING),
          note="two rotary bases", **_WINDOWED),
    Entry("gemma-3n", "Gemma3nForCausalLM", "Gemma3nTextConfig",
          dict(laurel_rank=4, activation_sparsity_pattern=[0.0] * 6, **_GEMMA_SHARED), note="layers share", **_WINDOWED),
    Entry("gemma-4", "Gemma4ForCausalLM", "Gemma4TextConfig", dict(global_head_dim=32, **_GEMMA_SHARED),
          note="layers share, heads of two sizes", **_WINDOWED),
    Entry("phi", "PhiForCausalLM", "PhiConfig", dict(partial_rotary_factor=0.5, num_key_value_heads=4), note="partial rotary"),
    Entry("phi-3", "Phi3ForCausalLM", "Phi3Config", dict(sliding_window=None), note="fused projections"),
    Entry("phi-3-long", "Phi3ForCausalLM", "Phi3Config", {**_LONGROPE, **_SU, "sliding_window": None}, renumber="longrope",
          note="longrope"),
    Entry("phi-3.5-moe", "PhimoeForCausalLM", "PhimoeConfig", _EXPERTS),
    Entry("phi-4-mini", "Phi3ForCausalLM", "Phi3Config", dict(partial_rotary_factor=0.75, num_attention_heads=8, head_dim=16,
          hidden_size=128, sliding_window=None), note="partial rotary"),
    Entry("glm", "GlmForCausalLM", "GlmConfig", dict(head_dim=16), note="partial, interleaved rotary"),
    Entry("glm-4", "Glm4ForCausalLM", "Glm4Config", dict(head_dim=16), note="partial, interleaved rotary"),
    Entry("glm-4-moe", "Glm4MoeForCausalLM", "Glm4MoeConfig", dict(head_dim=16, use_qk_norm=True, **_ROUTED), note="partial rotary"),
    Entry("olmo-2", "Olmo2ForCausalLM", "Olmo2Config", {}),
    Entry("olmo-3", "Olmo3ForCausalLM", "Olmo3Config", _SLIDING, **_WINDOWED),
    Entry("granite", "GraniteForCausalLM", "GraniteConfig", dict(attention_multiplier=0.1), note="scale of its own"),
    Entry("granite-moe", "GraniteMoeForCausalLM", "GraniteMoeConfig", dict(attention_multiplier=0.1, **_EXPERTS)),
    Entry("granite-4", "GraniteMoeHybridForCausalLM", "GraniteMoeHybridConfig",
          dict(layer_types=_GRANITE, num_hidden_layers=4, mamba_d_head=16, position_embedding_type="rope",
               attention_multiplier=0.1, **_MAMBA2, **_EXPERTS), note="Mamba-2 layers"),
    Entry("granite-4-nope", "GraniteMoeHybridForCausalLM", "GraniteMoeHybridConfig",
          dict(layer_types=_GRANITE, num_hidden_layers=4, mamba_d_head=16, position_embedding_type=None,
               attention_multiplier=0.1, **_MAMBA2, **_EXPERTS), note="Mamba-2 layers, no rotary embedding"),
    Entry("cohere", "CohereForCausalLM", "CohereConfig", dict(logit_scale=1.0), note="interleaved rotary"),
    Entry("cohere-2", "Cohere2ForCausalLM", "Cohere2Config", dict(logit_scale=1.0, **_SLIDING), note="full layers are not rotated",
          **_WINDOWED),
    Entry("smollm-3", "SmolLM3ForCausalLM", "SmolLM3Config", dict(no_rope_layers=[1, 0]), note="a layer is not rotated"),
    Entry("gpt-oss", "GptOssForCausalLM", "GptOssConfig", dict(head_dim=16, **_SLIDING, **_EXPERTS), note="attention sinks, yarn",
          **_EAGER, **_WINDOWED),
    Entry("deepseek-v2", "DeepseekV2ForCausalLM", "DeepseekV2Config", dict(q_lora_rank=24, topk_method="greedy", first_k_dense_replace=1, **_MLA),
          why=_LATENT if NEW else "", renumber=_SLICE, note="MLA"),
    Entry("deepseek-v3", "DeepseekV3ForCausalLM", "DeepseekV3Config", dict(q_lora_rank=24, first_k_dense_replace=1, **_MLA),
          why=_LATENT if NEW else "", renumber=_SLICE, note="MLA"),
    Entry("glm-4.7-flash", "Glm4MoeLiteForCausalLM", "Glm4MoeLiteConfig", dict(q_lora_rank=24, **_MLA), why=_LATENT if NEW else "", renumber=_SLICE, note="MLA"),
    Entry("deepseek-v3.2", "DeepseekV32ForCausalLM", "DeepseekV32Config", dict(q_lora_rank=24, index_n_heads=2, index_head_dim=16, index_topk=4, **_MLA),
          why=_LATENT, note="MLA, sparse attention of its own"),
    Entry("kimi-linear", "KimiLinearForCausalLM", "KimiLinearConfig",
          dict(linear_head_dim=8, linear_num_heads=4, **_LINEAR, **_MLA), why=_LATENT, note="delta and MLA layers"),
    Entry("qwen-3-next", "Qwen3NextForCausalLM", "Qwen3NextConfig",
          dict(head_dim=16, decoder_sparse_step=1, shared_expert_intermediate_size=32, partial_rotary_factor=0.5, **_LINEAR, **_DELTA, **_EXPERTS),
          note="gated delta layers, partial rotary"),
    Entry("qwen-3.5", "Qwen3_5ForCausalLM", "Qwen3_5TextConfig", dict(head_dim=16, **_LINEAR, **_DELTA),
          renumber="several dimensions", note="gated delta layers"),
    Entry("olmo-hybrid", "OlmoHybridForCausalLM", "OlmoHybridConfig", dict(**_LINEAR, **_DELTA), why="" if NEW else "cache of its own", note="gated delta layers"),
    Entry("jamba", "JambaForCausalLM", "JambaConfig",
          dict(num_hidden_layers=4, attn_layer_period=2, attn_layer_offset=1, use_mamba_kernels=False, mamba_dt_rank=4, **_MAMBA, **_EXPERTS),
          renumber=_UNROTATED, note="Mamba layers, no rotary embedding"),
    Entry("bamba", "BambaForCausalLM", "BambaConfig", dict(num_hidden_layers=4, attn_layer_indices=[1, 3], mamba_d_head=16, **_MAMBA2),
          note="Mamba-2 layers"),
    Entry("nemotron-h", "NemotronHForCausalLM", "NemotronHConfig",
          dict(layers_block_type=["mamba", "attention", "mlp", "attention"], head_dim=16, mamba_num_heads=8, mamba_head_dim=16, n_groups=1,
               ssm_state_size=8, chunk_size=8), renumber=_UNROTATED, note="Mamba-2 layers, no rotary embedding"),
    Entry("lfm-2", "Lfm2ForCausalLM", "Lfm2Config", dict(num_hidden_layers=4, layer_types=["conv", "full_attention"] * 2,
          block_auto_adjust_ff_dim=False), turns=NEW, note="convolution layers"),
    Entry("falcon-h1", "FalconH1ForCausalLM", "FalconH1Config", dict(mamba_d_ssm=64, mamba_d_head=8, **_MAMBA2), why=_MIXED,
          note="Mamba beside attention in a layer"),
    Entry("zamba-2", "Zamba2ForCausalLM", "Zamba2Config",
          dict(num_hidden_layers=4, layers_block_type=["mamba", "hybrid", "mamba", "hybrid"], mamba_d_state=8, n_mamba_heads=8, chunk_size=8,
               num_mem_blocks=1), why=_MIXED, note="Mamba beside attention in a layer"),
    Entry("minimax-01", "MiniMaxForCausalLM", "MiniMaxConfig", dict(head_dim=16, **_LINEAR, **_EXPERTS), why="cache of its own"),
    Entry("minimax-m2", "MiniMaxM2ForCausalLM", "MiniMaxM2Config", dict(head_dim=16, **_EXPERTS), note="partial rotary"),
    Entry("exaone-4", "Exaone4ForCausalLM", "Exaone4Config", _SLIDING, note="full layers are not rotated", **_WINDOWED),
    Entry("hunyuan", "HunYuanDenseV1ForCausalLM", "HunYuanDenseV1Config", dict(head_dim=16), renumber="after rotating", note="norms after the rotation"),
    Entry("ernie-4.5", "Ernie4_5ForCausalLM", "Ernie4_5Config", dict(head_dim=16), note="interleaved rotary"),
    Entry("seed-oss", "SeedOssForCausalLM", "SeedOssConfig", dict(head_dim=16)),
    Entry("apertus", "ApertusForCausalLM", "ApertusConfig", _LLAMA3),
    Entry("stablelm", "StableLmForCausalLM", "StableLmConfig", dict(partial_rotary_factor=0.25), note="partial rotary"),
    Entry("starcoder-2", "Starcoder2ForCausalLM", "Starcoder2Config", dict(sliding_window=None)),
    Entry("gpt-neox", "GPTNeoXForCausalLM", "GPTNeoXConfig", dict(rotary_pct=0.25, hidden_act="gelu", num_key_value_heads=4),
          note="partial rotary"),
    Entry("gpt-2", "GPT2LMHeadModel", "GPT2Config", dict(n_embd=64, n_layer=2, n_head=4, n_positions=512), renumber=_UNROTATED,
          note="learned positions"),
    Entry("gpt-j", "GPTJForCausalLM", "GPTJConfig", dict(n_embd=64, n_layer=2, n_head=4, rotary_dim=8), why="" if hasattr(modeling_gptj, "ALL_ATTENTION_FUNCTIONS") else _NO_INTERFACE,
          renumber=_UNROTATED, **_EAGER),
    Entry("falcon", "FalconForCausalLM", "FalconConfig", {}, why=_NO_INTERFACE),
    Entry("bloom", "BloomForCausalLM", "BloomConfig", dict(n_layer=2, n_head=4), why=_NO_INTERFACE, **_EAGER),
    Entry("jetmoe", "JetMoeForCausalLM", "JetMoeConfig", dict(kv_channels=16, num_key_value_heads=2, **_EXPERTS), why="repeats its keys"),
    Entry("diffllama", "DiffLlamaForCausalLM", "DiffLlamaConfig", {}, why="attends twice|AttentionInterface", note="differential attention"),
    # --- the decoders of models that also see ---
    Entry("qwen-2-vl", "Qwen2VLForConditionalGeneration", "Qwen2VLConfig", _MROPE, renumber="several dimensions", note="three-dimensional positions",
          compose=with_vision(dict(depth=2, embed_dim=32, hidden_size=64, num_heads=2, patch_size=4, mlp_ratio=2), **_QWEN_TOKENS)),
    Entry("qwen-2.5-vl", "Qwen2_5_VLForConditionalGeneration", "Qwen2_5_VLConfig", _MROPE, renumber="several dimensions", note="three-dimensional positions",
          compose=with_vision(dict(fullatt_block_indexes=[1], window_size=16, **_QWEN_VISION), **_QWEN_TOKENS)),
    Entry("qwen-3-vl", "Qwen3VLForConditionalGeneration", "Qwen3VLConfig", dict(head_dim=16, **_MROPE),
          renumber="several dimensions", note="three-dimensional positions",
          compose=with_vision(dict(num_position_embeddings=16, deepstack_visual_indexes=[0], **_QWEN_VISION), **_QWEN_TOKENS)),
    Entry("llava", "LlavaForConditionalGeneration", "LlavaConfig", dict(model_type="llama"), note="images",
          compose=with_vision(dict(model_type="siglip_vision_model", **_SIGLIP), image_token_index=90,
                              vision_feature_select_strategy="full", image_seq_length=4)),
    Entry("mistral-3", "Mistral3ForConditionalGeneration", "Mistral3Config", dict(model_type="mistral", sliding_window=None),
          compose=with_vision(dict(model_type="siglip_vision_model", **_SIGLIP), image_token_index=90)),
    Entry("gemma-3-vl", "Gemma3ForConditionalGeneration", "Gemma3Config", dict(head_dim=16, **_SLIDING), note="image blocks see both ways",
          compose=with_vision(_SIGLIP, image_token_index=90, boi_token_index=91, eoi_token_index=92, mm_tokens_per_image=4), **_WINDOWED),
]  # fmt: skip

BY_NAME = {entry.name: entry for entry in ZOO}
SUPPORTED = [entry for entry in ZOO if entry.exists and not entry.why]
REFUSED = [entry for entry in ZOO if entry.exists and entry.why]


def build(entry: Entry, attention: str | None = None, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The model with the same random weights every time, those of norms and attention sinks as well."""
    model = entry.build(attention or entry.attentions[0], dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    for name, weight in model.named_parameters():
        if weight.dim() == 1 and ("norm" in name or "sinks" in name):
            weight.data += (torch.rand(weight.shape, generator=generator) * 0.6 - 0.3).to(weight)
    return model


def rows() -> list[tuple[str, str, str]]:
    """`(model, status, note)` of every entry that the running version has, found by constructing a cache."""
    out = []
    for entry in ZOO:
        if not entry.exists:
            out.append((entry.name, "not in this version", entry.note))
            continue
        try:
            FullCache(build(entry))
            out.append((entry.name, "supported" + (f" ({', '.join(entry.attentions)})"), entry.note))
        except UnsupportedModelError as error:
            out.append((entry.name, "refused", str(error)))
    return out
