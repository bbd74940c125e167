"""Calibration: influence against finite differences and autograd, plans against every assignment, runs that are interrupted."""

import itertools
import sys

import pytest
import torch
from helpers import forward, generate, kept_in_all_layers, tokens
from tiny_models import build
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from kvsparse_hf import DuoAttentionCache, HeadKVCache, KVSparseError, MoACache
from kvsparse_hf.calibrate.duo import calibrate_duo, look_back
from kvsparse_hf.calibrate.headkv import _needle_attention, calibrate_headkv, needle_sample
from kvsparse_hf.calibrate.moa import calibrate_moa, masking_effect, profile
from kvsparse_hf.calibrate.planning import choose_rules, costs, rule_grid
from kvsparse_hf.calibrate.probe import observed_attention
from kvsparse_hf.plans import Plan


def repeating(model, length=400):
    """A text that this model predicts right: one token that follows itself."""
    for token in range(3, 97):
        ids = torch.full((1, 60), token)
        if bool((forward(model, ids)[0, 20:].argmax(-1) == token).all()):
            return torch.full((length,), token)
    pytest.fail("no token of this model follows itself")


# --- the probe ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_probe_changes_nothing(attention):
    model = build(attention=attention)
    ids, seen = tokens(20), []
    expected = forward(model, ids)
    with observed_attention(model, lambda *args: seen.append(args)):
        assert torch.equal(forward(model, ids), expected)
    assert model.config._attn_implementation == attention
    assert [args[0] for args in seen] == [0, 1]
    _, query, key, value, scale, out = seen[0]
    assert query.shape == (1, 4, 20, 16) and key.shape == value.shape == (1, 2, 20, 16) and out.shape == (1, 20, 4, 16) and scale == 0.25
    forward(model, ids)
    assert len(seen) == 2


def test_the_probe_leaves_sliding_layers_out():
    model, seen = build("gemma3"), []
    with observed_attention(model, lambda *args: seen.append(args[0])):
        forward(model, tokens(20))
    assert seen == [1, 3]


# --- HeadKV ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0.0, 0.4, 1.0])
def test_a_sample_hides_its_needle_once_and_ends_with_it(depth):
    text = torch.arange(10_000)
    ids, at = needle_sample(text, depth, 3, 300, 24, 4)
    assert len(ids) == 300 and at == round(depth * 252)
    assert torch.equal(ids[at : at + 24], ids[-24:])
    assert len(ids.unique()) == 276  # the needle came from elsewhere


def test_scores_of_a_copying_and_of_a_blind_head():
    """Head 0 looks at what followed the last occurrence of its token; head 1 at the first position; both read one key head."""
    length, at, needle, answered = 60, 10, 8, 5
    key = torch.eye(length)[None]
    query = torch.zeros(2, length, length)
    for j in range(answered):
        query[0, length - answered - 1 + j, at + needle - answered + j] = 50.0
    query[1, :, 0] = 50.0
    assert _needle_attention(query, key, 1.0, at, needle, answered, "copy").tolist() == [[1.0] * 5, [0.0] * 5]
    mass = _needle_attention(query, key, 1.0, at, needle, answered, "mass")
    assert torch.allclose(mass[0], torch.ones(5)) and float(mass[1].max()) < 1e-6


def test_headkv_plan_is_made_resumed_and_used(tmp_path):
    model = build()
    text = repeating(model)
    options = dict(samples=4, length=100, needle=12)
    whole = calibrate_headkv(model, text, tmp_path / "whole.safetensors", **options)
    assert whole.tensors["table"].shape == (2, 4) and whole.facts["copied"] > 0.5

    def stop(done, of):
        if done == 2:
            raise KeyboardInterrupt

    path = tmp_path / "part.safetensors"
    with pytest.raises(KeyboardInterrupt):
        calibrate_headkv(model, text, path, **options, progress=stop)
    counted = []
    again = calibrate_headkv(model, text, path, **options, progress=lambda done, of: counted.append((done, of)))
    assert counted == [(3, 4), (4, 4)]
    assert torch.equal(again.tensors["table"], whole.tensors["table"])
    assert not list(tmp_path.glob("*.partial"))
    cache = HeadKVCache(model, budget=20, table=path, window=4)
    generate(model, tokens(80), cache, 4)
    assert sum(len(h) for layer in kept_in_all_layers(cache) for h in layer[0]) == 4 * 23


