"""Every causal language model of the running version, from its default config made small: dense, or refused at construction.

Slow. It finds models that nobody thought of when a new version of Transformers brings them.
"""

import pytest
import torch
import transformers
from helpers import CACHE, dense, generate, left_pad, positions, tokens
from tiny_models import NEVER
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from kvsparse_hf import FullCache, UnsupportedModelError
from kvsparse_hf.hf.binding import Binding
from kvsparse_hf.hf.rotary import KeyRotation, layer_rotation

pytestmark = pytest.mark.slow
LARGEST = 2e7  # parameters; a default config that small settings do not shrink is left out
_SMALL = dict(
    vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    max_position_embeddings=512, initializer_range=0.2, pad_token_id=0, bos_token_id=1, eos_token_id=NEVER, num_experts=4,
    num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, n_routed_experts=4, n_group=1, topk_group=1, sliding_window=8,
)  # fmt: skip
_LATENT = dict(kv_lora_rank=16, q_lora_rank=24, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16, num_key_value_heads=4)


def _build(kind: str, attention: str):
    """A small model of one type; None where its config needs more than small numbers, or the model does not run by itself."""
    try:
        settings = type(transformers.AutoConfig.for_model(kind))
        default = settings()
        small = {**_SMALL, **_LATENT} if hasattr(default, "kv_lora_rank") else _SMALL
        known = {name: value for name, value in small.items() if hasattr(default, name) or name in settings.attribute_map}
        if getattr(default, "sliding_window", None) is None:
            known.pop("sliding_window", None)
        if hasattr(default, "kv_lora_rank"):
            known.pop("head_dim", None)
        config = settings(**known, attn_implementation=attention)
        name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]
        model_class = getattr(transformers, name if isinstance(name, str) else name[0])
        with torch.device("meta"):
            if sum(weight.numel() for weight in model_class(config).parameters()) > LARGEST:
                return None
        torch.manual_seed(0)
        return model_class(config).eval()
    except Exception:  # whatever a config says to settings that do not fit it
        return None


def _answers(model, make):
    ids, mask = left_pad([tokens(24), tokens(15, seed=2)])
    more = dict(attention_mask=mask, return_dict_in_generate=True, output_logits=True)
    out = generate(model, ids, make(model), 10, **more)
    return out.sequences, torch.stack(out.logits)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
def test_dense_or_refused(kind, attention):
    model = _build(kind, attention)
    if model is None:
        pytest.skip("small settings make no model of it")
    try:
        FullCache(model)
    except UnsupportedModelError:
        return
    try:
        expected = _answers(model, dense)
    except Exception as error:  # the small settings, not the cache
        pytest.skip(f"does not run with Transformers' own cache: {error}")
    got = _answers(model, FullCache)
    torch.testing.assert_close(got[1], expected[1], atol=3e-4, rtol=0)
    assert torch.equal(got[0], expected[0])


def _keys(model, first: int) -> list:
    """Keys of every layer for the same tokens, the first at position `first`."""
    cache, at = dense(model), positions(torch.ones(1, 5)) + first
    model(input_ids=tokens(5), position_ids=at, **{CACHE: cache})
    return [getattr(layer, "keys", None) for layer in cache.layers]


@pytest.mark.parametrize("kind", MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
def test_keys_turn_as_the_model_turns_them(kind):
    """`positions="cache"` and Expected Attention rely on it. Norms get random weights, or they would hide what they do."""
    model = _build(kind, "eager")
    if model is None:
        pytest.skip("small settings make no model of it")
    for name, weight in model.named_parameters():
        if weight.dim() == 1 and "norm" in name:
            weight.data += torch.rand(weight.shape) * 0.6 - 0.3
    try:
        layers = FullCache(model).sparse_layers
        bound = Binding.of(model)
        rotations = {layer.layer_idx: layer_rotation(KeyRotation, bound.config, bound.decoder_class, layer.layer_idx) for layer in layers}
    except UnsupportedModelError:
        return
    try:
        before, after = _keys(model, 0), _keys(model, 7)
    except Exception as error:  # the small settings, not the cache
        pytest.skip(f"does not run with Transformers' own cache: {error}")
    for index, rotation in rotations.items():
        turned = before[index].flatten(0, 1)
        if rotation is not None:
            turned = rotation(turned, torch.full(turned.shape[:2], 7))
        torch.testing.assert_close(turned.view_as(after[index]), after[index], atol=1e-4, rtol=0)
