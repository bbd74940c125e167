"""`custom_generate=fast_decode` gives the tokens, scores and cache state of plain `generate()`, for every method."""

import gc
import logging
import weakref
from functools import cache

import pytest
import torch
from helpers import CACHE, kept_in_all_layers, left_pad, tokens
from methods import CORE, MAIN, METHODS
from tiny_models import FAMILIES
from transformers import TextIteratorStreamer

import kvsparse_hf
from kvsparse_hf import FastDecode, OptionError, fast_decode
from kvsparse_hf.decoding import compiled
from kvsparse_hf.decoding.step import first_largest

EOS = [5, 9, 11, 23]

SETTINGS = {
    "greedy": {},
    "greedy-min-new-tokens": dict(min_new_tokens=10),
    "greedy-min-length": dict(min_length=40),
    "sampling": dict(do_sample=True, temperature=1.3, top_k=30, top_p=0.9),
    "sampling-min-p": dict(do_sample=True, min_p=0.02, typical_p=0.95),
    "repetition-penalty": dict(repetition_penalty=1.4),
    "suppress": dict(suppress_tokens=[7, 8, 30]),
    "no-eos": dict(eos_token_id=None),
}


the_model = cache(lambda layers: FAMILIES["llama-gqa2"].build(num_hidden_layers=layers))


@pytest.fixture
def model(request):
    case = getattr(request.node, "callspec", None) and request.node.callspec.params.get("case")
    return the_model(case.layers if case else 2)


def both(model, make, ids, mask, **kwargs):
    """The outputs and caches of plain `generate()` and of `fast_decode`, from the same seed."""
    results = []
    for extra in ({}, {"custom_generate": fast_decode}):
        torch.manual_seed(3)
        cache = make()
        settings = dict(max_new_tokens=40, eos_token_id=EOS, pad_token_id=0, return_dict_in_generate=True, output_scores=True)
        out = model.generate(ids, attention_mask=mask, **{**settings, **kwargs}, **{CACHE: cache}, **extra)
        results.append((out, cache))
    return results


def assert_same(results):
    (plain, a), (fast, b) = results
    assert torch.equal(plain.sequences, fast.sequences)
    assert len(plain.scores) == len(fast.scores)
    for x, y in zip(plain.scores, fast.scores, strict=True):
        torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-5)
    assert int(a.get_seq_length()) == int(b.get_seq_length())
    assert kept_in_all_layers(a) == kept_in_all_layers(b)


# What is set does not depend on the method: every setting with each kind of layer, two with every method.
EVERY = [(case, name) for case in MAIN for name in SETTINGS if case in CORE or name in ("greedy-min-new-tokens", "sampling")]


@pytest.mark.parametrize(("case", "setting"), EVERY, ids=lambda value: getattr(value, "id", value))
def test_same_as_plain(model, case, setting):
    ids, mask = left_pad([tokens(30), tokens(17, seed=2), tokens(29, seed=3)])
    assert_same(both(model, lambda: case.make(model), ids, mask, **SETTINGS[setting]))


@pytest.mark.feature("`fast_decode`")
@pytest.mark.parametrize("case", METHODS, ids=lambda case: case.id)
def test_continues_a_conversation(model, case):
    """The cache that comes back is the one plain `generate()` leaves: a second turn gives the same tokens."""
    first, second = tokens(30), tokens(9, seed=5)
    answers = []
    for extra in ({}, {"custom_generate": fast_decode}):
        cache = case.make(model)
        common = dict(max_new_tokens=12, eos_token_id=EOS, pad_token_id=0, **{CACHE: cache}, **extra)
        said = model.generate(first, attention_mask=torch.ones_like(first), **common)
        both_turns = torch.cat((said, second), dim=1)
        answers.append(model.generate(both_turns, attention_mask=torch.ones_like(both_turns), **common))
    assert torch.equal(*answers)


def test_growth_across_the_reserve(model):
    ids = tokens(20)
    assert_same(both(model, lambda: kvsparse_hf.FullCache(model, reserve=3), ids, torch.ones_like(ids), eos_token_id=None))


