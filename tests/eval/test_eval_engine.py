"""Conversations and losses: the same figures as by hand."""

import pytest
import torch
from eval_tools import refused, run
from helpers import CACHE, dense

import kvsparse_hf as kv
from kvsparse_hf.eval.engine import Engine
from kvsparse_hf.eval.forced import forced
from kvsparse_hf.eval.tasks import Example


def test_a_conversation_is_what_one_long_prompt_gives(engine):
    """Each answer with the full cache kept is the dense answer to the whole conversation so far."""
    example = Example(
        "0",
        "Alpha is 1. Beta is 2. Alpha?",
        ["1", "2", "3"],
        5,
        answer_begins="Alpha is",
        turns=(("Beta?", "Beta is"), ("And?", "It is")),
    )
    model, tokenizer = engine.model, engine.tokenizer
    found = engine.converse(example, kv.FullCache(model))
    said = engine.encode(example)
    for index, text in enumerate(found.texts):
        ids = torch.tensor([said])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=False, **{CACHE: dense(model)}
        )
        new = out[0, len(said) :].tolist()
        assert text == tokenizer.decode(new, skip_special_tokens=True)
        if index < 2:
            question, begins = example.turns[index]
            said = [*said, *new] + tokenizer(f"</s><s>{question}</s><s>{begins}", add_special_tokens=False).input_ids
    assert found.prompt_tokens == len(said)


def test_an_end_that_was_generated_is_not_written_twice(engine, monkeypatch):
    example = Example("0", "Alpha?", ["1", "2"], 5, turns=(("Beta?", ""),))
    fed = []
    monkeypatch.setattr(engine, "_generate", lambda rows, *rest: fed.append(rows[0]) or [[20, 21, 2]])
    engine.converse(example, kv.FullCache(engine.model))
    following = engine.tokenizer("</s><s>Beta?</s><s>", add_special_tokens=False).input_ids
    assert fed[1] == [*fed[0], 20, 21, *following]


def test_a_row_that_a_stop_string_ends_counts_its_own_tokens(engine, setting):
    """Its batch goes on; what fills the row up is no answer."""
    examples = [Example(str(index), f"Text {index}", "", 12) for index in range(12)]
    said = engine.answer(examples, kv.FullCache(engine.model))
    # A character that is one token, with more than one token after it.
    begun = [(answer.texts[0], mark) for answer in said for mark in answer.texts[0][:4] if len(answer.texts[0]) > 6]
    text, mark = next((text, mark) for text, mark in begun if mark.isascii() and mark.isalnum())
    stopped = [Example(example.id, example.prompt, "", 12, stop=(mark,)) for example in examples]
    found = engine.answer(stopped, kv.FullCache(engine.model))
    ended = [answer for answer, whole in zip(found, said, strict=True) if whole.texts[0] == text]
    assert ended and all(answer.texts == [text[: text.index(mark)]] and answer.new_tokens < 12 for answer in ended)
    alone = [engine.answer([example], kv.FullCache(engine.model))[0] for example in stopped]
    assert [answer.new_tokens for answer in found] == [answer.new_tokens for answer in alone]


def test_a_conversation_decoded_fast_is_the_same(loaded):
    example = Example("0", "Alpha is 1. Beta is 2. Alpha?", ["1", "2"], 6, turns=(("Beta?", "Beta is"),))
    for make in (
        kv.FullCache,
        lambda model: kv.H2OCache(model, budget=16),
        lambda model: kv.SnapKVCache(model, budget=16, window=8),
    ):
        fast, plain = (Engine(*loaded, fast=flag).converse(example, make(loaded[0])) for flag in (True, False))
        assert fast == plain


@pytest.mark.parametrize("chunk", [1, 3, 50])
def test_loss_is_that_of_one_dense_forward(loaded, chunk):
    model = loaded[0]
    generator = torch.Generator().manual_seed(3)
    contexts = [torch.randint(3, 200, (length,), generator=generator).tolist() for length in (9, 14)]
    rest = [torch.randint(3, 200, (length,), generator=generator).tolist() for length in (7, 4)]
    for context, more, found in zip(
        contexts, rest, forced(model, contexts, rest, kv.FullCache(model), chunk), strict=True
    ):
        logits = model(torch.tensor([context + more])).logits[0, len(context) - 1 : -1].log_softmax(-1)
        expected = logits.gather(1, torch.tensor(more)[:, None])[:, 0]
        assert torch.allclose(torch.tensor(found.logprobs), expected, atol=1e-4)
        assert found.greedy == (logits.argmax(-1) == torch.tensor(more)).tolist()


def test_loss_is_that_of_decoding_with_the_cache(loaded):
    """Token by token, with a cache that evicts: the same figures as by hand."""
    from helpers import decode, prefill

    model = loaded[0]
    context = torch.randint(3, 200, (1, 40), generator=torch.Generator().manual_seed(1))
    more = torch.randint(3, 200, (1, 6), generator=torch.Generator().manual_seed(2))
    (found,) = forced(model, context.tolist(), more.tolist(), kv.H2OCache(model, budget=12))
    cache = kv.H2OCache(model, budget=12)
    logits = torch.cat(
        (prefill(model, cache, context)[:, -1:], decode(model, cache, more[:, :-1])), dim=1
    ).log_softmax(-1)
    expected = logits[0].gather(1, more[0][:, None])[:, 0]
    assert torch.allclose(torch.tensor(found.logprobs), expected, atol=1e-5)
    dense_row = (
        model(torch.cat((context, more), dim=1)).logits[0, 39:-1].log_softmax(-1).gather(1, more[0][:, None])[:, 0]
    )
    assert torch.allclose(expected[0], dense_row[0], atol=1e-4) and not torch.allclose(
        expected[1:], dense_row[1:], atol=1e-2
    )


def test_skipping_methods_refuse_chunks(folder, tmp_path):
    common = ("ppl", "-t", "prompt=40", "-t", "tokens=8", "--limit", 1, "--data", __file__, "-o", tmp_path)
    refused(run(folder, *common, "-t", "chunk=4", "-p", "quest-1024"), "quest reads all its tokens", "chunk=1")
    assert run(folder, *common, "-p", "quest-1024").exit_code == 0
