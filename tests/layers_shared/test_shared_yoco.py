"""YOCO: the window inside a prompt, the early exit of a prompt, and models that slide by themselves."""

import logging

import pytest
import torch
import torch._dynamo
import transformers
from helpers import CACHE, SharingDense, decode, forward, generate, kept_in_all_layers, left_pad, prefill, tokens
from shared_oracle import shared_forward, yoco_map, yoco_windows
from tiny_models import build
from torch._dynamo.backends.debugging import aot_eager
from torch.utils.flop_counter import FlopCounterMode
from transformers.generation import CompileConfig

from kvsparse_hf import (
    FullCache,
    KVSparseError,
    OptionError,
    SparseCache,
    UnsupportedModelError,
    UnsupportedOperationError,
    YOCOCache,
)
from kvsparse_hf.layers.owning import AttentionCall
from kvsparse_hf.layers.windowed import banded_attention

LAYERS, WINDOW = 4, 6


def _model(**options):
    return build(num_hidden_layers=LAYERS, initializer_range=0.15, **options)


@pytest.mark.parametrize("tokens_, length, window", [(1, 1, 1), (9, 9, 1), (9, 9, 4), (300, 300, 7), (300, 300, 200), (5, 40, 8), (140, 150, 3)])
def test_banded_attention(tokens_, length, window):
    """Against the full matrix, with padding that differs between the heads."""
    query, key, value = (torch.randn(2, heads, size, 8) for heads, size in ((4, tokens_), (2, length), (2, length)))
    pad = torch.tensor([[0, min(3, length - 1)], [length // 2, length - 1]])
    got = banded_attention(query, key, value, window, AttentionCall(0.3), pad)
    row = torch.arange(length - tokens_, length).unsqueeze(1)
    column = torch.arange(length)
    seen = (column <= row) & (column > row - window) & (column >= pad[:, :, None, None]) | (column == row)
    logits = (query @ key.repeat_interleave(2, 1).transpose(-1, -2) * 0.3).masked_fill(~seen.repeat_interleave(2, 1), float("-inf"))
    torch.testing.assert_close(got, logits.softmax(-1) @ value.repeat_interleave(2, 1), atol=1e-5, rtol=0)


def test_equals_a_model_that_slides_by_itself():
    """The same weights under a config whose lower half is sliding_attention, with Transformers' own layers and masks."""
    shape = dict(vocab_size=97, hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=LAYERS,
                 initializer_range=0.15, eos_token_id=None, pad_token_id=0)  # fmt: skip
    types = ["sliding_attention"] * 2 + ["full_attention"] * 2
    plain = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**shape)).eval()
    config = transformers.Qwen2Config(**shape, use_sliding_window=True, sliding_window=WINDOW, layer_types=types)
    sliding = transformers.Qwen2ForCausalLM(config).eval()
    sliding.load_state_dict(plain.state_dict())
    ids, mask = left_pad([tokens(30), tokens(17, seed=2)])
    after = tokens(12, 2, seed=3)
    outs = []
    for model, cache in (
        (sliding, SharingDense(sliding, yoco_map(LAYERS))),
        (plain, YOCOCache(plain, window=WINDOW)),
        (sliding, YOCOCache(sliding)),
    ):
        first = prefill(model, cache, ids, mask)[:, -1:]
        outs.append(torch.cat((first, decode(model, cache, after, mask)), dim=1))
    torch.testing.assert_close(outs[1], outs[0], atol=1e-5, rtol=0)
    torch.testing.assert_close(outs[2], outs[0], atol=1e-5, rtol=0)
    with pytest.raises(OptionError, match="window"):
        YOCOCache(sliding, window=WINDOW)


def _sliding_model():
    """Its lower half slides by the config."""
    types = ["sliding_attention"] * 2 + ["full_attention"] * 2
    return build("qwen2-hybrid", num_hidden_layers=LAYERS, layer_types=types, sliding_window=WINDOW, initializer_range=0.15)


def test_drafts_where_the_model_slides_by_itself():
    """The windows are Transformers' own, and nothing of ours is evicted: drafts and `crop` are up to them."""
    model, ids = _sliding_model(), tokens(10).repeat(1, 3)
    plain = generate(model, ids, YOCOCache(model), 20)
    assert torch.equal(plain, generate(model, ids, SharingDense(model, yoco_map(LAYERS)), 20))
    mine = YOCOCache(model)
    try:
        got = generate(model, ids, mine, 20, prompt_lookup_num_tokens=3)
    except UnsupportedOperationError as error:  # versions whose windows cannot take tokens back
        assert "sliding window" in str(error) and not hasattr(mine.layers[0], "record_past")
    else:
        assert torch.equal(got, plain)


def test_weights_of_a_prompt():
    """Every layer's, as the windowed model has them. Transformers would close the gap that a layer without any leaves."""
    model, ids = _model(attention="eager"), tokens(300)
    _, expected = shared_forward(model, ids, yoco_map(LAYERS), windows=yoco_windows(LAYERS, WINDOW))
    got = model(input_ids=ids, output_attentions=True, **{CACHE: YOCOCache(model, window=WINDOW)}).attentions
    assert len(got) == LAYERS
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_prompt_within_the_window_is_the_models_own(attention):
    """Bit for bit: nothing is cut off."""
    model, ids = _model(attention=attention), tokens(WINDOW)
    expected = forward(model, ids, SharingDense(model, yoco_map(LAYERS)))
    assert torch.equal(forward(model, ids, YOCOCache(model, window=WINDOW)), expected)


def test_learned_sinks_are_refused_before_the_prompt_counts():
    model = build("gpt-oss", num_hidden_layers=LAYERS, layer_types=["full_attention"] * LAYERS)
    mine = YOCOCache(model, window=WINDOW)
    with pytest.raises(UnsupportedOperationError, match="learned sinks"):
        forward(model, tokens(9), mine)
    assert int(mine.get_seq_length()) == 0 and mine.batch_size == -1


def test_a_file_of_a_wider_window_is_refused(tmp_path):
    model = _model()
    mine = YOCOCache(model, window=WINDOW)
    forward(model, tokens(20), mine)
    mine.save(tmp_path)
    path = tmp_path / "cache.json"
    path.write_text(path.read_text().replace(f'"window": {WINDOW}', f'"window": {WINDOW - 1}'))
    with pytest.raises(KVSparseError, match="another window"):
        SparseCache.load(tmp_path, model)


def test_crop_names_the_window():
    model = _model()
    mine = YOCOCache(model, window=WINDOW)
    forward(model, tokens(20), mine)
    with pytest.raises(UnsupportedOperationError, match=f"layer 0 sees a window of {WINDOW} tokens"):
        mine.crop(-1)
    assert kept_in_all_layers(mine)[2][0][0] == list(range(20))


def test_lower_layers_hold_the_window():
    model = _model()
    mine = YOCOCache(model, window=WINDOW)
    forward(model, tokens(20), mine)
    decode(model, mine, tokens(4, seed=3))
    forward(model, tokens(3, seed=4), mine)
    held = kept_in_all_layers(mine)
    assert held[0][0][0] == held[1][0][1] == list(range(27 - WINDOW, 27)) and held[2][0][0] == list(range(27))
    assert len(held) == 3


@pytest.mark.parametrize("backend", ["eager", "aot"])
def test_compiled_steps(backend, monkeypatch):
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "handlers", [])
    torch._dynamo.reset()
    model = _model()
    ids, mask = left_pad([tokens(30), tokens(3, seed=2)])
    config = CompileConfig(fullgraph=True, mode=None, backend="eager" if backend == "eager" else aot_eager)
    config._compile_all_devices = True
    expected = generate(model, ids, YOCOCache(model, window=WINDOW), 24, attention_mask=mask)
    with torch._dynamo.config.patch(error_on_recompile=True):
        got = generate(model, ids, YOCOCache(model, window=WINDOW), 24, attention_mask=mask, compile_config=config)
    torch._dynamo.reset()
    assert torch.equal(got, expected)