def test_an_unfinished_run_of_other_settings_is_not_continued(tmp_path):
    model = build()
    text = repeating(model)

    def stop(done, of):
        raise KeyboardInterrupt

    path = tmp_path / "plan.safetensors"
    with pytest.raises(KeyboardInterrupt):
        calibrate_headkv(model, text, path, samples=4, length=100, needle=12, progress=stop)
    counted = []
    calibrate_headkv(model, text, path, samples=4, length=110, needle=12, progress=lambda done, of: counted.append(done))
    assert counted == [1, 2, 3, 4]


def test_headkv_refuses_what_tells_nothing(tmp_path):
    model = build()
    with pytest.raises(KVSparseError, match="needs samples"):
        calibrate_headkv(model, tokens(50)[0], tmp_path / "x.safetensors", length=100)
    with pytest.raises(KVSparseError, match="copied no needle"):
        calibrate_headkv(model, tokens(2000)[0] * 0 + torch.arange(2000) % 90 + 3, tmp_path / "x.safetensors", samples=1, length=100, seed=2)


# --- DuoAttention ------------------------------------------------------------------------------------------------------


def test_look_back_of_known_attention():
    """Without rotation every position is alike: 0.5. A kernel that decays looks at its neighbours: less."""

    def still(x, shift):
        return x

    query, key = torch.randn(4, 8), torch.randn(2, 8)
    assert torch.allclose(look_back(query, key, 1.0, 500, still), torch.full((2,), 0.501), atol=1e-4)

    def near(x, shift):  # logit -|i - j|: position in one channel, 1 in the other
        return torch.stack((shift.float().expand(x.shape[:2]), torch.ones(x.shape[:2])), -1) if x.shape[1] > 1 else torch.tensor([[[1.0, 0.0]]]).expand(x.shape[0], 1, 2)

    assert float(look_back(torch.zeros(2, 2), torch.zeros(1, 2), 1.0, 500, near)) < 0.01


def test_duo_plan_is_made_resumed_and_used(tmp_path):
    model = build()
    windows = [tokens(64, seed=s)[0] for s in range(4)]
    whole = calibrate_duo(model, windows, tmp_path / "whole.safetensors")
    assert whole.tensors["pattern"].shape == (2, 2) and 0 < float(whole.tensors["pattern"].min()) < 1

    def stop(done, of):
        if done == 2:
            raise KeyboardInterrupt

    path = tmp_path / "part.safetensors"
    with pytest.raises(KeyboardInterrupt):
        calibrate_duo(model, windows, path, progress=stop)
    assert torch.equal(calibrate_duo(model, windows, path).tensors["pattern"], whole.tensors["pattern"])
    cache = DuoAttentionCache(model, pattern=path, sinks=2, recent=6)
    generate(model, tokens(40), cache, 4)
    assert sorted(len(h) for layer in kept_in_all_layers(cache) for h in layer[0]) == [8, 8, 43, 43]
    with pytest.raises(KVSparseError, match="no text"):
        calibrate_duo(model, [], path)


def test_means_are_those_of_unrotated_queries():
    """Position does not matter to them: two copies of a window have the mean of one, and rotation is undone exactly."""
    from kvsparse_hf.calibrate.duo import _means
    from kvsparse_hf.hf.rotary import KeyRotation

    model = build(num_hidden_layers=1)
    window = tokens(30)[0]
    rotation = KeyRotation(model.config, type(model))
    found = _means(model, window, [rotation])
    attention = model.model.layers[0].self_attn
    hidden = model.model.layers[0].input_layernorm(model.get_input_embeddings()(window))
    assert torch.allclose(found["query"][0], attention.q_proj(hidden).view(30, 4, 16).mean(0), atol=1e-5)
    assert torch.allclose(found["key"][0], attention.k_proj(hidden).view(30, 2, 16).mean(0), atol=1e-5)


