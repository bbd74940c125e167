"""What else `generate()` offers: right with every method, or refused before the cache has changed.

With room for everything the same call with Transformers' own cache is the reference; with a small budget a plain loop of single
forwards over a cache of the same method.
"""

import time

import pytest
import torch
from helpers import CACHE, decode, generate, left_pad, prefill, seen, tiny_tokenizer, tokens
from methods import AMPLE, BUDGET, CORE, by_all, quick_where
from tiny_models import NEVER, build
from transformers import LogitsProcessorList, NoRepeatNGramLogitsProcessor, RepetitionPenaltyLogitsProcessor
from transformers.generation import CompileConfig, SequenceBiasLogitsProcessor, StoppingCriteria, StoppingCriteriaList

by_core = pytest.mark.parametrize("case", CORE, ids=lambda case: case.id)

LENGTHS, NEW = (30, 17), 12

# Modes that left Transformers for repositories of their own, whose code would have to be fetched and trusted.
MOVED = {
    "contrastive search": dict(penalty_alpha=0.6, top_k=4),
    "constrained beams": dict(num_beams=3, force_words_ids=[[5, 6]]),
    "group beams": dict(num_beams=4, num_beam_groups=2, diversity_penalty=0.5),
    "dola": dict(dola_layers="high"),
}

# Options under which the tokens must be those of the dense cache.
SAME = {
    "beam-sampling": dict(num_beams=3, do_sample=True, temperature=1.5, top_k=0),
    "early-stopping": dict(num_beams=4, num_return_sequences=2, early_stopping=True, length_penalty=0.5),
    "samplers": dict(do_sample=True, top_k=20, top_p=0.9, min_p=0.01, typical_p=0.9, epsilon_cutoff=1e-4),
    "guidance": dict(guidance_scale=1.5),
    "no-compile": dict(disable_compile=True),
    "penalties": dict(repetition_penalty=1.7, no_repeat_ngram_size=2, bad_words_ids=[[7], [9, 11]], suppress_tokens=[13]),
}


def _prompts():
    return left_pad([tokens(length, seed=20 + index) for index, length in enumerate(LENGTHS)])


def _loop(model, cache, ids, mask, new: int, processors=()):
    """Greedy decoding, one forward a token."""
    out, whole = [], ids
    logits = prefill(model, cache, ids, mask)[:, -1]
    for _ in range(new):
        for processor in processors:
            logits = processor(whole, logits)
        out.append(logits.argmax(-1, keepdim=True))
        whole = torch.cat((whole, out[-1]), dim=1)
        logits = decode(model, cache, out[-1], mask)[:, -1]
        mask = torch.cat((mask, mask.new_ones(len(mask), 1)), dim=1)
    return torch.cat(out, dim=1)


@pytest.mark.feature("beam sampling, samplers, guidance")
@pytest.mark.parametrize("case, options", quick_where(lambda case, options: case in CORE, SAME))
def test_options_that_choose_tokens(case, options):
    model, out = build(), []
    ids, mask = _prompts()
    for cache in (case.dense(model), case.make(model, AMPLE)):
        torch.manual_seed(11)
        out.append(generate(model, ids, cache, NEW, attention_mask=mask, **SAME[options]))
    assert torch.equal(*out)


@pytest.mark.feature("logits processors")
@by_all
def test_logits_processors(case):
    """Of Transformers and of one's own; each sees all tokens, also those that were evicted."""
    model = build()
    ids, mask = _prompts()
    processors = [RepetitionPenaltyLogitsProcessor(1.7), NoRepeatNGramLogitsProcessor(2), SequenceBiasLogitsProcessor([[[7], -4.0]])]
    widths = []

    def own(input_ids, scores):
        widths.append(input_ids.shape[1])
        return scores

    got = generate(model, ids, case.make(model), NEW, attention_mask=mask, logits_processor=LogitsProcessorList([*processors, own]))
    assert torch.equal(got, _loop(model, case.make(model), ids, mask, NEW, processors))
    assert widths == list(range(ids.shape[1], ids.shape[1] + NEW))


class _After(StoppingCriteria):
    """Ends every row after so many tokens in all."""

    def __init__(self, length: int):
        self.length = length

    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.length)


