"""Bad input: a clear error of ours, before any state changed."""

import math
import warnings

import numpy as np
import pytest
import torch
import transformers
from helpers import (
    decode,
    forward,
    generate,
    kept_in_all_layers,
    left_pad,
    positions,
    prefill,
    same_snapshot,
    seen,
    snapshot,
    tokens,
)
from methods import ALL, BUDGET, CORE, METHODS
from tiny_models import FAMILIES, build

import kvsparse_hf
from kvsparse_hf import (
    BudgetError,
    KVSparseError,
    OptionError,
    SnapKVCache,
    StreamingLLMCache,
    UnsupportedModelError,
    UnsupportedOperationError,
)

by_method = pytest.mark.parametrize("case", METHODS, ids=lambda case: case.id)
by_core = pytest.mark.parametrize("case", CORE, ids=lambda case: case.id)

# --- options -----------------------------------------------------------------------------------------------------------

_BAD_BUDGETS = [0, -1, 0.0, -0.5, 1.5, math.nan, math.inf, -math.inf, True, False, None, "12 potatoes", "-3MiB", "", "MiB", "512", "1e3KB",
                "0KiB", [], (12,), {"tokens": 12}, 12 + 0j, "nan", b"1MiB"]


@pytest.mark.parametrize("case", [case for case in CORE if case.takes_budget], ids=lambda case: case.id)
@pytest.mark.parametrize("budget", _BAD_BUDGETS, ids=repr)
def test_bad_budgets(case, budget):
    model = build()
    with pytest.raises(BudgetError, match="budget"):
        case.make(model, budget)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("budget, kept", [(np.int64(12), 12), (0.5, 20), (np.float32(0.5), 20), ("1 GiB", 40), ("12.5KB", 12500 // (2 * 2 * (2 * 16 * 4 + 4))), (1.0, 40)],
                         ids=repr)
def test_good_budgets(budget, kept):
    model = build()
    mine = SnapKVCache(model, budget=budget, window=4)
    forward(model, tokens(40), mine)
    held = {len(head) for layer in kept_in_all_layers(mine) for head in layer[0]}
    assert held == {kept}


@pytest.mark.parametrize("make", [
    lambda model: SnapKVCache(model, budget=31),
    lambda model: SnapKVCache(model, budget=12, window=16),
    lambda model: SnapKVCache(model, budget=12, window=10, sinks=3),
    lambda model: SnapKVCache(model, budget=12, window=2, recent=13),
    lambda model: StreamingLLMCache(model, budget=4),
    lambda model: StreamingLLMCache(model, budget=12, sinks=12),
    lambda model: StreamingLLMCache(model, budget=12, sinks=4, recent=9),
])
def test_budget_below_what_must_stay(make):
    model = build()
    with pytest.raises(BudgetError, match="smaller than"):
        make(model)
    assert model.config._attn_implementation == "sdpa"


def test_a_byte_budget_below_one_token():
    model = build()
    mine = SnapKVCache(model, budget="100B", window=1)
    with pytest.raises(BudgetError, match="bytes"):
        forward(model, tokens(40), mine)


@pytest.mark.parametrize("make, error, words", [
    (lambda model: SnapKVCache(model, windw=4), OptionError, "'window'"),
    (lambda model: StreamingLLMCache(model, sink=4), OptionError, "'sinks'"),
    (lambda model: kvsparse_hf.FullCache(model, budget=12), OptionError, "budget"),
    (lambda model: SnapKVCache(model, window=0), OptionError, "window"),
    (lambda model: SnapKVCache(model, window=-3), OptionError, "window"),
    (lambda model: SnapKVCache(model, window=2.5), OptionError, "window"),
    (lambda model: SnapKVCache(model, kernel=4), OptionError, "kernel"),
    (lambda model: SnapKVCache(model, pooling="median"), OptionError, "pooling"),
    (lambda model: SnapKVCache(model, reduce="min"), OptionError, "reduce"),
    (lambda model: SnapKVCache(model, decode="shrink"), OptionError, "decode"),
    (lambda model: SnapKVCache(model, positions="text"), OptionError, "positions"),
    (lambda model: StreamingLLMCache(model, positions="text"), OptionError, "positions"),
    (lambda model: StreamingLLMCache(model, sinks=-1), OptionError, "sinks"),
    (lambda model: SnapKVCache(model, reserve=0), OptionError, "reserve"),
    (lambda model: SnapKVCache(model, backend="cuda"), OptionError, "backend"),
    (lambda model: kvsparse_hf.get_method("snapvk"), KVSparseError, "'snapkv'"),
])
def test_bad_options(make, error, words):
    model = build()
    with pytest.raises(error, match=words):
        make(model)
    assert model.config._attn_implementation == "sdpa"


# --- models ------------------------------------------------------------------------------------------------------------

_SMALL = dict(vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48)


def _t5():
    return transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=97, d_model=32, d_kv=16, d_ff=48, num_layers=2, num_heads=2))


