"""What is refused, with which words, and before anything happened; presets."""

import pytest
import torch
from helpers import decode, forward, tokens
from offload_tools import LOKI, QUEST, started
from tiny_models import build

import kvsparse_hf
from kvsparse_hf import BudgetError, HiSparseCache, KVSparseError, OptionError, UnsupportedModelError
from kvsparse_hf.layers.evicting import EvictingLayer
from kvsparse_hf.ops import BackendError


@pytest.mark.parametrize("options, error, words", [
    (dict(hot_tokens=14), BudgetError, "hot_tokens=14 is below .* 16 tokens"),  # 6 pages, one of sinks, the newest
    (dict(hot_tokens=20, prefetch=4), BudgetError, "hot_tokens=20 is below .* 24 tokens"),
    (dict(hot_tokens=25), OptionError, "no multiple of the page of 2"),
    (dict(page_size=3), OptionError, "power of two"),
    (dict(budget=7), BudgetError, "smaller than the pages of sinks and recent"),
    (dict(host_bytes="a lot"), OptionError, "host_bytes='a lot'"),
    (dict(device_bytes=-1), OptionError, "device_bytes=-1"),
    (dict(prefetch=-1), OptionError, "prefetch"),
    (dict(selector="snapkv"), OptionError, "selector"),
    (dict(selector="ivf"), OptionError, "page_size=2.*single tokens"),
    (dict(selector="ivf", page_size=None, prefetch=1), OptionError, "prefetch needs a ranking"),
    (dict(per_query_head=True), OptionError, "per_query_head"),
    (dict(d_f=17, selector="loki"), OptionError, "d_f=17 is more than"),
    (dict(d_ff=17), OptionError, "Did you mean 'd_f'"),
], ids=str)
def test_refused_at_construction(options, error, words):
    with pytest.raises(error, match=words):
        HiSparseCache(build(), **{**QUEST, **options})


def test_the_smallest_buffer_is_not_refused():
    HiSparseCache(build(), **QUEST, hot_tokens=16)


def test_hot_buffers_beyond_the_devices_share():
    """Known with the first prompt; a larger share then works."""
    model = build()
    cache = HiSparseCache(model, **QUEST, device_bytes=1000)
    with pytest.raises(BudgetError, match="device_bytes=1000 cannot hold the hot buffers of 2 layers"):
        forward(model, tokens(60), cache)
    assert cache.report().host_bytes == 0


def test_pages_that_the_kernels_could_not_move():
    model = build("llama-mha", hidden_size=20, num_attention_heads=2, num_key_value_heads=2, head_dim=10, dtype=torch.bfloat16)
    with pytest.raises(OptionError, match="40 bytes, which is no multiple of 16"):
        forward(model, tokens(60), HiSparseCache(model, **{**QUEST, "page_size": 1}))
    forward(model, tokens(60), HiSparseCache(model, **{**QUEST, "page_size": 2}))  # two tokens: 80 bytes


def test_keys_and_values_of_unlike_size():
    model = build()
    cache = HiSparseCache(model, **QUEST)
    key, value = torch.zeros(1, 2, 60, 16), torch.zeros(1, 2, 60, 8)
    with pytest.raises(UnsupportedModelError, match="16 and values of 8 channels"):
        cache.sparse_layers[0].absorb_prompt(key, key, value, torch.arange(60).expand(1, 2, -1), torch.zeros(1, 2), None)


def test_triton_without_cuda(monkeypatch):
    from kvsparse_hf.ops import backend

    monkeypatch.setattr(backend, "interpreting", lambda: False)
    model = build()
    cache = HiSparseCache(model, **QUEST, backend="triton")
    with pytest.raises(BackendError, match="'cpu'|not installed"):
        forward(model, tokens(60), cache)


def test_dense_layers_stay_on_the_device():
    model = build(num_hidden_layers=4)
    kinds = {name: [isinstance(layer, EvictingLayer) for layer in HiSparseCache(model, **options).layers]
             for name, options in {"quest": dict(budget=64), "loki": dict(selector="loki"), "three": dict(dense_layers=3)}.items()}
    assert kinds == {"quest": [True, True, False, False], "loki": [False] * 4, "three": [True, True, True, False]}
    cache = HiSparseCache(model, **{**QUEST, "dense_layers": 4})
    forward(model, tokens(60), cache)
    decode(model, cache, tokens(3))
    assert cache.report().host_bytes == 0


@pytest.mark.parametrize("name", [name for name in kvsparse_hf.list_presets() if name.startswith("hisparse")])
def test_presets(name):
    model = build(max_position_embeddings=8192)
    cache = kvsparse_hf.load_preset(name, model)
    assert isinstance(cache, HiSparseCache) and cache.options.budget == 2048
    forward(model, tokens(100), cache)
    decode(model, cache, tokens(3))


def test_a_layer_that_offloads_is_not_read_by_others():
    mine, _, _ = started(build())
    assert not type(mine.sparse_layers[0]).is_readable()


def test_an_unknown_selection_of_a_file_is_damage(tmp_path):
    model = build()
    mine, _, _ = started(model, **LOKI)
    mine.save(tmp_path)
    meta = (tmp_path / "cache.json").read_text()
    (tmp_path / "cache.json").write_text(meta.replace('"slots": 12', '"slots": 13'))
    with pytest.raises(KVSparseError, match="damaged"):
        kvsparse_hf.SparseCache.load(tmp_path, model)