# --- MoA ---------------------------------------------------------------------------------------------------------------


def test_influence_is_the_finite_difference():
    """For a loss that is linear in the attention, masking and renormalising changes it by exactly this much."""
    weights = torch.rand(6, 9, dtype=torch.float64).softmax(-1)
    gradient = torch.randn(6, 9, dtype=torch.float64)
    effect = masking_effect(weights, gradient)
    for i, j in itertools.product(range(6), range(9)):
        masked = weights.clone()
        masked[i, j] = 0
        masked[i] /= masked[i].sum()
        assert torch.isclose(effect[i, j], ((masked - weights) * gradient).sum(), atol=1e-12)
    first = torch.tensor([[1.0, 0.0, 0.0]])
    assert torch.allclose(masking_effect(first, torch.tensor([[3.0, 5.0, 7.0]])), torch.tensor([[-3.0, 0.0, 0.0]]))


def test_profile_equals_autograd_through_the_attention_matrix():
    block, length = 8, 64
    model = build(attention="eager")
    window = tokens(length)[0]
    found = profile(model, window, 2, block, 0.25)
    assert all(parameter.requires_grad for parameter in model.parameters())
    with torch.enable_grad():
        out = model(window[None], output_attentions=True, use_cache=False)
        for weights in out.attentions:
            weights.retain_grad()
        torch.nn.functional.cross_entropy(out.logits[0, -17:-1], window[-16:]).backward()
    for layer, weights in enumerate(out.attentions):
        effect = masking_effect(weights[0].detach(), weights.grad[0]).abs().view(2, 2, length, length).sum(1)
        blocks = effect.view(2, 8, block, 8, block).sum((2, 4))  # [H, query block, key block]
        for distance in range(8):
            want = sum(blocks[:, q, q - distance] for q in range(distance + 1, 8)) if distance < 7 else torch.zeros(2)
            torch.testing.assert_close(found[layer, :, distance], want, rtol=1e-4, atol=1e-7)


def test_the_grid_of_rules():
    rules = rule_grid([2048, 4096, 8192], 64)
    assert (0.0, 0.5) in rules and (-1024.0, 1.0) in rules and (1024.0, 0.0) in rules
    for alpha, beta in rules:
        assert 0 < alpha + beta * 2048 and all(alpha + beta * n <= n for n in (2048, 4096, 8192))