def _bart():
    return transformers.BartForConditionalGeneration(transformers.BartConfig(
        vocab_size=97, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=48, decoder_ffn_dim=48))


def _bert():
    return transformers.BertModel(transformers.BertConfig(**_SMALL))


def _bert_lm():
    return transformers.BertForMaskedLM(transformers.BertConfig(**_SMALL))


def _mamba():
    return transformers.MambaForCausalLM(transformers.MambaConfig(vocab_size=97, hidden_size=32, num_hidden_layers=2, state_size=4))


def _classifier():
    return transformers.LlamaForSequenceClassification(transformers.LlamaConfig(num_key_value_heads=2, **_SMALL))


def _gemma2_sdpa():
    model = build("gemma2", "eager")
    model.config._attn_implementation = "sdpa"  # some versions of Transformers load it so, and then ignore the cap
    return model


def _shares_otherwise():
    model = build()
    model.config.kv_source_layers = [0, 0]
    return model


@pytest.mark.parametrize("model, words", [
    (_t5, "encoder-decoder"),
    (_bart, "encoder-decoder"),
    (_bert, "causal|generate"),
    (_bert_lm, "causal|generate"),
    (_mamba, "attention"),
    (_classifier, "generate"),
    (_gemma2_sdpa, "eager"),
    (_shares_otherwise, "shares keys and values"),
], ids=lambda value: getattr(value, "__name__", None))
def test_unsupported_models(model, words):
    model = model()
    before = model.config._attn_implementation
    with pytest.raises(UnsupportedModelError, match=words):
        ALL["snapkv"].make(model)
    assert model.config._attn_implementation == before


@pytest.mark.parametrize("family", [family for family, facts in FAMILIES.items() if facts.sliding_window])
@pytest.mark.parametrize("case", [case for case in METHODS if not case.hybrids], ids=lambda case: case.id)
def test_models_that_slide_by_themselves(case, family):
    model = build(family)
    before = model.config._attn_implementation
    with pytest.raises(UnsupportedModelError, match="layer [0-9] of .* has none"):
        case.make(model)
    assert model.config._attn_implementation == before


def test_a_flex_attention_base():
    model = build()
    model.set_attn_implementation("flex_attention")
    with pytest.raises(UnsupportedModelError, match="flex_attention.*sdpa"):
        ALL["full"].make(model)
    assert model.config._attn_implementation == "flex_attention"


@pytest.mark.parametrize("thing", [None, "gpt2", 3, torch.nn.Linear(2, 2), {}, object()], ids=lambda thing: type(thing).__name__)
def test_not_a_model(thing):
    with pytest.raises(KVSparseError, match="model"):
        ALL["snapkv"].make(thing)


