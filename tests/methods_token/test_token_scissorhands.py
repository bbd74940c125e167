"""Scissorhands against its rule in fp64: the history of every query is kept whole by the oracle."""

import pytest
import torch
from token_driver import SCALE, Driver, tiny_config
from token_oracles import Scissorhands
from transformers import LlamaForCausalLM

from kvsparse_hf import ScissorhandsCache
from kvsparse_hf.hf.compat import CACHE_ARGUMENT
from kvsparse_hf.policy.depth import weighted
from kvsparse_hf.policy.history import count_bits


def check_run(driver: Driver, prompt: int, steps: int, **rule) -> None:
    oracles = [[Scissorhands(row, head, SCALE, **rule) for head in range(driver.kv_heads)] for row in driver.rows]
    given = [prompt - pad for pad in driver.pads]
    for row, heads in enumerate(oracles):
        for head, oracle in enumerate(heads):
            oracle.prompt(given[row])
            assert driver.kept(row)[head] == oracle.kept, (row, head)
    for step in range(steps):
        driver.feed(1)
        for row, heads in enumerate(oracles):
            for head, oracle in enumerate(heads):
                assert driver.kept(row)[head] == oracle.step(given[row] + step), (row, head, step)
    for row, heads in enumerate(oracles):
        for head, oracle in enumerate(heads):
            bits = driver.remembered("history", row, head)
            for position in oracle.kept:
                assert int(count_bits(bits[position])) == sum(line.get(position, False) for line in oracle.history)


@pytest.mark.parametrize("heads", [(2, 2), (4, 1), (8, 1), (8, 2)], ids=str)
def test_200_steps(heads):
    driver = Driver(ScissorhandsCache(tiny_config(*heads), budget=24, window=40, recent=5))
    driver.feed(60)
    check_run(driver, 60, 200, budget=24, window=40, recent=5, dropped=12)


@pytest.mark.parametrize("window", [2, 30, 31, 32, 62, 63, 400])
def test_windows_at_the_edges_of_a_word(window):
    driver = Driver(ScissorhandsCache(tiny_config(2, 1), budget=16, window=window, recent=3))
    driver.feed(50)
    check_run(driver, 50, 70, budget=16, window=window, recent=3, dropped=8)


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        (dict(use="max"), dict(use="max", dropped=12)),
        (dict(drop=0.25, sinks=2), dict(dropped=6, sinks=2)),
        (dict(drop=0.01), dict(dropped=1)),
        (dict(drop=0.99), dict(dropped=19)),
    ],
    ids=lambda value: str(value),
)
def test_options_and_padding(options, rule):
    """Rows fill up at different times, each drops when the row alone would."""
    driver = Driver(ScissorhandsCache(tiny_config(4, 2), budget=24, window=20, recent=5, **options), pads=(0, 11, 47))
    driver.feed(60)
    check_run(driver, 60, 60, budget=24, window=20, recent=5, **rule)


@pytest.mark.parametrize("length", [1, 23, 24, 25])
def test_prompts_around_the_budget(length):
    driver = Driver(ScissorhandsCache(tiny_config(), budget=24, window=20, recent=5, reserve=4))
    driver.feed(length)
    check_run(driver, length, 40, budget=24, window=20, recent=5, dropped=12)


def test_history_survives_turns():
    """A turn's queries enter the ring like decoded ones."""
    driver = Driver(ScissorhandsCache(tiny_config(2, 1), budget=64, window=20, recent=5))
    driver.feed(30)
    for tokens in (7, 1, 1, 12):
        driver.feed(tokens)
    oracle = Scissorhands(driver.rows[0], 0, SCALE, budget=64, window=20, recent=5, dropped=32)
    for t in range(51):
        oracle._observe(t, list(range(t + 1)))
    bits = driver.remembered("history", 0, 0)
    assert [int(count_bits(bits[j])) for j in range(51)] == [sum(row.get(j, False) for row in oracle.history) for j in range(51)]


def test_a_token_that_was_never_below_the_average_stays():
    driver = Driver(ScissorhandsCache(tiny_config(1, 1), budget=16, window=20, recent=2), spread=0.0)
    q, k, v = driver.random(40)
    q[..., 0], k[..., 0] = 1.0, 0.0
    k[:, :, 9, 0] = 20.0
    driver.feed(40, (q, k, v))
    for _ in range(100):
        q, k, v = (x[:, :, :1].clone() for x in driver.random(1))
        q[..., 0] = 1.0
        driver.feed(1, (q, k, v))
        assert 9 in driver.kept()[0] and len(driver.kept()[0]) <= 16


def test_all_equal_attention_ties():
    """Uniform attention is never below the average: counters tie at 0, then attention received, which is less for newer."""
    driver = Driver(ScissorhandsCache(tiny_config(1, 1), budget=16, window=20, recent=3), spread=0.0)
    driver.feed(40)
    check_run(driver, 40, 40, budget=16, window=20, recent=3, dropped=8)


def test_layer_weights_keep_the_total():
    model = LlamaForCausalLM(tiny_config(layers=4)).eval()
    cache = ScissorhandsCache(model, budget=25, recent=2, layer_weights=[1, 1, 2, 3])
    want = weighted(25, [1, 1, 2, 3]).tolist()
    assert sum(want) == 100 and want == sorted(want)
    ids = torch.randint(0, 16, (1, 200))
    model(ids[:, :190], **{CACHE_ARGUMENT: cache})
    assert [layer.store.length.tolist() for layer in cache.sparse_layers] == [[[n, n]] for n in want]
    for t in range(190, 200):
        model(ids[:, t : t + 1], **{CACHE_ARGUMENT: cache})
        assert all(int(layer.store.length.max()) <= n for layer, n in zip(cache.sparse_layers, want, strict=True))
