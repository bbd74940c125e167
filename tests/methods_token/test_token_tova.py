"""TOVA against its rule in fp64."""

from dataclasses import replace

import pytest
import torch
from token_driver import SCALE, Driver, tiny_config
from token_oracles import TOVA

from kvsparse_hf import SnapKVCache, TOVACache
from kvsparse_hf.methods.snapkv import WindowPolicy
from kvsparse_hf.methods.tova import LastQueryPolicy
from kvsparse_hf.policy.base import Candidates
from kvsparse_hf.policy.budgets import Budget


def check_run(driver: Driver, budget: int, prompt: int, steps: int) -> None:
    oracles = [TOVA(row, SCALE, budget) for row in driver.rows]
    given = [prompt - pad for pad in driver.pads]
    for row, oracle in enumerate(oracles):
        oracle.prompt(given[row])
        assert all(set(oracle.kept) <= set(kept) for kept in driver.kept(row))
    for step in range(steps):
        driver.feed(1)
        for row, oracle in enumerate(oracles):
            read = oracle.step(given[row] + step)
            assert driver.kept(row) == [read] * driver.kv_heads, (row, step)


@pytest.mark.parametrize("heads", [(2, 2), (4, 1), (8, 1), (8, 2)], ids=str)
def test_200_steps(heads):
    driver = Driver(TOVACache(tiny_config(*heads), budget=20))
    driver.feed(50)
    check_run(driver, 20, 50, 200)


def test_padding():
    driver = Driver(TOVACache(tiny_config(), budget=20), pads=(0, 9, 41))
    driver.feed(50)
    check_run(driver, 20, 50, 60)


@pytest.mark.parametrize("length", [1, 18, 19, 20, 21, 22])
def test_prompts_around_the_budget(length):
    driver = Driver(TOVACache(tiny_config(), budget=20, reserve=3))
    driver.feed(length)
    check_run(driver, 20, length, 30)


@pytest.mark.parametrize("budget", [1, 2])
def test_tiny_budgets(budget):
    driver = Driver(TOVACache(tiny_config(), budget=budget))
    driver.feed(5)
    check_run(driver, budget, 5, 10)


def test_is_a_window_of_one_over_all_heads():
    """Identity: window attention with one query, averaged over every query head of the layer."""
    driver = Driver(TOVACache(tiny_config(8, 2), budget=20))
    q, k, v = driver.random(40)
    positions, pad = torch.arange(40).expand(1, 2, -1), torch.zeros(1, 2, dtype=torch.long)
    candidates = Candidates(q, k, v, positions, pad, SCALE, 0.0, None, 0, 1)
    policy = LastQueryPolicy(Budget(tokens=20))
    mine = policy.scores(replace(candidates, memory=policy.observe(candidates)))
    window = WindowPolicy(Budget(tokens=20), window=1, kernel=1).scores(candidates)
    assert torch.allclose(mine[0, 0, :-1], window[0, :, :-1].mean(0), atol=1e-6)
    assert torch.equal(mine[0, 0], mine[0, 1])


def test_ties_keep_the_earlier_and_may_lose_the_newest():
    """All weights equal: nothing is protected, so the newest token goes first, as published."""
    driver = Driver(TOVACache(tiny_config(2, 1), budget=6))
    zeros = tuple(torch.zeros_like(t) for t in driver.random(10))
    driver.feed(10, zeros)
    assert driver.kept()[0] == [0, 1, 2, 3, 4, 5]
    for step in range(5):
        driver.feed(1, tuple(t[:, :, :1] for t in zeros))
        assert driver.kept()[0] == [0, 1, 2, 3, 4, 10 + step]


def test_keep_last():
    """`recent=2` keeps a token for the step after its own."""
    driver = Driver(TOVACache(tiny_config(2, 1), budget=6, recent=2))
    zeros = tuple(torch.zeros_like(t) for t in driver.random(10))
    driver.feed(10, zeros)
    for step in range(5):
        driver.feed(1, tuple(t[:, :, :1] for t in zeros))
        assert driver.kept()[0] == [0, 1, 2, 3, 9 + step, 10 + step]


def test_turns_choose_by_their_last_query():
    driver = Driver(TOVACache(tiny_config(), budget=20))
    driver.feed(30)
    before = driver.kept()[0]
    driver.feed(11)
    oracle = TOVA(driver.rows[0], SCALE, 20)
    oracle.kept = before + list(range(30, 41))
    oracle.kept = sorted(sorted(oracle._last(40, oracle.kept).items(), key=lambda item: (-item[1], item[0]))[:20])
    assert driver.kept() == [[j for j, _ in oracle.kept]] * 2


def test_differs_from_per_head_windows():
    """One set per layer, where SnapKV's window of one would choose per head."""
    tova = Driver(TOVACache(tiny_config(), budget=20))
    snap = Driver(SnapKVCache(tiny_config(), budget=20, window=1, kernel=1))
    for driver in (tova, snap):
        driver.feed(60)
    assert tova.kept()[0] == tova.kept()[1]
    assert snap.kept()[0] != snap.kept()[1]
