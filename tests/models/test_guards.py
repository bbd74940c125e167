"""What keeps a model that nobody has looked at from giving a wrong answer in silence."""

import pytest
import torch
import transformers
from helpers import decode, forward, tokens
from methods import ALL, BUDGET
from token_driver import Driver, tiny_config
from transformers.masking_utils import create_sliding_window_causal_mask
from transformers.models.diffllama import modeling_diffllama
from transformers.models.llama import modeling_llama
from zoo import BY_NAME, SUPPORTED, build

from kvsparse_hf import FullCache, SnapKVCache, StreamingLLMCache, UnsupportedModelError, UnsupportedOperationError
from kvsparse_hf.hf import binding, compat, rotated
from kvsparse_hf.hf.attention import kvsparse_attention_forward
from kvsparse_hf.layers.owning import AttentionCall


@pytest.mark.skipif(not hasattr(modeling_diffllama, "ALL_ATTENTION_FUNCTIONS"), reason="has no interface in this version")
def test_other_values_than_the_cache_got(monkeypatch):
    monkeypatch.delitem(binding._OTHER_ATTENTION, "diffllama")
    model = build(BY_NAME["diffllama"], "eager")
    with pytest.raises(UnsupportedOperationError, match="other values"):
        forward(model, tokens(20), FullCache(model))


def test_attention_twice_to_the_same_keys():
    driver = Driver(FullCache(tiny_config()))
    q, k, v = given = driver.random(5)
    driver.feed(5, given)
    with pytest.raises(UnsupportedOperationError, match="twice"):
        kvsparse_attention_forward(driver.module, q, k, v, None, scaling=1.0)
    driver.feed(1)
    assert driver.kept() == [list(range(6))] * 2


def test_a_sliding_window_where_the_config_has_none(monkeypatch):
    model = build(BY_NAME["llama-2"])
    mine = FullCache(model)
    model.config.sliding_window = 8
    monkeypatch.setattr(modeling_llama, "create_causal_mask", create_sliding_window_causal_mask)
    forward(model, tokens(20), mine)
    for length in (1, 3):
        with pytest.raises(UnsupportedOperationError, match="sliding window"):
            forward(model, tokens(length), mine.fork())


@pytest.mark.parametrize("name", ["position_bias", "sliding_window", "indices", "block_indices", "sinks"])
def test_arguments_that_change_the_attention(name):
    with pytest.raises(UnsupportedOperationError, match=name):
        AttentionCall.of(torch.nn.Module(), 8, {"scaling": 1.0, name: torch.ones(1)})


def test_a_condition_on_the_rotation_that_is_not_known(monkeypatch):
    monkeypatch.delitem(rotated._RULES, "smollm3")
    model = build(BY_NAME["smollm-3"])
    with pytest.raises(UnsupportedModelError, match="rotates some of its layers alone.*positions='original'"):
        StreamingLLMCache(model, budget=BUDGET)
    StreamingLLMCache(model, budget=BUDGET, positions="original")


def test_an_encoder_without_a_masked_head():
    config = transformers.BertGenerationConfig(vocab_size=97, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=48)
    with pytest.raises(UnsupportedModelError, match="causal"):
        FullCache(transformers.BertGenerationDecoder(config))
    config.is_decoder = True
    FullCache(transformers.BertGenerationDecoder(config))


def test_every_supported_model_by_its_config():
    """A cache made from the config alone has the same layers as one made from the model."""
    for entry in SUPPORTED:
        model = build(entry)
        mine, config = FullCache(model), FullCache(model.config)
        assert [type(layer) for layer in config.layers] == [type(layer) for layer in mine.layers], entry.name
        assert compat.text_config(model.config)._attn_implementation.startswith("kvsparse")


def test_a_cache_from_a_config_decodes():
    model = build(BY_NAME["llava"])
    mine, other = SnapKVCache(model.config, budget=BUDGET, window=4), SnapKVCache(model, budget=BUDGET, window=4)
    for cache in (mine, other):
        forward(model, tokens(30), cache)
    assert torch.equal(decode(model, mine, tokens(4, seed=2)), decode(model, other, tokens(4, seed=2)))
    assert ALL["snapkv"].held(mine) == {BUDGET + 4}
