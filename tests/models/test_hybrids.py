"""Hybrid models: their linear-attention layers keep Transformers' own state, which must follow every operation on the cache."""

import copy

import pytest
import torch
from helpers import decode, dense, forward, generate, left_pad, prefill, same_snapshot, snapshot, tokens
from methods import ALL
from zoo import BY_NAME, build

from kvsparse_hf import UnsupportedOperationError

HYBRIDS = [BY_NAME[name] for name in ("qwen-3-next", "qwen-3.5", "granite-4", "jamba", "bamba", "nemotron-h", "olmo-hybrid", "lfm-2")]
by_hybrid = pytest.mark.parametrize(
    "entry", [pytest.param(entry, id=entry.name, marks=() if entry.name in ("qwen-3-next", "lfm-2") else pytest.mark.slow)
              for entry in HYBRIDS if entry.exists and not entry.why])  # fmt: skip
by_method = pytest.mark.parametrize("case", [ALL["full"], ALL["snapkv"]], ids=lambda case: case.id)


def _states(cache) -> dict:
    """Copies of all tensors, those of linear layers included."""
    found = snapshot(cache)
    for index, layer in enumerate(cache.layers):
        for name in ("conv_states", "recurrent_states"):
            held = getattr(layer, name, None)
            held = held if isinstance(held, dict) else {0: held}
            found.update({(index, name, at): t.clone() for at, t in held.items() if t is not None})
    return found


@by_hybrid
@by_method
def test_fork_reorder_and_reset(entry, case):
    """Prompts of one length: a linear layer of some models reads padding, with Transformers' own cache as well."""
    model = build(entry)
    ids, after = tokens(30, 2), tokens(6, 2, seed=3)
    mine = case.make(model)
    prefill(model, mine, ids)
    whole = torch.ones_like(ids)
    fork, swapped = copy.deepcopy(mine), copy.deepcopy(mine)
    expected = decode(model, mine, after, whole)
    assert torch.equal(decode(model, fork, after, whole), expected)
    swapped.reorder_cache(torch.tensor([1, 0]))
    torch.testing.assert_close(decode(model, swapped, after.flip(0), whole).flip(0), expected, atol=1e-5, rtol=0)
    mine.reset()
    prefill(model, mine, ids)
    torch.testing.assert_close(decode(model, mine, after, whole), expected, atol=1e-5, rtol=0)


@by_hybrid
def test_beams(entry):
    model = build(entry)
    ids, mask = left_pad([tokens(20), tokens(13, seed=2)])
    expected, got = (generate(model, ids, cache, 8, attention_mask=mask, num_beams=3) for cache in (dense(model), ALL["full"].make(model)))
    assert torch.equal(got, expected)


@by_hybrid
@by_method
def test_what_cannot_be_taken_back_is_refused(entry, case):
    """Before any layer has changed."""
    model = build(entry)
    mine = case.make(model)
    prefill(model, mine, tokens(9))
    before = _states(mine)
    with pytest.raises(UnsupportedOperationError, match="linear"):
        mine.crop(-2)
    assert same_snapshot(_states(mine), before)
    mine.crop(0)
    assert same_snapshot(_states(mine), before)


@by_hybrid
def test_prompt_lookup_is_refused(entry):
    model = build(entry)
    ids = tokens(8).repeat(1, 3)
    with pytest.raises((UnsupportedOperationError, ValueError), match="linear|assist|stateful"):
        generate(model, ids, ALL["full"].make(model), 8, prompt_lookup_num_tokens=3)


@by_hybrid
def test_saving_is_refused(entry, tmp_path):
    model = build(entry)
    mine = ALL["snapkv"].make(model)
    forward(model, tokens(30), mine)
    with pytest.raises(UnsupportedOperationError, match="cannot be saved"):
        mine.save(tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


@by_hybrid
@by_method
def test_chunked_prefill(entry, case):
    model, ids = build(entry), tokens(36)
    expected = generate(model, ids, dense(model), 8, prefill_chunk_size=7)
    assert torch.equal(generate(model, ids, case.make(model, 512), 8, prefill_chunk_size=7), expected)
