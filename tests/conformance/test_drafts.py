"""Assisted decoding and prompt lookup: drafts leave no trace, and greedy decoding with them is greedy decoding without.

A method that skips reads everything while drafts may come, so that it gives what the dense model gives.
"""

import pytest
import torch
import torch._dynamo
from helpers import (
    CACHE,
    decode,
    forward,
    generate,
    kept_in_all_layers,
    left_pad,
    same_snapshot,
    seen,
    snapshot,
    storage_bytes,
    tensors_of,
    tokens,
)
from methods import AMPLE, BUDGET, CORE, METHODS, only, quick_where
from tiny_models import build
from transformers.generation import CompileConfig, utils

import kvsparse_hf
from kvsparse_hf import SparseCache, UnsupportedOperationError

TRIES = [case for case in METHODS if case.drafts]
EVICTS = [case for case in TRIES if case.evicts]

by_core = pytest.mark.parametrize("case", CORE, ids=lambda case: case.id)


evicting = pytest.mark.parametrize("case", only(EVICTS, quick_where(lambda case: case in CORE)))

# How many drafts come in each round, and how many of them are right.
SCRIPT = [(3, 3), (4, 0), (1, 1), (0, 0), (5, 2), (5, 5), (2, 1), (0, 0), (4, 3), (6, 6), (1, 0)]


class Scripted:
    """Proposes the right continuation with errors at the places that the script names.

    Args:
        answer: the tokens `[1, N]` that are right.
        length: of the prompt.
    """

    requires_model_outputs = False

    def __init__(self, answer, length: int):
        self.answer, self.length, self.round = answer, length, 0

    def get_candidates(self, input_ids):
        count, right = SCRIPT[self.round % len(SCRIPT)]
        self.round += 1
        done = input_ids.shape[1] - self.length
        drafts = self.answer[:, done:done + count].clone()
        drafts[:, right:] = (drafts[:, right:] + 1) % 90 + 3
        return torch.cat((input_ids, drafts), dim=1), None

    def update_candidate_strategy(self, input_ids, scores, num_matches):
        pass


def drafted(model, ids, cache, answer, new: int, **kwargs):
    """`generate()` through Transformers' own assisted loop, with scripted drafts."""
    model._get_candidate_generator = lambda *args, **kwargs: Scripted(answer, ids.shape[1])
    try:
        return generate(model, ids, cache, new, prompt_lookup_num_tokens=2, **kwargs)
    finally:
        del model._get_candidate_generator


def plain(case, model, budget):
    """What drafts must not change: the same cache, or for a method that skips the dense one."""
    return case.dense(model) if case.selects else case.make(model, budget)


@pytest.mark.feature("assisted decoding, prompt lookup")
@pytest.mark.parametrize("case, budget", only(TRIES, quick_where(lambda case, budget: budget == BUDGET and not case.variant, [BUDGET, AMPLE])))
def test_scripted_drafts_equal_plain_greedy(case, budget):
    """Then the cache goes on as the one that never saw a draft, through a second turn as well."""
    model = build()
    ids, mine, expected = tokens(30), case.make(model, budget, reserve=4), plain(case, model, budget)
    answer = generate(model, ids, expected, 33)
    assert torch.equal(drafted(model, ids, mine, answer, 33), answer)
    if case.selects:
        return
    whole = torch.cat((ids, answer, tokens(7, seed=4)), dim=1)
    assert torch.equal(generate(model, whole, mine, 20), generate(model, whole, expected, 20))
    assert seen(mine) == seen(expected) == whole.shape[1] + 19
    assert kept_in_all_layers(mine) == kept_in_all_layers(expected)
    after = tokens(6, seed=5)
    torch.testing.assert_close(decode(model, mine, after), decode(model, expected, after), atol=1e-4, rtol=0)


@by_core
def test_an_assisted_second_turn_starts_over(case):
    """Transformers feeds the whole conversation again (and gets a wrong answer from its own cache): ours begins anew."""
    model = build()
    ids, mine = tokens(30), case.make(model)
    whole = torch.cat((ids, generate(model, ids, mine, 12), tokens(7, seed=4)), dim=1)
    expected = generate(model, whole, plain(case, model, BUDGET), 20)
    assert torch.equal(drafted(model, whole, mine, expected, 20), expected)
    assert seen(mine) == whole.shape[1] + 19


@by_core
@pytest.mark.parametrize("family", ["gemma3", "qwen2-hybrid"])
def test_scripted_drafts_beside_sliding_layers(case, family):
    """Where Transformers' own sliding layers can take tokens back, else a refusal."""
    model = build(family)
    ids, mine = tokens(30), case.make(model)
    answer = generate(model, ids, plain(case, model, BUDGET), 33)
    try:
        got = drafted(model, ids, mine, answer, 33)
    except UnsupportedOperationError as error:
        assert "sliding window" in str(error) and not hasattr(mine.layers[0], "record_past")
    else:
        assert torch.equal(got, answer)