# --- the early exit ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [2, 3, 6])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("lengths", [(40,), (40, 23)], ids=["one", "padded"])
def test_early_exit_gives_the_last_tokens_logits(layers, attention, lengths):
    model = build(num_hidden_layers=layers, attention=attention, initializer_range=0.15)
    ids, mask = left_pad([tokens(length, seed=length) for length in lengths])
    expected, _ = shared_forward(model, ids, yoco_map(layers), mask, yoco_windows(layers, WINDOW))
    mine, plain = YOCOCache(model, window=WINDOW), YOCOCache(model, window=WINDOW)
    with mine.early_exit(model):
        got = prefill(model, mine, ids, mask)
    assert got.shape[1] == 1
    torch.testing.assert_close(got[:, -1], expected[:, -1], atol=1e-5, rtol=0)
    prefill(model, plain, ids, mask)
    after = tokens(6, len(ids), seed=3)
    assert torch.equal(decode(model, mine, after, mask), decode(model, plain, after, mask))
    assert kept_in_all_layers(mine) == kept_in_all_layers(plain)


def test_early_exit_inside_generate_and_over_turns():
    model = _model()
    ids, mask = left_pad([tokens(30), tokens(17, seed=2)])
    outs = []
    for early in (False, True):
        cache = YOCOCache(model, window=WINDOW)
        context = cache.early_exit(model) if early else torch.no_grad()
        with context:
            first = generate(model, ids, cache, 6, attention_mask=mask)
            whole = torch.cat((ids, first, tokens(5, 2, seed=4)), dim=1)
            grown = torch.cat((mask, mask.new_ones(2, 11)), dim=1)
            second = generate(model, whole, cache, 6, attention_mask=grown)
            chunked = generate(model, tokens(25), YOCOCache(model, window=WINDOW), 6)  # another cache passes untouched
        outs.append(torch.cat((first, second), dim=1))
    assert torch.equal(*outs)
    assert torch.equal(chunked, generate(model, tokens(25), YOCOCache(model, window=WINDOW), 6))
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in model.model.layers)
    assert forward(model, tokens(9), YOCOCache(model, window=WINDOW)).shape[1] == 9


