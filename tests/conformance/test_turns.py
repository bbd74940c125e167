"""Conversations: what a second `generate()` on the same cache feeds, and what it gives."""

import functools

import pytest
import torch
from helpers import (
    CACHE,
    decode,
    dense,
    forward,
    generate,
    kept_in_all_layers,
    left_pad,
    positions,
    prefill,
    seen,
    tokens,
)
from methods import AMPLE, BUDGET, CORE, METHODS, by_all
from tiny_models import build

from kvsparse_hf import UnsupportedOperationError

by_method = pytest.mark.parametrize("case", METHODS, ids=lambda case: case.id)
by_core = pytest.mark.parametrize("case", CORE, ids=lambda case: case.id)
families = pytest.mark.parametrize("family", ["llama-gqa2", "gemma3", "qwen2-hybrid"])
padded = pytest.mark.parametrize("rows", [[(30, 9)], [(30, 9), (18, 9)]], ids=["one", "padded-batch"])


def _spy(model) -> list:
    """Records `(input_ids, position_ids)` of every forward."""
    fed, original = [], model.forward

    @functools.wraps(original)
    def forward(*args, **kwargs):
        fed.append((kwargs["input_ids"].clone(), kwargs["position_ids"].clone()))
        return original(*args, **kwargs)

    model.forward = forward
    return fed


def _conversation(rows):
    """Prompts and second messages of all rows: `ids`, `mask`, `message`."""
    ids, mask = left_pad([tokens(first, seed=20 + index) for index, (first, _) in enumerate(rows)])
    message = torch.cat([tokens(second, seed=40 + index) for index, (_, second) in enumerate(rows)])
    return ids, mask, message


def _grow(mask, count):
    return torch.cat((mask, mask.new_ones(len(mask), count)), dim=1)


@pytest.mark.feature("several turns")
@by_all
@padded
def test_second_turn_feeds_only_new_tokens_at_their_positions(case, rows):
    model = build()
    ids, mask, message = _conversation(rows)
    mine = case.make(model)
    answer = generate(model, ids, mine, 6, attention_mask=mask)
    assert seen(mine) == ids.shape[1] + 5  # the last token was never fed
    whole = torch.cat((ids, answer, message), dim=1)
    whole_mask = _grow(mask, 6 + message.shape[1])
    fed = _spy(model)
    second = generate(model, whole, mine, 4, attention_mask=whole_mask)
    assert torch.equal(fed[0][0], torch.cat((answer[:, -1:], message), dim=1))
    true = positions(_grow(whole_mask, 4))
    assert torch.equal(fed[0][1].expand(len(ids), -1), true[:, ids.shape[1] + 5:whole.shape[1]])
    assert len(fed) == 4
    for step, (input_ids, position_ids) in enumerate(fed[1:]):
        assert torch.equal(input_ids, second[:, step:step + 1])
        assert torch.equal(position_ids.expand(len(ids), -1), true[:, whole.shape[1] + step:whole.shape[1] + step + 1])
    assert seen(mine) == whole.shape[1] + 3
    assert mine.report().seen == [first + 6 + second + 3 for first, second in rows]


@by_core
@families
@padded
def test_two_turns_with_room_equal_one_dense_run(case, family, rows):
    model = build(family)
    ids, mask, message = _conversation(rows)
    mine = case.make(model, AMPLE)
    answer = generate(model, ids, mine, 6, attention_mask=mask)
    whole, whole_mask = torch.cat((ids, answer, message), dim=1), _grow(mask, 6 + message.shape[1])
    second = generate(model, whole, mine, 16, attention_mask=whole_mask)
    assert torch.equal(second, generate(model, whole, dense(model), 16, attention_mask=whole_mask))


@pytest.mark.feature("several turns")
@by_method
@padded
def test_generate_equals_a_manual_loop(case, rows):
    """Prompt, answer, second message and second answer, with `generate()` and with bare forwards."""
    model = build()
    ids, mask, message = _conversation(rows)
    mine, manual = case.make(model), case.make(model)
    answer = generate(model, ids, mine, 6, attention_mask=mask)
    whole, whole_mask = torch.cat((ids, answer, message), dim=1), _grow(mask, 6 + message.shape[1])
    second = generate(model, whole, mine, 6, attention_mask=whole_mask)

    prefill(model, manual, ids, mask)
    decode(model, manual, answer[:, :-1], mask)
    at = positions(whole_mask)[:, ids.shape[1] + 5:]
    logits = [forward(model, whole[:, ids.shape[1] + 5:], manual, attention_mask=whole_mask, position_ids=at)[:, -1:]]
    logits.append(decode(model, manual, second[:, :-1], whole_mask))
    assert torch.equal(torch.cat(logits, dim=1).argmax(-1), second)
    assert kept_in_all_layers(mine) == kept_in_all_layers(manual)


@by_core
def test_new_tokens_alone_with_the_whole_mask(case):
    """The other documented call: only the new ids, but a mask over everything."""
    model = build()
    ids, _, message = _conversation([(30, 9)])
    first, second = case.make(model), case.make(model)
    answer = generate(model, ids, first, 6)
    assert torch.equal(generate(model, ids, second, 6), answer)
    whole = torch.cat((ids, answer, message), dim=1)
    expected = generate(model, whole, first, 8)
    new_only = torch.cat((answer[:, -1:], message), dim=1)
    out = generate(model, new_only, second, 8, attention_mask=torch.ones_like(whole))
    assert torch.equal(out, expected)


