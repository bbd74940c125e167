"""Plan files, published files, and everything that is refused."""

import json
from pathlib import Path

import pytest
import torch
from helpers import decode, forward, generate, kept_in_all_layers, tokens
from tiny_models import build
from token_driver import tiny_config

from kvsparse_hf import (
    DuoAttentionCache,
    HeadKVCache,
    KVSparseError,
    MoACache,
    OptionError,
    PresetError,
    get_method,
    load_preset,
)
from kvsparse_hf.plans import Plan, head_table

DATA = Path(__file__).parents[3] / "shared" / "data"
published = pytest.mark.skipif(not (DATA / "moa_rules").is_dir(), reason="the published rules and patterns lie outside this repository")
TABLE = [[1.0, 2.0], [3.0, 4.0]]
READERS = {"headkv": ("table", {"table": TABLE}), "duo": ("pattern", {"pattern": TABLE}), "moa": ("rules", {"alphas": TABLE, "betas": TABLE})}
METHOD = {"headkv": "headkv", "duo": "duo-attention", "moa": "moa"}


def plan_file(tmp_path, kind, model, suffix=".safetensors", **tensors):
    tensors = tensors or READERS[kind][1]
    path = tmp_path / f"plan{suffix}"
    Plan.of(kind, model, {name: torch.tensor(values) for name, values in tensors.items()}, samples=3).save(path)
    return path


def cache_of(kind, model, path, **more):
    return get_method(METHOD[kind])(model, **{READERS[kind][0]: path, **more})


@pytest.mark.parametrize("suffix", [".safetensors", ".yaml"])
@pytest.mark.parametrize("kind", READERS)
def test_a_plan_goes_to_a_file_and_back(tmp_path, kind, suffix):
    model = build()
    path = plan_file(tmp_path, kind, model, suffix)
    plan = Plan.load(path, kind, model)
    assert plan.facts == {"samples": 3}
    assert {name: tensor.tolist() for name, tensor in plan.tensors.items()} == READERS[kind][1]
    from_file, given = cache_of(kind, model, str(path)), cache_of(kind, model, READERS[kind][1].get(READERS[kind][0], READERS[kind][1]))
    assert from_file.plan == given.plan
    assert cache_of(kind, model, path).plan == given.plan  # a Path is fine
    ids = tokens(400)
    assert torch.equal(generate(model, ids, from_file, 8), generate(model, ids, given, 8))
    assert kept_in_all_layers(from_file) == kept_in_all_layers(given)


@pytest.mark.parametrize("kind", READERS)
def test_plans_of_another_model_are_refused(tmp_path, kind):
    path = plan_file(tmp_path, kind, build())
    with pytest.raises(PresetError, match="another model"):
        cache_of(kind, build(num_hidden_layers=3), str(path))
    with pytest.raises(PresetError, match="other weights"):
        cache_of(kind, build(seed=5), str(path))
    cache_of(kind, build().config, str(path))  # a config has no weights to compare
    other = "duo" if kind == "headkv" else "headkv"
    with pytest.raises(PresetError, match=f"one for '{kind}'"):
        cache_of(other, build(), str(path))


@pytest.mark.parametrize("kind", READERS)
def test_damaged_plans_are_refused(tmp_path, kind):
    model = build()
    with pytest.raises(PresetError, match="not readable"):
        cache_of(kind, model, str(tmp_path / "nothing.safetensors"))
    for suffix, content in ((".safetensors", b"junk"), (".yaml", b"- 1"), (".yaml", b"kind: [")):
        path = tmp_path / f"bad{suffix}"
        path.write_bytes(content)
        with pytest.raises(PresetError):
            cache_of(kind, model, str(path))
    with pytest.raises(PresetError, match="holds no|must hold"):
        cache_of(kind, model, str(plan_file(tmp_path, kind, model, something=TABLE)))


@pytest.mark.parametrize("kind", READERS)
def test_without_a_plan_the_error_names_the_command(kind):
    with pytest.raises(OptionError, match=f"kvsparse calibrate {kind}"):
        get_method(METHOD[kind])(tiny_config(layers=2))


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([[1.0, 2.0]], "shape"),  # a missing layer
        ([[1.0], [2.0]], "shape"),  # a missing head
        ([[1.0, 2.0], [3.0]], "no table|shape"),
        ([[1.0, float("nan")], [3.0, 4.0]], "not finite"),
        ([[1.0, float("inf")], [3.0, 4.0]], "not finite"),
        ([["a", 1], [2, 3]], "no table"),
    ],
    ids=str,
)
def test_tables_that_do_not_fit(kind, values, message):
    given = {"alphas": values, "betas": TABLE} if kind == "moa" else values
    with pytest.raises(PresetError, match=message):
        cache_of(kind, tiny_config(layers=2), given)


def test_importances_must_be_importances():
    for table in ([[0, 0], [0, 0]], [[1, -1], [1, 1]]):
        with pytest.raises(PresetError, match="not negative"):
            HeadKVCache(tiny_config(layers=2), table=table)


