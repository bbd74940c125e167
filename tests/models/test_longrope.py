"""Phi-3 and its kin give up the cache of `generate()` when the text passes `original_max_position_embeddings`."""

import dataclasses

import pytest
import torch
from helpers import dense, forward, generate, positions, same_snapshot, seen, snapshot, tokens
from methods import ALL, AMPLE, BUDGET
from zoo import BY_NAME, build

from kvsparse_hf import FullCache, UnsupportedOperationError

ORIGINAL, NEW = 32, 12
by_method = pytest.mark.parametrize("case", [ALL[name] for name in ("full", "snapkv")], ids=lambda case: case.id)


def _model(name: str):
    entry = BY_NAME[name]
    options = {**entry.options, "original_max_position_embeddings": ORIGINAL}
    if "rope_parameters" in options:
        options["rope_parameters"] = {**options["rope_parameters"], "original_max_position_embeddings": ORIGINAL}
    return build(dataclasses.replace(entry, options=options))


@by_method
@pytest.mark.parametrize("name", ["phi-3-long", "phi-3", "phi-3.5-moe"])
def test_long_prompts_use_the_cache(case, name):
    model, ids = _model(name), tokens(40)
    mine, small = case.make(model, AMPLE), case.make(model)
    assert torch.equal(generate(model, ids, mine, NEW), generate(model, ids, dense(model), NEW))
    assert seen(mine) == 40 + NEW - 1
    generate(model, ids, small, NEW)
    if case.evicts:
        assert case.held(small) == {case.kept_after_decode(40, NEW - 1)}


@by_method
def test_nothing_to_recompute(case):
    """Without longrope the frequencies stay, and so does the cache. (Old versions drop their own and lose the text.)"""
    model, ids = _model("phi-3"), tokens(28)
    mine = case.make(model, AMPLE)
    assert torch.equal(generate(model, ids, mine, NEW), generate(model, ids, None, NEW, use_cache=False))
    assert seen(mine) == 28 + NEW - 1


@by_method
def test_passing_the_length_is_refused(case):
    model, ids = _model("phi-3-long"), tokens(28)
    whole = generate(model, ids, case.make(model, BUDGET), ORIGINAL - 28 + 1)
    assert whole.shape[1] == ORIGINAL - 28 + 1
    mine = case.make(model, BUDGET)
    with pytest.raises(UnsupportedOperationError, match="other rotary frequencies"):
        generate(model, ids, mine, NEW)
    assert seen(mine) == ORIGINAL


@by_method
def test_a_turn_that_passes_it_is_refused(case):
    model = _model("phi-3-long")
    mine = case.make(model, BUDGET)
    forward(model, tokens(20), mine)
    before = snapshot(mine)
    at = positions(torch.ones(1, 40))[:, -20:]
    with pytest.raises(UnsupportedOperationError, match="holds 20 tokens"):
        forward(model, tokens(20, seed=2), mine, position_ids=at)
    assert same_snapshot(snapshot(mine), before) and seen(mine) == 20
    with pytest.raises(UnsupportedOperationError, match="other rotary frequencies"):
        generate(model, torch.cat((tokens(20), tokens(20, seed=2)), dim=1), mine, 3)


def test_the_cache_is_true_elsewhere():
    assert FullCache(build(BY_NAME["llama-2"])) and not FullCache(build(BY_NAME["phi-3"]))
