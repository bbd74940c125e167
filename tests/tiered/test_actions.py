"""`action="offload"` and `"quantize"`: the method's own choice on the device, and everything else still within reach."""

import pytest
import torch
from helpers import decode, forward, generate, kept_in_all_layers, left_pad, prefill, tokens
from tier_oracle import tiers_of
from tiny_models import build

import kvsparse_hf
from kvsparse_hf import FullCache, H2OCache, OptionError, SnapKVCache, get_method, list_methods

BUDGET = 12
ABLE = [name for name in list_methods() if getattr(get_method(name), "other_actions", False)]
UNABLE = ["streaming-llm", "scissorhands", "rkv"]
_WINDOW = dict(window=4, kernel=3)
_OPTIONS = {"snapkv": _WINDOW, "pyramidkv": _WINDOW, "adakv": _WINDOW, "headkv": _WINDOW, "keydiff": dict(block=8),
            "expected-attention": dict(sinks=2, future=16)}
EXACT = dict(atol=1e-5, rtol=1e-5)


def make(name: str, model, **options):
    if name == "headkv":
        options["table"] = [[layer + head + 1 for head in range(2)] for layer in range(2)]
    return get_method(name)(model, budget=BUDGET, **_OPTIONS.get(name, {}), **options)


def on_device(cache) -> list:
    """Positions of the device tier, `[layer][row][head]`."""
    out = []
    for layer in cache.sparse_layers:
        rows, heads = layer.store.start.shape
        places = [[tiers_of(layer, row, head) for head in range(heads)] for row in range(rows)]
        out.append([[sorted(p for p, tier in head.items() if tier == "device") for head in row] for row in places])
    return out


def test_the_methods_that_can():
    assert set(ABLE) == {"snapkv", "pyramidkv", "adakv", "headkv", "expected-attention", "keydiff", "knorm", "h2o", "tova"}


@pytest.mark.parametrize("name", ABLE)
def test_offload_keeps_the_methods_choice_on_the_device_and_is_exact(name):
    model = build()
    ids, mask = left_pad([tokens(50), tokens(31, seed=2), tokens(5, seed=3)])
    evicting, mine, full = make(name, model), make(name, model, action="offload"), FullCache(model)
    for cache in (evicting, mine, full):
        prefill(model, cache, ids, mask)
    assert on_device(mine) == kept_in_all_layers(evicting)
    assert mine.action == "offload" and evicting.action == get_method(name).action == "evict"
    after = tokens(40, 3, seed=4)
    torch.testing.assert_close(decode(model, mine, after, mask), decode(model, full, after, mask), **EXACT)
    report = mine.report()
    assert report.evicted == 0 and report.tiers["host"] > 0 and report.host_bytes > 0
    mask = torch.cat((mask, torch.ones(3, 46, dtype=mask.dtype)), dim=1)
    turn = dict(attention_mask=mask, position_ids=(mask.cumsum(-1) - 1)[:, -6:])
    torch.testing.assert_close(forward(model, tokens(6, 3), mine, **turn), forward(model, tokens(6, 3), full, **turn), **EXACT)


@pytest.mark.parametrize("name", ABLE)
def test_quantize_rounds_what_the_method_would_drop(name):
    model = build()
    ids, after = tokens(60), tokens(20, seed=4)
    evicting, mine, full = make(name, model), make(name, model, action="quantize", group=16), FullCache(model)
    for cache in (evicting, mine, full):
        forward(model, ids, cache)
    assert on_device(mine) == kept_in_all_layers(evicting)
    expected = decode(model, full, after)
    rounded, gone = ((decode(model, cache, after) - expected).abs().mean() for cache in (mine, evicting))
    assert 0 < rounded < 0.25 * gone
    report = mine.report()
    assert report.evicted == 0 and report.tiers["quantized"] > 0 and report.host_bytes == 0


def test_a_method_for_prompts_leaves_decoded_tokens_on_the_device():
    """As published: a chunk of the prompt is chosen from anew, later turns are added."""
    model = build()
    mine = make("snapkv", model, action="offload", reserve=4)
    generate(model, tokens(40), mine, 1, prefill_chunk_size=16)
    assert {len(head) for layer in on_device(mine) for head in layer[0]} == {BUDGET}
    assert {len(head) for layer in kept_in_all_layers(mine) for head in layer[0]} == {40}
    decode(model, mine, tokens(9))
    forward(model, tokens(5, seed=3), mine)
    assert all(head[-14:] == list(range(40, 54)) and len(head) == BUDGET + 14 for layer in on_device(mine) for head in layer[0])


def test_h2o_ranks_again_and_brings_tokens_back():
    """The device holds the budget after every `interval` tokens, among them some that were on the host before."""
    model = build()
    mine = make("h2o", model, action="offload", interval=4, recent=2)
    forward(model, tokens(40), mine)
    before, came_back = on_device(mine), 0
    for step in range(60):
        decode(model, mine, tokens(1, seed=step))
        now = on_device(mine)
        assert {len(head) for layer in now for head in layer[0]} == {BUDGET + step % 4 + 1}
        for old, new in zip(sum((layer[0] for layer in before), []), sum((layer[0] for layer in now), []), strict=True):
            came_back += len(set(new) - set(old) - {40 + step})
        before = now
    assert came_back > 0


@pytest.mark.parametrize("name", UNABLE)
def test_the_others_say_who_can(name):
    with pytest.raises(OptionError, match=f"{name} can only evict.*available for adakv.*h2o.*snapkv"):
        get_method(name)(build(), action="offload")


@pytest.mark.parametrize("options, words", [
    (dict(action="skip"), "action"),
    (dict(action="offload", decode="bounded"), "bounded"),
    (dict(action="quantize", recompress_every=64), "recompress_every"),
    (dict(action="offload", positions="cache"), "positions"),
    (dict(action="offload", backend="flash"), "flash"),
    (dict(action="offload", budget="1GiB"), "bytes"),
    (dict(bits=4), "bits has no effect with action='evict'"),
    (dict(action="offload", group=16), "group has no effect with action='offload'"),
    (dict(action="quantize", host_bytes="1GiB"), "host_bytes has no effect"),
    (dict(action="offload", host_bytes="1 potato"), "host_bytes"),
    (dict(action="quantize", group=5), "group=5 does not divide"),
], ids=str)
def test_bad_options(options, words):
    model = build()
    with pytest.raises(OptionError, match=words):
        SnapKVCache(model, **options)
    assert model.config._attn_implementation == "sdpa"


def test_an_interval_needs_something_to_rank_for():
    with pytest.raises(OptionError, match="interval has no effect"):
        H2OCache(build(), interval=4)
    assert kvsparse_hf.H2OCache(build(), interval=4, action="quantize", group=8).options.interval == 4
