"""With a budget that holds everything, every method gives what Transformers' dense cache gives."""

from functools import cache

import pytest
import torch
from helpers import CACHE, decode, dense, forward, generate, left_pad, prefill, tokens
from methods import ALL, AMPLE, BUDGET, CORE, METHODS, by_all
from tiny_models import FAMILIES, build, each_family

LENGTH, NEW, STEPS = 40, 64, 14
# Largest difference of decode logits (of size 3) from DynamicCache: same maths, another order of summation. fp32: 1e-5.
TOLERANCE = {torch.float16: 1e-2, torch.bfloat16: 1e-1}

by_method = pytest.mark.parametrize("case", METHODS, ids=lambda case: case.id)
by_core = pytest.mark.parametrize("case", CORE, ids=lambda case: case.id)


def _run(model, make):
    """Prefill logits; 64 greedy tokens with their logits; then the logits of a 3-token turn on the same cache."""
    ids, mine = tokens(LENGTH), make()
    first = forward(model, ids, make())
    out = generate(model, ids, mine, NEW, return_dict_in_generate=True, output_logits=True)
    turn = forward(model, tokens(3, seed=5), mine)
    return first, torch.stack(out.logits), out.sequences[:, LENGTH:], turn


@cache
def _reference(family: str, attention: str, make=dense):
    model = build(family, attention)
    return _run(model, lambda: make(model))


def _matrix() -> list:
    """Three methods on every architecture and attention, every method on two; the rest of the matrix takes minutes: slow."""
    always = [ALL[name] for name in ("full", "snapkv", "streaming")]
    pairs = {family.id: family.values for family in each_family()}
    out = []
    for name, (family, attention) in pairs.items():
        for case in METHODS:
            if FAMILIES[family].sliding_window and not case.hybrids:
                continue
            quick = case in always or name == "llama-gqa2-sdpa" or (name == "gemma3-eager" and not case.variant)
            if quick or not case.variant:
                marks = () if quick else pytest.mark.slow
                out.append(pytest.param(case, family, attention, id=f"{name}-{case.id}", marks=marks))
    return out


@pytest.mark.parametrize("case, family, attention", _matrix())
def test_every_architecture(case, family, attention):
    _check_equal(case, family, attention)


def _check_equal(case, family, attention):
    expected = _reference(family, attention, case.dense)
    varied = 8 if case.dense is dense else 5
    assert len(set(expected[2].flatten().tolist())) > varied  # a model that repeats itself would prove little
    model = build(family, attention)
    first, logits, new, turn = _run(model, lambda: case.make(model, AMPLE))
    assert torch.equal(first, expected[0])  # bit for bit
    assert torch.equal(new, expected[2])
    for mine, theirs in ((logits, expected[1]), (turn, expected[3])):
        torch.testing.assert_close(mine, theirs, atol=1e-5 * max(1.0, float(theirs.abs().max())), rtol=0)


@by_core
@pytest.mark.parametrize("budget", [LENGTH + NEW, "1MiB", 1.0], ids=str)
def test_every_form_of_an_ample_budget(case, budget):
    if budget == 1.0 and (case.bounded or case.selects):
        new = LENGTH  # the share is one of the prompt: the first decoded token already evicts
        model = build()
        mine = case.make(model, budget)
        assert torch.equal(forward(model, tokens(LENGTH), mine), _reference("llama-gqa2", "sdpa")[0])
        assert case.held(mine) == {new}
        return
    model = build()
    assert torch.equal(generate(model, tokens(LENGTH), case.make(model, budget), NEW), _reference("llama-gqa2", "sdpa")[2])


@pytest.mark.feature("fp16 and bf16")
@by_method
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_dtypes(case, dtype):
    model = build(dtype=dtype)
    reference, mine = case.dense(model), case.make(model, AMPLE)
    ids = tokens(LENGTH)
    assert torch.equal(forward(model, ids, mine), forward(model, ids, reference))
    store = mine.sparse_layers[0].store
    assert store.keys.dtype == store.values.dtype == dtype
    after, expected = (decode(model, cache, tokens(8, seed=3)) for cache in (mine, reference))
    torch.testing.assert_close(after.float(), expected.float(), atol=TOLERANCE[dtype] * case.rounding, rtol=0)