@by_core
def test_bare_forwards_count_positions_themselves(case):
    """Without a mask and positions, Transformers asks the cache for the tokens seen."""
    model = build()
    ids, _, message = _conversation([(30, 9)])
    with_positions, without = case.make(model), case.make(model)
    mask = torch.ones_like(ids)
    for mine, given in ((with_positions, True), (without, False)):
        prefill(model, mine, ids, mask if given else None)
    wanted = decode(model, with_positions, message, mask)
    torch.testing.assert_close(decode(model, without, message), wanted, atol=0, rtol=0)


@pytest.mark.feature("a prompt sent again")
@by_all
@padded
@pytest.mark.parametrize("with_mask", [True, False], ids=["mask", "no-mask"])
def test_the_same_prompt_again_with_no_new_token(case, rows, with_mask):
    """The cache has seen exactly the prompt (a bare forward ran before): as if it were fresh."""
    rows = rows if with_mask else rows[:1]
    model = build()
    ids, mask, _ = _conversation(rows)
    expected = generate(model, ids, case.make(model), 16, attention_mask=mask)
    mine = case.make(model)
    prefill(model, mine, ids, mask)
    assert torch.equal(generate(model, ids, mine, 16, attention_mask=mask if with_mask else None), expected)
    assert seen(mine) == ids.shape[1] + 15
    assert mine.report().seen == [first + 15 for first, _ in rows]


@by_core
@pytest.mark.parametrize("family", ["gemma3", "qwen2-hybrid"])
@padded
def test_the_same_prompt_again_on_sliding_layers_is_refused_or_right(case, family, rows):
    """A refusal must come before any layer changed: the conversation then goes on, and after `reset()` the prompt works."""
    model = build(family)
    ids, mask, message = _conversation(rows)
    expected = generate(model, ids, case.make(model), 16, attention_mask=mask)
    mine, untouched = case.make(model), case.make(model)
    prefill(model, mine, ids, mask)
    try:
        again = generate(model, ids, mine, 16, attention_mask=mask)
    except UnsupportedOperationError:
        prefill(model, untouched, ids, mask)
        assert torch.equal(decode(model, mine, message, mask), decode(model, untouched, message, mask))
        mine.reset()
        again = generate(model, ids, mine, 16, attention_mask=mask)
    assert torch.equal(again, expected)


@pytest.mark.feature("several turns")
@by_method
@padded
def test_everything_sent_again_with_no_new_message(case, rows):
    model = build()
    ids, mask, _ = _conversation(rows)
    mine, whole_run = case.make(model), case.make(model)
    answer = generate(model, ids, mine, 6, attention_mask=mask)
    more = generate(model, torch.cat((ids, answer), dim=1), mine, 8, attention_mask=_grow(mask, 6))
    assert torch.equal(torch.cat((answer, more), dim=1), generate(model, ids, whole_run, 14, attention_mask=mask))
    assert seen(mine) == ids.shape[1] + 13


@by_core
@padded
@pytest.mark.parametrize("answered", [2, 6, 30, 31])
def test_prompt_again_after_an_answer_is_refused_or_right(case, rows, answered):
    """"Regenerate": `generate()` then feeds a wrong tail of the prompt (30 tokens less the answered ones), or nothing at all."""
    model = build()
    ids, mask, _ = _conversation(rows)
    mine = case.make(model)
    expected = generate(model, ids, mine, answered, attention_mask=mask)
    try:
        again = generate(model, ids, mine, answered, attention_mask=mask)
    except (UnsupportedOperationError, IndexError, RuntimeError) as error:
        # With nothing left to feed, Transformers itself fails before it reaches us.
        assert isinstance(error, UnsupportedOperationError) or answered > ids.shape[1]
    else:
        assert torch.equal(again, expected)


@by_method
def test_three_turns_hold_the_budget_or_grow_as_stated(case):
    model = build()
    mine = case.make(model, BUDGET, reserve=4)
    ids = tokens(25)
    for turn in range(3):
        ids = torch.cat((ids, generate(model, ids, mine, 7), tokens(6, seed=60 + turn)), dim=1)
        if not (case.every or case.drops):  # how many those hold depends on when the turns came
            assert case.held(mine) == {case.kept_after_decode(25, seen(mine) - 25)}
        newest = [head[-1] for layer in kept_in_all_layers(mine) for head in layer[0]]
        assert set(newest) == {seen(mine) - 1}


@by_core
@pytest.mark.parametrize("chunk", [5, 8])
def test_second_turn_in_chunks(case, chunk):
    model = build()
    ids, _, message = _conversation([(30, 17)])
    mine = case.make(model, AMPLE)
    answer = generate(model, ids, mine, 6)
    whole = torch.cat((ids, answer, message), dim=1)
    out = generate(model, whole, mine, 10, prefill_chunk_size=chunk)
    assert torch.equal(out, generate(model, whole, dense(model), 10))


@by_method
def test_chunked_prompt_keeps_the_budget(case):
    """Chunks that end in several tokens keep exactly the budget; a last chunk of one token is a decode step to any cache."""
    model = build()
    for length, extra in ((40, 0), (36, 1)):
        mine = case.make(model)
        generate(model, tokens(length), mine, 1, prefill_chunk_size=5 if extra else 8)
        assert case.held(mine) == {case.kept_after_decode(length - extra, extra)}
        if case.streaming:
            assert kept_in_all_layers(mine)[0][0][0] == [0, 1, 2, 3, *range(length - BUDGET + 4, length)]


@by_core
def test_returned_cache_is_the_one_passed(case):
    model = build()
    mine = case.make(model)
    out = generate(model, tokens(20), mine, 4, return_dict_in_generate=True)
    assert out[CACHE] is mine
