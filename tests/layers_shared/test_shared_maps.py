"""Bad maps are refused before anything changes; plans and presets lead to the maps they say."""

import pytest
import torch
import yaml
from helpers import forward, tokens
from tiny_models import build

import kvsparse_hf
from kvsparse_hf import (
    CLACache,
    KVSharerCache,
    KVSparseError,
    OptionError,
    PresetError,
    SnapKVCache,
    YOCOCache,
    load_preset,
)
from kvsparse_hf.hf.sharing import check_sources
from kvsparse_hf.methods.kvsharer import join_pairs
from kvsparse_hf.plans import Plan


def _model(**options):
    return build(num_hidden_layers=6, **options)


@pytest.mark.parametrize("make, words", [
    (lambda model: CLACache(model, groups=[[2, 1]]), "runs later"),
    (lambda model: CLACache(model, groups=[[1, 2], [2, 3]]), "two groups"),
    (lambda model: CLACache(model, groups=[[1, 1]]), "twice"),
    (lambda model: CLACache(model, groups=[[0, 6]]), "layer 6"),
    (lambda model: CLACache(model, groups=[[0, -1]]), "layer -1"),
    (lambda model: CLACache(model, groups=[[0, 1]], factor=2), "not both"),
    (lambda model: CLACache(model, factor=0), "factor"),
    (lambda model: CLACache(model, factor=2.5), "factor"),
    (lambda model: CLACache(model, groups="01"), "groups"),
    (lambda model: CLACache(model, inner="cla"), "map itself"),
    (lambda model: CLACache(model, inner="snapvk"), "'snapkv'"),
    (lambda model: CLACache(model, inner=["snapkv"]), "name of a method"),
    (lambda model: CLACache(model, inner="snapkv", windw=4), "'window'"),
    (lambda model: CLACache(model, budget=12), "budget"),
    (lambda model: CLACache(model, inner="snapkv", budget=12, window=13), "smaller than"),
    (lambda model: KVSharerCache(model), "calibrate kvsharer"),
    (lambda model: KVSharerCache(model, plan=[[1, 3]]), "does not run before"),
    (lambda model: KVSharerCache(model, plan=[[3, 3]]), "does not run before"),
    (lambda model: KVSharerCache(model, plan=[[3, 1], [3, 0]]), "twice"),
    (lambda model: KVSharerCache(model, plan=[[9, 1]]), "no layers"),
    (lambda model: KVSharerCache(model, plan=[[3, 1, 0]]), "pairs"),
    (lambda model: KVSharerCache(model, plan=[[3.0, 1.0]]), "pairs"),
    (lambda model: KVSharerCache(model, plan=["a"]), "plan"),
    (lambda model: KVSharerCache(model, plan=[[3, 1]], shared=2), "the plan has 1"),
])
def test_bad_options(make, words):
    model = _model()
    with pytest.raises(KVSparseError, match=words):
        make(model)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("sources, words", [
    ([0, 1, 2, 3, 5, 5], "runs later"),
    ([1, 0, 2, 3, 4, 5], "runs later"),  # a cycle
    ([0, 0, 1, 3, 4, 5], "name the owner"),  # a chain
    ([0, 1, 2], "3 layers"),
    ([0, 1, 2, 3, 4, 6], "no layer"),
    ([0, 1, 2, 3, 4, -1], "no layer"),
    ([0, 1, 2, 3, 4, True], "no layer"),
    ([0, 1, 2, 3, 4, 2.0], "no layer"),
])
def test_bad_maps(sources, words):
    with pytest.raises(OptionError, match=words):
        check_sources(sources, list(range(6)), _model().config, "map")


def test_sliding_layers_neither_read_nor_are_read():
    model = build("gemma3")  # sliding, full, sliding, full
    for groups in ([[0, 1]], [[1, 2]], [[0, 2]]):
        with pytest.raises(OptionError, match="no plain full attention"):
            CLACache(model, groups=groups)
    mine = CLACache(model, factor=2)
    assert mine.layer_map.sources == (0, 1, 2, 1)
    assert type(mine.layers[0]).__name__ == "DynamicSlidingWindowLayer"


def test_layers_of_another_shape_cannot_share():
    """As the config tells them apart, where the running version can, or as the layers' own keys show."""
    config = _model().config

    class PerLayer:
        num_hidden_layers, hidden_size, num_attention_heads = 6, 64, 4
        per_layer_config = [config] * 5 + [build(num_key_value_heads=1).config]

    with pytest.raises(OptionError, match="2 key/value heads of dimension 16|1 key/value heads of dimension 16"):
        check_sources([0, 1, 2, 3, 4, 4], list(range(6)), PerLayer(), "map")
    assert check_sources([0, 1, 2, 3, 3, 5], list(range(6)), PerLayer(), "map") == (0, 1, 2, 3, 3, 5)


def test_pairs_collapse_chains():
    assert join_pairs([(5, 2), (2, 1), (4, 2), (1, 0)], 6) == [0, 0, 0, 3, 0, 0]
    assert join_pairs([], 3) == [0, 1, 2]


@pytest.mark.parametrize("shared, sources", [(None, (0, 1, 1, 3, 0, 1)), (1, (0, 1, 2, 3, 4, 2)), (1 / 3, (0, 1, 1, 3, 4, 1)), (0, (0, 1, 2, 3, 4, 5))])
def test_a_plan_file(shared, sources, tmp_path):
    model, path = _model(), tmp_path / "plan.safetensors"
    Plan.of("kvsharer", model, {"pairs": torch.tensor([[5, 2], [2, 1], [4, 0]])}).save(path)
    mine = KVSharerCache(model, plan=path, shared=shared)
    assert mine.layer_map.sources == sources
    forward(model, tokens(9), mine)
    with pytest.raises(PresetError, match="another model"):
        KVSharerCache(build(num_hidden_layers=4), plan=path)
    with pytest.raises(PresetError, match="other weights"):
        KVSharerCache(build(num_hidden_layers=6, seed=5), plan=path)
    Plan.of("duo", model, {"pattern": torch.ones(6, 2)}).save(path)
    with pytest.raises(PresetError, match="'duo'"):
        KVSharerCache(model, plan=path)


def test_presets_name_an_inner_method(tmp_path):
    model, path = _model(), tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump({"method": "cla", "factor": 3, "inner": "snapkv", "budget": 12, "window": 4}))
    mine = load_preset(path, model)
    assert isinstance(mine, SnapKVCache) and mine.options.budget == 12 and mine.layer_map.sources == (0, 0, 0, 3, 3, 3)
    path.write_text(yaml.safe_dump({"method": "cla", "factor": 3, "budget": 12}))
    with pytest.raises(PresetError, match="no option 'budget'"):
        load_preset(path, model)


@pytest.mark.parametrize("name", ["cla", "cla-2", "cla-2-snapkv-1024", "yoco", "yoco-1024"])
def test_shipped_presets(name):
    mine = load_preset(name, _model())
    assert mine.layer_map.shares
    assert isinstance(mine, YOCOCache if name.startswith("yoco") else CLACache)


def test_the_classes_are_made_once():
    model = _model()
    first, second = CLACache(model, inner="snapkv"), CLACache(model, inner="snapkv", factor=3)
    assert type(first) is type(second) and type(first) is not type(CLACache(model))
    assert kvsparse_hf.get_method("cla") is CLACache and isinstance(first, CLACache)
    assert (first.action, first.prefix_safe, first.paper) == ("evict", False, CLACache.paper)