@pytest.mark.parametrize(
    "case, length",
    [
        pytest.param(case, length, id=f"{case.id}-{length}")
        for case in METHODS
        for length in sorted({1, 2, 4, case.window - 1, case.window, case.window + 1, BUDGET - 1, BUDGET, BUDGET + 1})
        if length > 0
    ],
)
def test_short_prompts(case, length):
    """Around every edge: the first forward is dense, the right number is kept, and decode is dense while nothing had to go."""
    model = build()
    ids, after = tokens(length), tokens(STEPS, seed=3)
    reference, mine = case.dense(model), case.make(model, BUDGET, reserve=3)
    assert torch.equal(forward(model, ids, mine), forward(model, ids, reference))
    assert case.held(mine) == {case.kept_after_prompt(length)}
    expected, got = decode(model, reference, after), decode(model, mine, after)
    assert case.held(mine) == {case.kept_after_decode(length, STEPS)}
    assert got.isfinite().all()
    untouched = case.is_untouched(length)
    same = STEPS if untouched and not (case.bounded or case.selects) else max(BUDGET - length, 0) if untouched else 0
    same = min(same, case.every) if case.every else same
    torch.testing.assert_close(got[:, :same], expected[:, :same], atol=1e-5, rtol=0)
    if case.bounded and 0 < same < STEPS - 3:
        assert not torch.allclose(got[:, same + 2:], expected[:, same + 2:], atol=1e-3)  # and then eviction shows


@by_method
def test_prompt_of_one_token_outlives_the_reserve(case):
    model = build()
    ids = tokens(1)
    mine = case.make(model, AMPLE, reserve=2)
    for _ in range(2):
        assert torch.equal(generate(model, ids, mine, 12), generate(model, ids, case.dense(model), 12))
        mine.reset()


@by_method
@pytest.mark.parametrize("reserve", [1, 3])
def test_growth_loses_nothing(case, reserve):
    model = build(num_hidden_layers=3)
    ids = tokens(9)
    assert torch.equal(generate(model, ids, case.make(model, AMPLE, reserve=reserve), 24), generate(model, ids, case.dense(model), 24))


@pytest.mark.feature("`inputs_embeds`")
@by_all
def test_inputs_embeds(case):
    model = build()
    embeds = model.get_input_embeddings()(tokens(LENGTH))
    expected, got = (generate(model, None, cache, inputs_embeds=embeds) for cache in (case.dense(model), case.make(model, AMPLE)))
    assert torch.equal(got, expected)


@pytest.mark.feature("sampling")
@by_all
def test_sampling(case):
    model = build()
    ids, mask = left_pad([tokens(30), tokens(17, seed=2)])
    out = []
    for held in (case.dense(model), case.make(model, AMPLE)):
        torch.manual_seed(11)
        out.append(generate(model, ids, held, 24, attention_mask=mask, do_sample=True, temperature=1.5, top_k=0))
    assert torch.equal(*out)
    assert not torch.equal(out[0][:, :8], generate(model, ids, case.dense(model), 8, attention_mask=mask))


@pytest.mark.feature("`num_return_sequences`")
@by_all
@pytest.mark.parametrize("budget", [AMPLE, BUDGET])
def test_num_return_sequences(case, budget):
    """Equal to the same prompt fed three times."""
    model = build()
    ids = tokens(30)
    torch.manual_seed(11)
    got = generate(model, ids, case.make(model, budget), 12, do_sample=True, num_return_sequences=3)
    torch.manual_seed(11)
    expected = generate(model, ids.repeat(3, 1), case.make(model, budget), 12, do_sample=True)
    assert torch.equal(got, expected) and got.shape == (3, 12)
    assert len({tuple(row) for row in got.tolist()}) == 3