def test_early_exit_saves_the_upper_half():
    """Of 8 layers, a long prompt computes the lower 4, the middle one without its attention, and one token of the rest."""
    model, ids = build(num_hidden_layers=8, attention="eager"), tokens(512)
    counted = {}
    for early in (False, True):
        cache = YOCOCache(model, window=32)
        with cache.early_exit(model) if early else torch.no_grad(), FlopCounterMode(display=False) as counter:
            forward(model, ids, cache, logits_to_keep=1)
        counted[early] = counter.get_total_flops()
    with FlopCounterMode(display=False) as counter:
        forward(model, ids, FullCache(model), logits_to_keep=1)
    # Five of eight layers' products remain, and no attention over the whole prompt.
    assert counted[True] < 0.4 * counted[False] < 0.4 * counter.get_total_flops()


def test_early_exit_is_refused_where_it_would_change_the_choice():
    model = _model()
    mine = YOCOCache(model, window=WINDOW, inner="h2o", budget=12)
    with pytest.raises(UnsupportedOperationError, match="queries"), mine.early_exit(model):
        raise AssertionError("must not get here")
    generate(model, tokens(30), mine, 5)
    assert mine.report().layers[-1].kept_max == 12


def test_quest_over_the_global_layer():
    model, ids = _model(), tokens(60)
    mine = YOCOCache(model, window=WINDOW, inner="quest", budget=16, page_size=2, sinks=2, recent=2, dense_layers=0)
    with mine.early_exit(model):
        generate(model, ids, mine, 8)
    assert [layer.kept_max for layer in mine.report().layers] == [WINDOW, WINDOW, 67]


def test_what_yoco_refuses():
    with pytest.raises(UnsupportedModelError, match="upper half"):
        YOCOCache(build("gemma3"))
    with pytest.raises(OptionError, match="option 'window' of its own"):
        YOCOCache(_model(), inner="snapkv")
    with pytest.raises(OptionError, match="window"):
        YOCOCache(_model(), window=0)
    with pytest.raises(OptionError, match="leave window out"):
        YOCOCache(build(num_hidden_layers=1), window=WINDOW)