@pytest.mark.feature("assisted decoding, prompt lookup", refused=lambda case: True)
@pytest.mark.parametrize("case", [case for case in METHODS if not case.drafts], ids=lambda case: case.id)
def test_drafts_in_shared_layers_that_evict_are_refused(case):
    model = build()
    mine, expected = case.make(model), case.make(model)
    with pytest.raises(UnsupportedOperationError, match="without drafts"):
        generate(model, tokens(10).repeat(1, 3), mine, 8, prompt_lookup_num_tokens=3)
    assert seen(mine) == 0 and not mine.session.record_past
    assert torch.equal(generate(model, tokens(30), mine, 8), generate(model, tokens(30), expected, 8))


def test_layers_that_keep_all_beside_some_that_evict():
    model = build(num_hidden_layers=3)
    make = [kvsparse_hf.KnormCache(model, budget=BUDGET, decode="bounded", skip_layers=[0]) for _ in range(2)]
    answer = generate(model, tokens(30), make[0], 33)
    assert torch.equal(drafted(model, tokens(30), make[1], answer, 33), answer)
    assert kept_in_all_layers(make[0]) == kept_in_all_layers(make[1])


@pytest.mark.slow
@by_core
def test_scripted_drafts_in_a_compiled_step(case):
    """`generate()` compiles the verification too; the layers see it in plain Python."""
    model = build()
    ids, config = tokens(30), CompileConfig(fullgraph=False, mode=None, backend="eager")
    config._compile_all_devices = True
    answer = generate(model, ids, plain(case, model, BUDGET), 25)
    torch._dynamo.reset()
    assert torch.equal(drafted(model, ids, case.make(model), answer, 25, compile_config=config), answer)
    torch._dynamo.reset()


# --- the caller's own loop ---------------------------------------------------------------------------------------------


def _recording(case, model, rows=1):
    """A cache that read prompts and records, and its untouched twin."""
    ids, mask = left_pad([tokens(30 - 9 * row, seed=row) for row in range(rows)])
    mine = case.make(model)
    forward(model, ids, mine, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0))
    twin = mine.fork()
    mine.activate_past_recording()
    return mine, twin, mask


def _feed(model, cache, ids, mask):
    """One forward of several tokens, and the mask after it."""
    mask = torch.cat((mask, mask.new_ones(ids.shape)), dim=1)
    logits = forward(model, ids, cache, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1)[:, -ids.shape[1]:])
    return logits, mask


@pytest.mark.parametrize(
    "case, rows, removed",
    only(EVICTS, quick_where(lambda case, rows, removed: case in CORE or (rows, removed) == (2, 2), [1, 2], [0, 2, 5])),
)
def test_drafts_of_a_loop_of_ones_own(case, rows, removed):
    """One token and five drafts, of which some are taken back; the logits are those of single steps."""
    model = build()
    mine, twin, mask = _recording(case, model, rows)
    ids = tokens(6, rows, seed=3)
    before = snapshot(mine)
    logits, grown = _feed(model, mine, ids, mask)
    torch.testing.assert_close(logits, decode(model, twin.fork(), ids, mask), atol=1e-4, rtol=0)
    assert seen(mine) == mask.shape[1] + 6 and mine.session.held == 5
    mine.crop(-removed)
    decode(model, twin, ids[:, :6 - removed], mask)
    assert seen(mine) == seen(twin) and kept_in_all_layers(mine) == kept_in_all_layers(twin)
    after, mask = tokens(4, rows, seed=8), grown[:, :grown.shape[1] - removed]
    torch.testing.assert_close(decode(model, mine, after, mask), decode(model, twin, after, mask), atol=1e-4, rtol=0)
    assert before.keys() == snapshot(mine).keys()


@evicting
def test_without_a_crop_drafts_are_accepted(case):
    model = build()
    mine, twin, mask = _recording(case, model)
    ids = tokens(5, seed=3)
    _, grown = _feed(model, mine, ids, mask)
    decode(model, twin, ids, mask)
    after = tokens(4, seed=8)
    torch.testing.assert_close(decode(model, mine, after, grown), decode(model, twin, after, grown), atol=1e-4, rtol=0)
    assert kept_in_all_layers(mine) == kept_in_all_layers(twin)


@evicting
def test_more_than_the_drafts_cannot_be_taken_back(case):
    """A refusal leaves the drafts where they are."""
    model = build()
    mine, twin, mask = _recording(case, model)
    ids = tokens(5, seed=3)
    _feed(model, mine, ids, mask)
    before = snapshot(mine)
    with pytest.raises(UnsupportedOperationError):
        mine.crop(-20)
    assert same_snapshot(snapshot(mine), before) and seen(mine) == 35
    mine.crop(-4)
    decode(model, twin, ids[:, :1], mask)
    assert kept_in_all_layers(mine) == kept_in_all_layers(twin)


