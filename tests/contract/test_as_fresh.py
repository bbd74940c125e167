"""What ends by itself: a first prompt that was refused, and the time of drafts."""

import pytest
import torch
from helpers import forward, generate, kept_in_all_layers, seen, tokens
from methods import ALL, METHODS
from tiny_models import build
from transformers.cache_utils import Cache

from kvsparse_hf import BudgetError, HiSparseCache, SnapKVCache, TieredCache

QUEST = dict(page_size=2, sinks=2, recent=2, dense_layers=0)
# Host memory for one layer of a long prompt, and the short prompts that fit.
TIGHT = {
    "hisparse": lambda model: HiSparseCache(model, budget=12, **QUEST, host_bytes=60_000, reserve=4),
    "tiered": lambda model: TieredCache(model, hbm=0.25, host=0.75, sinks=1, recent=1, host_bytes=60_000, reserve=4),
    "snapkv-offload": lambda model: SnapKVCache(
        model, budget=12, window=4, kernel=3, action="offload", host_bytes=60_000, reserve=4
    ),
    "bytes": lambda model: SnapKVCache(model, budget="3KiB", window=1, kernel=1),
}


@pytest.mark.parametrize("family", ["llama-gqa2", "gemma3"])
@pytest.mark.parametrize("name", TIGHT)
def test_a_first_prompt_that_was_refused_never_came(name, family):
    """Whatever layers had taken it already, sliding ones too: the next prompt is read as by a fresh cache."""
    model = build(family)
    mine, fresh = TIGHT[name](model), TIGHT[name](model)
    rows = 8 if name == "bytes" else 1
    for _ in range(2):
        with pytest.raises(BudgetError):
            forward(model, tokens(300, rows), mine)
        assert seen(mine) == 0 and mine.report().seen == [] and mine.batch_size == -1
    assert torch.equal(generate(model, tokens(20), mine, 6), generate(model, tokens(20), fresh, 6))
    assert kept_in_all_layers(mine) == kept_in_all_layers(fresh) and seen(mine) == seen(fresh) == 25


DRAFTED = [case for case in METHODS if case.assisted]


@pytest.mark.skipif(not hasattr(Cache, "activate_past_recording"), reason="these versions do not announce drafts")
@pytest.mark.parametrize("family", ["llama-gqa2", "gemma3"])
@pytest.mark.parametrize("case", DRAFTED, ids=lambda case: case.id)
def test_the_time_of_drafts_ends_with_their_loop(case, family):
    """A later plain generate() on the same cache reads what the method selects, as after a plain generate()."""
    if family == "gemma3" and case not in (ALL["full"], ALL["quest"], ALL["tiered"]):
        return
    model = build(family)
    ids = tokens(10).repeat(1, 5)
    drafted, plain = case.make(model), case.make(model)
    answer = generate(model, ids, drafted, 12, prompt_lookup_num_tokens=4)
    text = torch.cat((ids, answer), dim=1)
    forward(model, text[:, : seen(drafted)], plain)
    assert drafted.session.record_past
    whole = torch.cat((text, tokens(6, seed=5)), dim=1)
    got = generate(model, whole, drafted, 12, output_logits=True, return_dict_in_generate=True)
    assert not drafted.session.record_past and not any(
        getattr(layer, "record_past", False) for layer in drafted.layers
    )
    assert seen(drafted) == whole.shape[1] + 11
    if case.selects and case.id not in ("quest", "quest-per-head", "sparq", "sparq-channels", "hisparse", "cla-quest"):
        return  # a basis or an index of the first prompt alone is another one
    expected = generate(model, whole, plain, 12, output_logits=True, return_dict_in_generate=True)
    for ours, theirs in zip(got.logits, expected.logits, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=0)


@pytest.mark.skipif(not hasattr(Cache, "activate_past_recording"), reason="these versions do not announce drafts")
def test_by_hand_it_lasts_until_reset():
    model = build()
    mine = ALL["quest"].make(model)
    forward(model, tokens(30), mine)
    mine.activate_past_recording()
    forward(model, tokens(1), mine)
    forward(model, tokens(1), mine)
    assert mine.session.record_past
    mine.reset()
    assert not mine.session.record_past