def test_published_headkv_json(tmp_path):
    """Scores by "layer-head", one per sample: their mean counts; a head that is missing is named."""
    path = tmp_path / "scores.json"
    scores = {f"{layer}-{head}": [layer + head + 0.5, layer + head + 1.5] for layer in range(2) for head in range(4)}
    path.write_text(json.dumps(scores))
    cache = HeadKVCache(tiny_config(layers=2), table=str(path))
    want = torch.tensor([[1.5, 3.5], [2.5, 4.5]]).double()
    assert torch.allclose(torch.tensor(cache.plan).double(), want / want.sum())
    del scores["1-2"]
    path.write_text(json.dumps(scores))
    with pytest.raises(PresetError, match="1-2"):
        HeadKVCache(tiny_config(layers=2), table=str(path))
    path.write_text("[1, 2]")
    with pytest.raises(PresetError, match="JSON"):
        HeadKVCache(tiny_config(layers=2), table=str(path))


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("adakv", dict(alpha=-0.1)),
        ("adakv", dict(alpha=1.1)),
        ("adakv", dict(alpha=float("nan"))),
        ("adakv", dict(scorer="h2o")),
        ("adakv", dict(formula="fair")),
        ("adakv", dict(scorer="expected-attention", decode="bounded")),
        ("adakv", dict(recompress_every=8)),  # shorter than the window
        ("headkv", dict(table=TABLE, beta=0.9)),
        ("headkv", dict(table=TABLE, temp=0.0)),
        ("duo-attention", dict(pattern=TABLE, sparsity=1.5)),
        ("duo-attention", dict(pattern=TABLE, recent=0)),
        ("moa", dict(rules={"alphas": TABLE, "betas": TABLE}, sinks=128)),
        ("moa", dict(rules={"alphas": TABLE, "betas": TABLE}, new_tokens=-1)),
    ],
    ids=str,
)
def test_options_out_of_range(method, options):
    with pytest.raises(KVSparseError):
        get_method(method)(tiny_config(layers=2), **options)


def test_rules_need_both_tables_of_one_shape():
    for rules in ({"alphas": TABLE}, {"alphas": TABLE, "betas": [[1.0] * 4] * 2}):
        with pytest.raises(PresetError, match="must hold|per layer"):
            MoACache(tiny_config(layers=2), rules=rules)


def test_query_heads_are_reduced_by_the_mean_of_their_own_group():
    """Head h reads key head h // group: [0, 4 | 1, 3], never [0, 1 | 4, 3]."""
    assert head_table([[0.0, 4.0, 1.0, 3.0]], 1, 2, 4, "it").tolist() == [[2.0, 2.0]]
    assert head_table([[0.0, 0.0, 1.0, 3.0]], 1, 2, 4, "it").tolist() == [[0.0, 2.0]]


# --- published files ---------------------------------------------------------------------------------------------------

SHAPES = {
    "gradientai--Llama-3-8B-Instruct-262k": (32, 32, 8),
    "lmsys--vicuna-7b-v1.5-16k": (32, 32, 32),
    "meta-llama--Llama-3.2-1B-Instruct": (16, 32, 8),
    "meta-llama--Llama-3.2-3B-Instruct": (28, 24, 8),
}


@published
@pytest.mark.parametrize("name", SHAPES)
def test_published_moa_rules_load_and_run(name):
    layers, heads, kv_heads = SHAPES[name]
    model = build(num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=4, hidden_size=96,
                  intermediate_size=32)  # fmt: skip
    cache = MoACache(model, rules=str(DATA / "moa_rules" / f"{name}.json"), new_tokens=24)
    forward(model, tokens(1000), cache)
    assert decode(model, cache, tokens(24, seed=3)).isfinite().all()
    n = 1024
    rules = json.loads((DATA / "moa_rules" / f"{name}.json").read_text())
    for layer, (alphas, betas) in enumerate(zip(rules["alphas"], rules["betas"], strict=True)):
        plain = [min(max(int(a + b * n), 0), n) for a, b in zip(alphas, betas, strict=True)]
        group = heads // kv_heads
        for head in range(kv_heads):
            span = max(sum(plain[head * group : (head + 1) * group]) / group, 128)
            span = int(-(-span // 64) * 64)
            held = kept_in_all_layers(cache)[layer][0][head] if layer in (0, layers - 1) else None
            if held is not None:
                assert held == ([*range(64), *range(n - span + 64, n)] if span < n else list(range(n)))


@published
def test_published_density_of_vicuna():
    """Mean spans over N at 4K, 8K and 16K, from the published plan: 0.484, 0.492 and 0.496."""
    config = tiny_config(32, 32, 4, 32)
    path = str(DATA / "moa_rules" / "lmsys--vicuna-7b-v1.5-16k.json")
    cache = MoACache(config, rules=path, new_tokens=0, multiple=1, minimum=65)
    for length, density in ((4096, 0.484), (8192, 0.492), (16384, 0.496)):
        spans = [layer.policy.span(head, length) for layer in cache.sparse_layers for head in layer.policy.rules]
        assert sum(spans) / len(spans) / length == pytest.approx(density, abs=0.0015)


@published
@pytest.mark.parametrize("name", ["Meta-Llama-3.1-8B-Instruct", "Mistral-7B-Instruct-v0.3"])
def test_published_duo_patterns_load_and_run(name):
    model = build(num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, head_dim=4, hidden_size=32, intermediate_size=32)
    cache = DuoAttentionCache(model, pattern=str(DATA / "duo_patterns" / f"{name}.tsv"))
    forward(model, tokens(500), cache)
    sizes = [len(head) for layer in kept_in_all_layers(cache) for head in layer[0]]
    assert sizes.count(320) == sizes.count(500) == 128
    assert decode(model, cache, tokens(5, seed=3)).isfinite().all()


@pytest.mark.parametrize("preset", ["adakv-1024", "kvzip-30"])
def test_presets_without_a_plan(preset):
    assert load_preset(preset, tiny_config()).method == preset.split("-")[0]


def test_presets_with_a_plan():
    table = [[1.0, 2.0]]
    assert load_preset("headkv-512", tiny_config(), table=table).options.beta == 1.1
    assert load_preset("duo-attention-50", tiny_config(), pattern=table).options.sinks == 64
    assert load_preset("moa", tiny_config(), rules={"alphas": table, "betas": table}).options.minimum == 128