@pytest.mark.feature("stopping: several end tokens, stop strings, time, own criteria")
@pytest.mark.parametrize("case, how", quick_where(lambda case, how: case in CORE, ["eos", "minimum", "string", "own", "time"]))
def test_stopping(case, how):
    """A row ends where it must, and the others go on as if alone."""
    model = build()
    ids, mask = _prompts()
    plain = _loop(model, case.make(model), ids, mask, NEW)
    ends = [next(token for token in row[start:] if token > 2) for row, start in zip(plain.tolist(), (3, 7), strict=True)]
    # A stop string may also end within a token: "w7" in "w71".
    last = {token for token in range(97) if any(token == end or how == "string" and f"{token}".startswith(f"{end}") for end in ends)}
    first = [next(i for i, token in enumerate(row) if token in last) for row in plain.tolist()]
    options = dict(min_new_tokens=None, pad_token_id=0)
    if how in ("eos", "minimum"):
        options["eos_token_id"] = ends
    if how == "minimum":
        options["min_new_tokens"] = NEW
    if how == "string":
        options |= dict(stop_strings=[f"w{end}" for end in ends], tokenizer=tiny_tokenizer())
    if how == "own":
        options |= dict(stopping_criteria=StoppingCriteriaList([_After(ids.shape[1] + 5)]))
    if how == "time":
        options |= dict(max_time=1e-9)
    mine = case.make(model)
    got = generate(model, ids, mine, NEW, attention_mask=mask, **options)
    if how == "minimum":
        ban = SequenceBiasLogitsProcessor([[[end], -1e9] for end in ends])
        assert torch.equal(got, _loop(model, case.make(model), ids, mask, NEW, [ban]))
    elif how in ("own", "time"):
        assert torch.equal(got, plain[:, :5 if how == "own" else 1])
    else:
        for row, end in enumerate(first):
            assert got[row, :end + 1].tolist() == plain[row, :end + 1].tolist() and not got[row, end + 1:].any()
    assert seen(mine) == ids.shape[1] + got.shape[1] - 1


@pytest.mark.feature("attention weights while decoding", refused=lambda case: True)
@by_all
def test_attention_weights_are_the_prompts_alone(case):
    """With eager attention the prompt's weights are the model's own. Decode steps have none to give, as with any fused attention."""
    model = build(attention="eager")
    ids, mask = _prompts()
    options = dict(attention_mask=mask, output_attentions=True, return_dict_in_generate=True)
    got, expected = (generate(model, ids, cache, 4, **options) for cache in (case.make(model), case.dense(model)))
    if case.dense(model).__class__.__name__ == "DynamicCache":
        assert all(torch.equal(*pair) for pair in zip(got.attentions[0], expected.attentions[0], strict=True))
    assert not any(weights is not None for step in got.attentions[1:] for weights in step)


@pytest.mark.parametrize("mode", MOVED)
@by_core
def test_modes_that_left_transformers(case, mode):
    """Transformers asks for their code before it touches the cache."""
    model = build()
    mine = case.make(model)
    with pytest.raises(ValueError, match="trust_remote_code"):
        generate(model, tokens(20), mine, 4, **MOVED[mode])
    assert seen(mine) == 0
    assert torch.equal(generate(model, tokens(20), mine, 4), generate(model, tokens(20), case.make(model), 4))


@pytest.mark.parametrize("kind", ["static", "dynamic", "quantized", "offloaded"])
@by_core
def test_a_cache_and_a_cache_implementation(case, kind):
    model = build()
    mine = case.make(model)
    with pytest.raises(ValueError, match="Passing both"):
        generate(model, tokens(20), mine, 4, cache_implementation=kind)
    assert seen(mine) == 0


@by_all
def test_use_cache_false_beside_a_cache(case):
    """Everything is fed again in each step, so the cache starts over each time. (Transformers' own then answers wrongly.)"""
    model = build()
    got = generate(model, tokens(20), case.make(model), 6, use_cache=False)
    assert torch.equal(got, generate(model, tokens(20), case.dense(model), 6))


@by_all
def test_an_assistant_of_another_size(case):
    """It has a cache of its own, of Transformers' or of ours; the model's answer does not depend on it."""
    if not case.drafts:
        pytest.skip("refused: test_drafts.py")
    model, assistant = build(), build(num_hidden_layers=1, hidden_size=32)
    plain = case.dense(model) if case.selects else case.make(model)
    expected = generate(model, tokens(30), plain, 12)
    assert torch.equal(generate(model, tokens(30), case.make(model), 12, assistant_model=assistant), expected)
    assert torch.equal(generate(model, tokens(30), case.make(model), 12, assistant_early_exit=1), expected)