@pytest.mark.parametrize("rope", [
    {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
    {"rope_type": "longrope", "factor": 4.0, "rope_theta": 10000.0, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8,
     "original_max_position_embeddings": 64},
], ids=lambda rope: rope["rope_type"])
def test_cache_positions_with_length_dependent_rope(rope):
    model = build(rope_parameters=rope)
    for make in (lambda: StreamingLLMCache(model, budget=12), lambda: SnapKVCache(model, budget=12, window=4, positions="cache")):
        with pytest.raises(UnsupportedModelError, match=rope["rope_type"]):
            make()
        assert model.config._attn_implementation == "sdpa"
    generate(model, tokens(20), StreamingLLMCache(model, budget=12, positions="original"), 3)


# --- use ---------------------------------------------------------------------------------------------------------------


def _refused_without_a_trace(model, mine, mask, act, words, error=UnsupportedOperationError):
    """The refused call `act(cache)` changes nothing: afterwards the cache continues like one that never saw it."""
    untouched, mine = mine.fork(), mine.fork()
    before, length = snapshot(mine), seen(mine)
    with pytest.raises(error, match=words):
        act(mine)
    assert same_snapshot(snapshot(mine), before) and seen(mine) == length
    after = tokens(5, len(mask), seed=8)
    assert torch.equal(decode(model, mine, after, mask), decode(model, untouched, after, mask))
    grown = torch.cat((mask, mask.new_ones(len(mask), 8)), dim=1)
    turn = dict(attention_mask=grown, position_ids=positions(grown)[:, -3:])
    assert torch.equal(forward(model, tokens(3, len(mask)), mine, **turn), forward(model, tokens(3, len(mask)), untouched, **turn))


def _started(case, model):
    ids, mask = left_pad([tokens(20), tokens(13, seed=2)])
    mine = case.make(model)
    prefill(model, mine, ids, mask)
    return mine, mask


@by_core
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("length", [1, 4])
def test_another_batch_size(case, rows, length):
    model = build()
    mine, mask = _started(case, model)
    given = torch.ones(rows, 20 + length, dtype=torch.long)
    _refused_without_a_trace(model, mine, mask, lambda cache: forward(model, tokens(length, rows), cache), "rows|batch")
    _refused_without_a_trace(
        model, mine, mask,
        lambda cache: forward(model, tokens(length, rows), cache, attention_mask=given, position_ids=positions(given)[:, -length:]),
        "rows|batch",
    )


@by_core
def test_right_padding_and_holes(case):
    model = build()
    ids = tokens(20, 2)
    for first, last in ((15, 20), (5, 8), (19, 20)):
        mask = torch.ones_like(ids)
        mask[1, first:last] = 0
        mine = case.make(model)
        with pytest.raises(UnsupportedOperationError, match="left padding|padding_side"):
            prefill(model, mine, ids, mask)
        assert seen(mine) == 0 and mine.report().seen == []
        assert torch.equal(generate(model, ids, mine, 4), generate(model, ids, case.make(model), 4))


@by_core
def test_padding_that_changes_between_turns(case):
    model = build()
    mine, mask = _started(case, model)
    new = torch.ones(2, 4, dtype=torch.long)
    for other in (torch.ones_like(mask), mask.clone().index_fill_(1, torch.tensor([7]), 0), mask.flip(0)):
        whole = torch.cat((other, new), dim=1)
        _refused_without_a_trace(
            model, mine, mask,
            lambda cache, whole=whole: forward(
                model, tokens(4, 2), cache, attention_mask=whole, position_ids=positions(torch.cat((mask, new), 1))[:, -4:]),
            "padding",
        )
    hole = torch.cat((mask, new), dim=1)
    hole[1, 21] = 0
    _refused_without_a_trace(
        model, mine, mask,
        lambda cache: forward(model, tokens(4, 2), cache, attention_mask=hole, position_ids=positions(hole)[:, -4:]), "padding")


@by_core
def test_a_mask_of_the_new_tokens_alone(case):
    model = build()
    mine = case.make(model)
    forward(model, tokens(20), mine)
    for length in (4, 20):
        given = torch.ones(1, length, dtype=torch.long)
        _refused_without_a_trace(
            model, mine, torch.ones(1, 20, dtype=torch.long),
            lambda cache, given=given, length=length: forward(
                model, tokens(length), cache, attention_mask=given, position_ids=torch.arange(20, 20 + length)[None]),
            "mask",
        )


@by_core
def test_positions_that_do_not_follow(case):
    model = build()
    mine = case.make(model)
    forward(model, tokens(20), mine)
    for start in (3, 19, 21, 100):
        _refused_without_a_trace(
            model, mine, torch.ones(1, 20, dtype=torch.long),
            lambda cache, start=start: forward(model, tokens(4), cache, position_ids=torch.arange(start, start + 4)[None]), "position")


@by_core
def test_a_4d_mask(case):
    """A mask that the caller built is refused: we could not tell padding from pattern."""
    model = build()
    mine = case.make(model)
    causal = torch.ones(20, 20, dtype=torch.bool).tril()[None, None]
    with pytest.raises(UnsupportedOperationError, match="mask"):
        forward(model, tokens(20), mine, attention_mask=causal)
    assert seen(mine) == 0
    assert torch.equal(generate(model, tokens(20), mine, 4), generate(model, tokens(20), case.make(model), 4))


@pytest.mark.parametrize("other, attached", [(name, attached) for name in ("llama-mha", "llama-gqa4", "qwen3", "gemma3", "wide", "deep", "shallow")
                                             for attached in (False, True)])
def test_a_cache_of_another_model(other, attached):
    """The wrong model is noticed before a layer takes anything, whether or not it has a cache of its own."""
    model = build()
    special = {"wide": dict(head_dim=32), "deep": dict(num_hidden_layers=3), "shallow": dict(num_hidden_layers=1)}
    wrong = build(**special[other]) if other in special else build(other)
    if attached:
        ALL["full"].make(wrong)
    mine = ALL["snapkv"].make(model)
    with pytest.raises(UnsupportedOperationError, match="made for|attention"):
        forward(wrong, tokens(20), mine)
        forward(wrong, tokens(1), mine)  # a model of a single layer without our attention shows itself only now
    assert seen(mine) == 0
    mine.reset()
    assert torch.equal(generate(model, tokens(20), mine, 4), generate(model, tokens(20), ALL["snapkv"].make(model), 4))


@by_core
@pytest.mark.parametrize("switched", ["sdpa", "eager"])
def test_attention_switched_back(case, switched):
    model = build()
    mine = case.make(model)
    forward(model, tokens(20), mine)
    before = snapshot(mine)
    model.set_attn_implementation(switched)
    for length in (1, 4):
        with pytest.raises(UnsupportedOperationError, match="switched"):
            forward(model, tokens(length), mine)
    assert same_snapshot(snapshot(mine), before) and seen(mine) == 20
    fresh = case.make(model)  # a new cache attaches again, on top of what the user chose
    generate(model, tokens(20), fresh, 3)
    kvsparse_hf.detach(model)
    assert model.config._attn_implementation == switched


@by_core
def test_active_dropout(case):
    model = build(attention_dropout=0.1)
    mine = case.make(model)
    model.train()
    with pytest.raises(UnsupportedOperationError, match="eval"):
        forward(model, tokens(20), mine)
    model.eval()
    mine.reset()
    assert seen(mine) == 0
    assert torch.equal(generate(model, tokens(20), mine, 4), generate(model, tokens(20), case.make(model), 4))


def test_presets():
    model = build()
    with pytest.raises(kvsparse_hf.PresetError, match="snapkv"):
        kvsparse_hf.load_preset("snapkv-102", model)
    assert model.config._attn_implementation == "sdpa"


@by_method
def test_no_warning_comes_from_us(case):
    model = build()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mine = case.make(model, BUDGET)
        generate(model, tokens(20), mine, 4)
        mine.fork().reset()
        str(mine.report())
