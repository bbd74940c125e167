"""Expected attention against explicit rotation matrices and a Monte Carlo estimate."""

import pytest
import torch
from test_token_window import periodic_run
from token_driver import SCALE, Driver, tiny_config
from token_oracles import expected_choice, rotation_matrix
from transformers import LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from kvsparse_hf import ExpectedAttentionCache, OptionError, UnsupportedModelError
from kvsparse_hf.hf.compat import CACHE_ARGUMENT
from kvsparse_hf.hf.rotary import FutureRotation
from kvsparse_hf.policy.expected import expected_attention, query_statistics


def rule(inv_freq, prompt=None, observed=None, sinks=4, recent=0, future=16, epsilon=0.0, covariance=True, vnorm=True):
    """All queries of the prompt at its end, the newest `observed` ones later."""

    def choose(row, head, read, count):
        newest = read[-1]
        first = 0 if prompt is None or newest < prompt else max(newest - observed + 1, 0)
        queries = list(range(first, newest + 1))
        return expected_choice(
            row, head, SCALE, read, queries, newest, inv_freq, count, sinks, recent, future, epsilon, covariance, vnorm
        )

    return choose


def inv_freq_of(cache):
    return cache.sparse_layers[0].policy.rotation.inv_freq


@pytest.mark.parametrize("heads", [(2, 2), (4, 1), (8, 1), (8, 2)], ids=str)
def test_200_steps_of_choosing_anew(heads):
    cache = ExpectedAttentionCache(tiny_config(*heads), budget=24, future=16, recompress_every=25, observed=30)
    driver = Driver(cache, spread=0.7)
    driver.feed(60)
    periodic_run(driver, 60, 200, 24, 25, rule(inv_freq_of(cache), 60, 30))


@pytest.mark.parametrize(
    "options",
    [{}, dict(covariance=False), dict(value_norm=False), dict(epsilon=0.02), dict(sinks=0, recent=5), dict(sinks=7, future=1)],
    ids=str,
)
def test_options_and_padding(options):
    cache = ExpectedAttentionCache(tiny_config(), budget=24, **{"future": 16, **options})
    driver = Driver(cache, pads=(0, 13, 50), spread=0.7)
    driver.feed(70)
    names = {"value_norm": "vnorm"}
    choose = rule(inv_freq_of(cache), **{names.get(name, name): value for name, value in options.items()})
    for row in range(3):
        n = driver.rows[row].length
        for head in range(2):
            read = list(range(n))
            assert driver.kept(row)[head] == (read if n <= 24 else choose(driver.rows[row], head, read, 24))


def test_closed_form_against_monte_carlo():
    """E exp(s q·k) for Gaussian q."""
    torch.manual_seed(0)
    root = torch.randn(8, 8, dtype=torch.float64) * 0.4
    mean, keys = torch.randn(8, dtype=torch.float64), torch.randn(5, 8, dtype=torch.float64)
    draws = mean + torch.randn(1_000_000, 8, dtype=torch.float64) @ root.T
    estimate = torch.exp(draws @ keys.T * SCALE).mean(0)
    got = expected_attention(
        keys[None, None].float(), torch.ones(1, 1, 5, dtype=torch.bool), mean[None, None].float(), (root @ root.T)[None, None].float(),
        SCALE,
    )  # fmt: skip
    assert torch.allclose(got[0, 0].double(), estimate / estimate.sum(), rtol=5e-3)


def test_statistics_are_those_of_all_blocks():
    torch.manual_seed(0)
    x, counts = torch.randn(2, 3, 50, 4) + 5, torch.rand(2, 50) < 0.7
    parts = [(x[:, :, a:b], counts[:, a:b]) for a, b in ((0, 20), (20, 50))]
    mean, spread = query_statistics(lambda: iter(parts))
    for row in range(2):
        chosen = x[row][:, counts[row]].double()
        assert torch.allclose(mean[row].double(), chosen.mean(1), atol=1e-5)
        for head in range(3):
            assert torch.allclose(spread[row, head].double(), torch.cov(chosen[head].T, correction=0), atol=1e-5)


def test_average_rotation_is_the_mean_of_rotations():
    model = tiny_config(2, 2)
    rotation = FutureRotation(model, LlamaForCausalLM)
    x = torch.randn(1, 3, 8)
    want = x[0].double() @ (sum(rotation_matrix(100 + i, rotation.inv_freq) for i in range(20)) / 20).T
    assert torch.allclose(rotation.average(x, torch.tensor([100]), 20)[0].double(), want, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_queries_are_turned_back_exactly(family):
    """What the statistics see is the model's query before its rotary embedding, also behind a query norm."""
    torch.manual_seed(0)
    config = tiny_config(layers=1)
    if family == "qwen3":
        config = Qwen3Config(**{k: v for k, v in config.to_dict().items() if k in (
            "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
            "head_dim")})  # fmt: skip
    model = (Qwen3ForCausalLM if family == "qwen3" else LlamaForCausalLM)(config).eval()
    cache = ExpectedAttentionCache(model, budget=24, sinks=0)
    caught = {}
    policy = cache.sparse_layers[0].policy
    original = type(policy).scores

    def spy(self, candidates):
        caught["got"] = torch.cat([block for block, _ in self._queries(candidates)], dim=2)
        return original(self, candidates)

    projected = {}
    attention = model.model.layers[0].self_attn
    last = attention.q_norm if family == "qwen3" else attention.q_proj
    hook = last.register_forward_hook(lambda module, args, out: projected.update(q=out))
    try:
        type(policy).scores = spy
        model(torch.randint(0, 16, (1, 90)), **{CACHE_ARGUMENT: cache})
    finally:
        type(policy).scores = original
        hook.remove()
    want = projected["q"].reshape(1, 90, 4, 8).transpose(1, 2)
    assert torch.allclose(caught["got"], want, atol=1e-5)


def test_refuses_what_it_cannot_turn_back():
    with pytest.raises(UnsupportedModelError, match="dynamic"):
        ExpectedAttentionCache(tiny_config(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}), budget=24)
    with pytest.raises(OptionError):
        ExpectedAttentionCache(tiny_config(), budget=24, future=0)


def test_sinks_take_no_part():
    """The first tokens stay whatever their score, and do not change the others' scores."""
    kept = []
    for factor in (1.0, 30.0):
        driver = Driver(ExpectedAttentionCache(tiny_config(1, 1), budget=24, sinks=4), spread=0.7)
        q, k, v = driver.random(60)
        k[:, :, :4] *= factor
        driver.feed(60, (q, k, v))
        kept.append(driver.kept())
    assert kept[0] == kept[1] and kept[0][0][:4] == [0, 1, 2, 3]