@by_all
def test_a_time_limit_between_turns(case):
    """A run that was cut short leaves a cache to go on with."""
    model = build()
    mine, straight = case.make(model), case.make(model)
    start = time.monotonic()
    cut = generate(model, tokens(30), mine, 40, max_time=0.05, min_new_tokens=None)
    assert cut.shape[1] < 40 or time.monotonic() - start < 0.1
    whole = torch.cat((tokens(30), cut, tokens(5, seed=6)), dim=1)
    assert torch.equal(generate(model, tokens(30), straight, cut.shape[1]), cut)
    assert torch.equal(generate(model, whole, mine, 6), generate(model, whole, straight, 6))


@by_all
def test_a_chat(case):
    """Three turns through a chat template with one cache: only what is new is fed, and the answers are those of one long loop."""
    model, tokenizer = build(eos_token_id=NEVER), tiny_tokenizer()
    mine, manual, messages, fed = case.make(model), case.make(model), [], 0
    for turn in range(3):
        text = " ".join(f"w{token}" for token in tokens(9 - turn, seed=70 + turn)[0].tolist())
        messages.append({"role": "user", "content": text})
        inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        ids = inputs["input_ids"]
        answer = generate(model, ids, mine, 7, attention_mask=inputs["attention_mask"])
        new = ids[:, fed:]
        logits = model(input_ids=new, **{CACHE: manual}).logits[:, -1:]
        loop = [logits.argmax(-1)]
        for _ in range(6):
            loop.append(decode(model, manual, loop[-1]).argmax(-1))
        assert torch.equal(answer, torch.cat(loop, dim=1))
        fed = ids.shape[1] + 6
        messages.append({"role": "assistant", "content": tokenizer.decode(answer[0])})
        assert seen(mine) == fed


@pytest.mark.feature("tied embeddings")
@pytest.mark.parametrize("case, tied", quick_where(lambda case, tied: case in CORE, [True, False]))
def test_tied_and_untied_embeddings(case, tied):
    model = build(tie_word_embeddings=tied)
    ids, mask = _prompts()
    same = model.get_input_embeddings().weight.data_ptr() == model.get_output_embeddings().weight.data_ptr()
    assert same == tied
    out = [generate(model, ids, cache, NEW, attention_mask=mask) for cache in (case.dense(model), case.make(model, AMPLE))]
    assert torch.equal(*out)


# Heads, attention and dtype, in an order in which every pair of two values of them meets some method, and every method each value.
_MODELS = [(heads, attention, dtype) for heads in ("llama-mha", "llama-mqa8", "llama-gqa4") for attention in ("eager", "sdpa")
           for dtype in (torch.bfloat16, torch.float16, torch.float32)]
# Logits of size 3; eager attention also rounds the weights, to 8 bits in bfloat16 and to 11 in float16.
_ROUNDING = {torch.bfloat16: 1e-1, torch.float16: 2e-2, torch.float32: 1e-5}


def _rotating():
    """Each method with 3 of the 18 models, others for the next method; the rest is slow."""
    def quick(case, model):
        return case in CORE and (_MODELS.index(model) - 3 * CORE.index(case)) % 18 < 3

    return [pytest.param(*param.values, id="-".join((param.values[0].id, *map(str, param.values[1]))), marks=param.marks)
            for param in quick_where(quick, _MODELS)]


@pytest.mark.feature("MHA, GQA, MQA; sdpa, eager")
@pytest.mark.parametrize("case, kind", _rotating())
def test_heads_attention_and_dtype(case, kind):
    """A padded batch: room for everything gives the dense logits, a small budget a row what the row alone gives."""
    family, attention, dtype = kind
    model = build(family, attention, dtype=dtype)
    ids, mask = _prompts()
    after = tokens(10, 2, seed=3)
    logits = []
    for cache in (case.dense(model), case.make(model, AMPLE)):
        prefill(model, cache, ids, mask)
        logits.append(decode(model, cache, after, mask).float())
    torch.testing.assert_close(*logits, atol=_ROUNDING[dtype] * case.rounding, rtol=0)
    if dtype is not torch.float32:
        return
    batch, alone = case.make(model), case.make(model)
    prefill(model, batch, ids, mask)
    prefill(model, alone, ids[1:, -LENGTHS[1]:])
    torch.testing.assert_close(decode(model, batch, after, mask)[1:], decode(model, alone, after[1:]), atol=5e-5, rtol=0)


@by_all
def test_our_step_without_compilation_is_the_compiled_one(case):
    """`disable_compile` wins over a compile config."""
    model = build()
    config = CompileConfig(backend="no such backend")
    config._compile_all_devices = True
    got = generate(model, tokens(20), case.make(model, BUDGET), 6, compile_config=config, disable_compile=True)
    assert torch.equal(got, generate(model, tokens(20), case.make(model, BUDGET), 6))