def test_streamer(model):
    class Tokenizer:
        def decode(self, ids, **kwargs):
            return "".join(f"{int(i)} " for i in ids)

    texts = []
    for extra in ({}, {"custom_generate": fast_decode}):
        streamer = TextIteratorStreamer(Tokenizer(), timeout=5)
        cache = kvsparse_hf.FullCache(model)
        model.generate(tokens(10), max_new_tokens=9, eos_token_id=EOS, pad_token_id=0, streamer=streamer, **{CACHE: cache}, **extra)
        texts.append("".join(streamer))
    assert texts[0] == texts[1] and texts[0]


REFUSED = {
    "beams": dict(num_beams=2),
    "prompt lookup": dict(prompt_lookup_num_tokens=3),
    "host-side processor": dict(no_repeat_ngram_size=2),
    "host-side criterion": dict(max_time=100.0),
    "hidden states": dict(output_hidden_states=True, return_dict_in_generate=True),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_does_not_take_goes_to_the_plain_loop(model, name, caplog):
    ids = tokens(20)
    kwargs = {**REFUSED[name], "max_new_tokens": 8, "pad_token_id": 0, "return_dict_in_generate": True}
    plain = model.generate(ids, **kwargs, **{CACHE: kvsparse_hf.FullCache(model)})
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    kvsparse_hf.decoding.fast.logger.warning_once.cache_clear()
    try:
        fast = model.generate(ids, **kwargs, **{CACHE: kvsparse_hf.FullCache(model)}, custom_generate=fast_decode)
    finally:
        logger.removeHandler(caplog.handler)
    assert torch.equal(plain.sequences, fast.sequences)
    assert sum("using Transformers' own decoding loop" in record.message for record in caplog.records) == 1


def test_assistant_model_goes_to_the_plain_loop(model):
    ids, helper = tokens(20), FAMILIES["llama-gqa2"].build(seed=4)
    runs = [
        model.generate(ids, max_new_tokens=8, assistant_model=helper, **{CACHE: kvsparse_hf.FullCache(model)}, **extra)
        for extra in ({}, {"custom_generate": fast_decode})
    ]
    assert torch.equal(*runs)


def test_other_caches_go_to_the_plain_loop(model):
    ids = tokens(20)
    assert torch.equal(model.generate(ids, max_new_tokens=8), model.generate(ids, max_new_tokens=8, custom_generate=fast_decode))


@pytest.mark.parametrize("wrong", [dict(compile="fast"), dict(lag=-1)])
def test_wrong_options(wrong):
    with pytest.raises(OptionError):
        FastDecode(**wrong)


@pytest.mark.slow
def test_a_compiled_step_follows_the_model(monkeypatch):
    """Changed weights count, and what was compiled does not keep a model alive."""
    monkeypatch.setitem(compiled.OPTIONS, "freeze", {"freezing": True})  # without tuning, which takes a minute on a CPU
    model = FAMILIES["llama-gqa2"].build(num_hidden_layers=1)
    ids, mask = left_pad([tokens(30), tokens(22, seed=2)])

    def run(model, **extra):
        settings = dict(max_new_tokens=12, eos_token_id=None, pad_token_id=0, **extra)
        return model.generate(ids, attention_mask=mask, **{CACHE: kvsparse_hf.SnapKVCache(model, budget=16, window=4)}, **settings)

    frozen = {"custom_generate": FastDecode(compile="freeze")}
    before = run(model)
    assert torch.equal(run(model, **frozen), before)
    with torch.no_grad():
        model.lm_head.weight.neg_()
    after = run(model)
    assert torch.equal(run(model, **frozen), after) and not torch.equal(before, after)
    gone = weakref.ref(model)
    del model
    torch._dynamo.reset()
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("vocabulary", [100, 16384, 32064, 50257, 128256])
def test_first_largest_is_argmax(vocabulary):
    torch.manual_seed(0)
    scores = torch.randint(0, 5, (6, vocabulary)).float()  # every value many times
    scores[1] = float("-inf")
    scores[2] = torch.randn(vocabulary)
    scores[3, -1] = scores[4, 0] = 9.0
    scores[5, vocabulary // 2] = float("nan")
    assert torch.equal(first_largest(scores), torch.argmax(scores, dim=-1))