@pytest.mark.feature("beams")
@pytest.mark.parametrize(
    "case, family", [(case, "llama-gqa2") for case in METHODS] + [(case, "gemma3") for case in CORE], ids=lambda x: getattr(x, "id", x)
)
def test_beams(case, family):
    model = build(family)
    ids, mask = left_pad([tokens(30), tokens(17, seed=2)])
    out = [generate(model, ids, cache, 10, attention_mask=mask, num_beams=3) for cache in (case.dense(model), case.make(model, AMPLE))]
    assert torch.equal(*out)


@by_method
def test_beams_carry_their_own_state_under_eviction(case):
    """The score of every returned beam is that of its tokens, fed alone to a fresh cache."""
    model = build()
    prompts = [tokens(30), tokens(17, seed=2)]
    ids, mask = left_pad(prompts)
    out = generate(model, ids, case.make(model), 8, attention_mask=mask, num_beams=3, num_return_sequences=3,
                   length_penalty=0.0, return_dict_in_generate=True, output_scores=True)
    for row, prompt in enumerate(prompts):
        for beam in range(3):
            new = out.sequences[3 * row + beam, ids.shape[1]:].unsqueeze(0)
            alone = case.make(model)
            logits = torch.cat((prefill(model, alone, prompt)[:, -1:], decode(model, alone, new[:, :-1])), dim=1)
            score = logits.log_softmax(-1).gather(-1, new.unsqueeze(-1)).sum()
            torch.testing.assert_close(out.sequences_scores[3 * row + beam], score, atol=1e-3, rtol=0)


class _Collector:
    def __init__(self):
        self.tokens, self.ended = [], False

    def put(self, value):
        self.tokens.append(value.flatten().tolist())

    def end(self):
        self.ended = True


@pytest.mark.feature("streamers")
@by_all
def test_streamer(case):
    model = build()
    ids, streamer = tokens(20), _Collector()
    new = generate(model, ids, case.make(model), 10, streamer=streamer)
    assert streamer.ended
    assert sum(streamer.tokens, []) == ids[0].tolist() + new[0].tolist()


@pytest.mark.feature("`prefill_chunk_size`")
@pytest.mark.parametrize(
    "case, chunk, padded",
    [pytest.param(case, chunk, padded, id=f"{case.id}-{chunk}-{'padded' if padded else 'even'}")
     for case in METHODS for chunk in (1, 3, 7, 100) for padded in (False, True) if case in CORE or (chunk, padded) == (7, True)],
)
def test_chunked_prefill(case, chunk, padded):
    """36 = 5 * 7 + 1: the last chunk of 7 is a single token; 25 pads span several chunks of 1, 3 and 7."""
    model = build()
    ids, mask = left_pad([tokens(36), tokens(11 if padded else 36, seed=2)])
    expected = generate(model, ids, case.dense(model), 12, attention_mask=mask)
    got = generate(model, ids, case.make(model, AMPLE), 12, attention_mask=mask, prefill_chunk_size=chunk)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("family", ["gemma3", "qwen2-hybrid", "gpt-oss"])
def test_chunked_prefill_of_hybrid_models(family):
    model = build(family)
    ids, mask = left_pad([tokens(36), tokens(11, seed=2)])
    expected = generate(model, ids, dense(model), 12, attention_mask=mask)
    got = generate(model, ids, ALL["full"].make(model), 12, attention_mask=mask, prefill_chunk_size=7)
    assert torch.equal(got, expected)


@pytest.mark.feature("scores, logits and hidden states")
@by_all
def test_output_options_of_generate(case):
    """Scores, hidden states and the returned cache are there; the cache object is the one passed in."""
    model = build(attention="eager")
    mine = case.make(model, AMPLE)
    out = generate(model, tokens(20), mine, 4, return_dict_in_generate=True, output_scores=True, output_hidden_states=True,
                   output_logits=True)
    expected = generate(model, tokens(20), case.dense(model), 4, return_dict_in_generate=True, output_logits=True)
    assert getattr(out, CACHE) is mine and len(out.hidden_states) == 4
    torch.testing.assert_close(torch.stack(out.logits), torch.stack(expected.logits), atol=1e-5, rtol=0)