@pytest.mark.parametrize("case, what", only(EVICTS, quick_where(lambda case, what: case in CORE, ["fork", "file", "rows", "reset"])))
def test_drafts_survive_what_happens_meanwhile(case, what, tmp_path):
    model = build()
    mine, twin, mask = _recording(case, model)
    ids = tokens(4, seed=3)
    _, grown = _feed(model, mine, ids, mask)
    if what == "reset":
        mine.reset()
        assert seen(mine) == 0
        assert torch.equal(generate(model, tokens(20), mine, 5), generate(model, tokens(20), case.make(model), 5))
        return
    removed = 2 if what == "fork" else 0  # the others take the drafts for good
    if what == "fork":
        mine = mine.fork()
    elif what == "file":
        mine.save(tmp_path)
        mine = SparseCache.load(tmp_path, model)
    else:
        mine.batch_repeat_interleave(2)
        mine.batch_select_indices(torch.tensor([1]))
    mine.crop(-removed)
    decode(model, twin, ids[:, :4 - removed], mask)
    assert kept_in_all_layers(mine) == kept_in_all_layers(twin)
    after, mask = tokens(4, seed=8), grown[:, :grown.shape[1] - removed]
    torch.testing.assert_close(decode(model, mine, after, mask), decode(model, twin, after, mask), atol=1e-4, rtol=0)


# --- a stop check that runs a step late --------------------------------------------------------------------------------


class _NoEvent:
    """In the place of `torch.Event`, which the CPU does not have."""

    def __init__(self, *args, **kwargs):
        pass

    def record(self):
        pass

    synchronize = record


@pytest.mark.skipif(not hasattr(utils, "DeferredStopCheck"), reason="since 5.17")
@pytest.mark.parametrize("case", quick_where(lambda case: case in CORE))
def test_a_late_stop_check_is_no_draft(case, monkeypatch):
    """On "mps" Transformers feeds one token more than it needs and takes it back: a method that skips goes on skipping."""
    model, supported = build(), utils.DeferredStopCheck.is_supported

    def on_mps(device, *args, **kwargs):
        return supported(torch.device("mps"), *args, **kwargs)

    ids, expected, late = tokens(60), case.make(model), case.make(model)
    plain = generate(model, ids, expected, 20)
    end = dict(eos_token_id=int(plain[0, 9]), min_new_tokens=None)
    expected = case.make(model)
    stopped = generate(model, ids, expected, 20, **end)
    monkeypatch.setattr(torch, "Event", _NoEvent)
    monkeypatch.setattr(utils.DeferredStopCheck, "is_supported", staticmethod(on_mps))
    assert torch.equal(generate(model, ids, case.make(model), 20), plain)
    assert torch.equal(generate(model, ids, late, 20, **end), stopped)
    assert seen(late) == seen(expected) and kept_in_all_layers(late) == kept_in_all_layers(expected)


# --- what it costs -----------------------------------------------------------------------------------------------------


@evicting
def test_nothing_of_the_drafts_is_left(case):
    """No more memory than without, once they are verified; and the prompt is not kept alive by them."""
    model = build()
    mine, expected = case.make(model), case.make(model)
    answer = generate(model, tokens(200), expected, 12)
    drafted(model, tokens(200), mine, answer, 12)
    assert mine.session.held == 0 and all(layer.drafts is None for layer in mine.sparse_layers)
    assert storage_bytes(tensors_of(mine)) <= storage_bytes(tensors_of(expected))


@pytest.mark.parametrize("case", [case for case in METHODS if case.selects and not case.variant], ids=lambda case: case.id)
def test_a_plain_run_after_an_assisted_one_selects_again(case):
    model = build()
    mine, twin = case.make(model), case.make(model)
    ids = tokens(80)
    answer = drafted(model, ids, mine, generate(model, ids, case.dense(model), 20), 20)
    assert mine.session.record_past
    forward(model, torch.cat((ids, answer[:, :-1]), dim=1), twin)
    for cache in (mine, twin):
        generate(model, torch.cat((ids, answer), dim=1), cache, 4)
        assert not cache.session.record_past
        held = sum(layer.dense_bytes(sum(cache.report().seen)) for layer in cache.sparse_layers)
        assert sum(layer.bytes_read_per_step() for layer in cache.sparse_layers) < held


@by_core
def test_the_returned_cache_of_an_assisted_run(case):
    """Scores, hidden states and the cache object of `return_dict_in_generate`."""
    model = build()
    ids, mine = tokens(10).repeat(1, 3), case.make(model)
    out = generate(model, ids, mine, 12, prompt_lookup_num_tokens=3, return_dict_in_generate=True, output_scores=True,
                   output_logits=True, output_hidden_states=True)
    assert out[CACHE] is mine and len(out.scores) == len(out.logits) == 12
    expected = generate(model, ids, plain(case, model, BUDGET), 12, return_dict_in_generate=True, output_logits=True)
    assert torch.equal(out.sequences, expected.sequences)
    torch.testing.assert_close(torch.stack(out.logits), torch.stack(expected.logits), atol=1e-4, rtol=0)


@evicting
def test_rows_that_change_places_ask_for_no_room(case):
    """A beam search reorders at every step, and asking how many steps still fit waits for the device."""
    model = build()
    mine = case.make(model)
    generate(model, tokens(30, 2), mine, 4)
    mine.prepare_decode()
    room = mine._room
    mine.reorder_cache(torch.tensor([1, 0]))
    assert room is not None and mine._room == room