def test_the_plan_is_the_best_of_all(monkeypatch):
    """Two layers of two heads, six rules: against every assignment that keeps density and rules per layer."""
    pytest.importorskip("scipy")
    block, generator = 8, torch.Generator().manual_seed(5)
    influence = {64: torch.rand(2, 3, 8, generator=generator).double(), 128: torch.rand(2, 3, 16, generator=generator).double()}
    rules = [(16.0, 0.0), (0.0, 0.25), (32.0, 0.0), (0.0, 0.5), (0.0, 0.75), (0.0, 1.0)]
    masked, density = costs(influence, rules, block)
    for limit in (0.3, 0.5, 0.62):
        best = min(
            (sum(masked[h // 3, h % 3, r] for h, r in enumerate(assigned)) / 2, assigned)
            for assigned in itertools.product(range(6), repeat=6)
            if max(len(set(assigned[:3])), len(set(assigned[3:]))) <= 2 and all(d[list(assigned)].mean() <= limit + 1e-9 for d in density)
        )
        chosen, facts = choose_rules(influence, rules, limit, block)
        value = sum(masked[layer, head, chosen[layer][head]] for layer in range(2) for head in range(3)) / 2
        assert value <= best[0] * 1.006 and facts["masked"] == pytest.approx(value)
        assert all(len(set(layer)) <= 2 for layer in chosen) and max(facts["reached"].values()) <= limit + 1e-6
    with pytest.raises(KVSparseError, match="smallest spans"):
        choose_rules(influence, rules, 0.05, block)


def test_costs_count_what_lies_outside():
    influence = {64: torch.tensor([[[8.0, 4.0, 2.0, 1.0, 0.0, 0.0, 0.0, 0.0]]]).double()}
    masked, density = costs(influence, [(16.0, 0.0), (24.0, 0.0), (0.0, 1.0)], 8)
    # A span of 16 holds the sink block and distance 0; of 24 also distance 1.
    assert (masked[0, 0] * 15).round(6).tolist() == [7.0, 3.0, 0.0]
    assert density.tolist() == [[0.25, 0.375, 1.0]]


def test_moa_plan_is_made_resumed_and_used(tmp_path):
    pytest.importorskip("scipy")
    model = build()
    windows = {64: [tokens(64, seed=s)[0] for s in range(2)], 128: [tokens(128, seed=9)[0]]}

    def stop(done, of):
        if done == 2:
            raise KeyboardInterrupt

    path = tmp_path / "part.safetensors"
    with pytest.raises(KeyboardInterrupt):
        calibrate_moa(model, windows, path, block=8, progress=stop)
    again = calibrate_moa(model, windows, path, block=8)
    whole = calibrate_moa(model, windows, tmp_path / "whole.safetensors", block=8)
    assert torch.equal(again.tensors["alphas"], whole.tensors["alphas"]) and torch.equal(again.tensors["betas"], whole.tensors["betas"])
    assert max(whole.facts["reached"].values()) <= 0.5 + 1e-6
    cache = MoACache(model, rules=path, new_tokens=28, sinks=8, minimum=16, multiple=8)
    forward(model, tokens(100), cache)
    held = [len(h) for layer in kept_in_all_layers(cache) for h in layer[0]]
    assert held == [min(100, layer.policy.span(head, 128)) for layer in cache.sparse_layers for head in layer.policy.rules]
    assert sum(held) / 4 / 128 <= 0.5 + 1e-6
    for bad in ({60: [tokens(60)[0]]}, {64: []}):
        with pytest.raises(KVSparseError):
            calibrate_moa(model, bad, path, block=8)


def test_without_scipy_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(KVSparseError, match="calibrate"):
        choose_rules({64: torch.rand(1, 1, 8).double()}, [(16.0, 0.0)], 0.5, 8)


# --- the command line --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, a text, and a tokenizer to which every word is the token that the model says again and again."""
    folder = tmp_path_factory.mktemp("model")
    model = build()
    with torch.no_grad():
        word = f"w{int(repeating(model)[0])}"
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(97)}, unk_token=word))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=word).save_pretrained(folder)
    model.save_pretrained(folder)
    (folder / "text.txt").write_text("word " * 2000)
    return folder


@pytest.mark.parametrize("kind", ["headkv", "duo", "moa"])
def test_the_command_writes_a_plan_of_the_model(folder, tmp_path, kind):
    from kvsparse_hf.cli import app

    if kind == "moa":
        pytest.importorskip("scipy")
    options = {
        "headkv": ["--samples", "4", "--length", "100", "--needle", "12"],
        "duo": ["--windows", "2", "--length", "64"],
        "moa": ["--length", "256", "--samples", "1"],
    }[kind]
    path = tmp_path / "plan.safetensors"
    done = CliRunner().invoke(app, ["calibrate", kind, str(folder), str(folder / "text.txt"), "-o", str(path), "--device", "cpu", *options])
    assert done.exit_code == 0, done.output
    Plan.load(path, kind, build())
    done = CliRunner().invoke(app, ["calibrate", kind, str(folder / "nothing"), str(folder / "text.txt")])
    assert done.exit_code != 0
