"""Whole models: exact while everything can be reached, errors that leave the cache as it was, and nothing leaked."""

import copy
import gc

import pytest
import torch
from helpers import decode, forward, generate, left_pad, prefill, same_snapshot, snapshot, tokens
from tiny_models import build

import kvsparse_hf
from kvsparse_hf import (
    BudgetError,
    FullCache,
    OptionError,
    SnapKVCache,
    SparseCache,
    TieredCache,
    UnsupportedOperationError,
)
from kvsparse_hf.layers import store, tiers
from kvsparse_hf.layers.host import HostMemory, mapped_bytes

SMALL = dict(sinks=2, recent=4, interval=8, reserve=16)
EXACT = dict(atol=1e-5, rtol=1e-5)
LOSSY = dict(hbm=0.4, host=0.2, quantized=0.2, evicted=0.2, group=8)


@pytest.fixture
def poisoned(monkeypatch):
    """All memory for keys and values is full of NaN before its first use, on the host and on the device."""

    def spoil(original):
        def zeros(*args, **kwargs):
            tensor = original(*args, **kwargs)
            return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor.fill_(127)

        return zeros

    monkeypatch.setattr(HostMemory, "zeros", spoil(HostMemory.zeros))
    for kind in (tiers.QuantizedTier, store.RaggedStore):
        monkeypatch.setattr(kind, "_payload", spoil(kind._payload))


def _padded(*lengths):
    return left_pad([tokens(length, seed=30 + length) for length in lengths])


@pytest.mark.parametrize("hbm", [0.0, 0.25, 0.5, 0.9, 1.0])
def test_300_steps_equal_the_full_cache(poisoned, hbm):
    """Three layers with data of their own, three unequal rows, a device tier smaller than the prompt, decoded tokens that go
    to the host and come back: logits of `FullCache`."""
    model = build(num_hidden_layers=3)
    ids, mask = _padded(60, 33, 1)
    after = tokens(300, 3, seed=4)
    full, mine = FullCache(model), TieredCache(model, hbm=hbm, host=1 - hbm, **SMALL)
    assert torch.equal(prefill(model, mine, ids, mask), prefill(model, full, ids, mask))
    torch.testing.assert_close(decode(model, mine, after, mask), decode(model, full, after, mask), **EXACT)
    report = mine.report()
    assert report.evicted == 0 and sum(report.tiers.values()) == sum(report.seen) * 3 * 2
    assert report.tiers.get("host", 0) >= 0.9 * (1 - hbm) * sum(report.seen) * 6 - 6 * 30
    assert (report.host_bytes > 0) == (hbm < 1)


@pytest.mark.parametrize("family", ["gemma2", "gpt-oss", "llama-mqa8", "gpt-neox", "phi3-partial"])
@pytest.mark.parametrize("scorer", ["attention", "last", "knorm"])
def test_architectures(poisoned, family, scorer):
    """Logit caps and learned sinks, which the merge must count once; a second turn over all tiers."""
    model = build(family)
    ids, mask = _padded(40, 21)
    full, mine = FullCache(model), TieredCache(model, hbm=0.25, host=0.75, scorer=scorer, **SMALL)
    for cache in (full, mine):
        prefill(model, cache, ids, mask)
    after = tokens(20, 2, seed=5)
    torch.testing.assert_close(decode(model, mine, after, mask), decode(model, full, after, mask), **EXACT)
    mask = torch.cat((mask, torch.ones(2, 27, dtype=mask.dtype)), dim=1)
    turn = dict(attention_mask=mask, position_ids=(mask.cumsum(-1) - 1)[:, -7:])
    message = tokens(7, 2, seed=6)
    torch.testing.assert_close(forward(model, message, mine, **turn), forward(model, message, full, **turn), **EXACT)
    assert mine.report().tiers["host"] > 0


@pytest.mark.parametrize("bits, most", [(8, 0.04), ("fp8", 0.3), (4, 0.5)])
def test_quantized_logits_are_near(poisoned, bits, most):
    """Fewer bits cost more; losing the same tokens would cost far more than int8 does."""
    model = build()
    ids, after = tokens(80), tokens(40, seed=3)
    full = FullCache(model)
    forward(model, ids, full)
    expected = decode(model, full, after)

    def error(**shares) -> float:
        mine = TieredCache(model, hbm=0.5, bits=bits, group=16, sinks=2, recent=4, **shares)
        forward(model, ids, mine)
        return float((decode(model, mine, after) - expected).abs().mean())

    rounded, evicted = error(host=0.0, quantized=0.5), error(host=0.0, evicted=0.5)
    assert 0 < rounded < most and (bits == 4 or rounded < 0.25 * evicted)


@pytest.mark.parametrize("shares", [dict(hbm=0.3, host=0.7), LOSSY], ids=["exact", "lossy"])
def test_fast_decode(shares):
    """Our decoding loop ranks where `generate()` does, and gives its tokens."""
    model = build()
    ids, mask = _padded(40, 21)
    caches = [TieredCache(model, **shares, **SMALL) for _ in range(2)]
    expected = generate(model, ids, caches[0], 30, attention_mask=mask)
    got = generate(model, ids, caches[1], 30, attention_mask=mask, custom_generate=kvsparse_hf.fast_decode)
    assert torch.equal(got, expected)
    assert caches[1].report().tiers == caches[0].report().tiers


@pytest.mark.parametrize("options", [
    dict(inner="tiered", hbm=0.3, host=0.7, **SMALL),
    dict(inner="snapkv", budget=8, window=4, action="offload"),
    dict(inner="h2o", budget=8, action="offload"),
], ids=lambda options: options["inner"])
def test_layers_that_share_keys_and_values(options):
    """Other layers read an owner's tiers as well: prompt, steps and a second turn are those of the dense map."""
    model = build(num_hidden_layers=4)
    ids, mask = _padded(40, 21)
    after = tokens(20, 2, seed=4)
    out = []
    for chosen in (dict(inner="full"), options):
        cache = kvsparse_hf.get_method("cla")(model, factor=2, **chosen)
        logits = [prefill(model, cache, ids, mask)[:, -1:], decode(model, cache, after, mask)]
        whole = torch.cat((mask, mask.new_ones(2, 25)), dim=1)
        turn = dict(attention_mask=whole, position_ids=(whole.cumsum(-1) - 1)[:, -5:])
        logits += [forward(model, tokens(5, 2), cache, **turn), decode(model, cache, after, whole)]
        out.append(torch.cat(logits, dim=1))
    torch.testing.assert_close(*out, **EXACT)
    assert cache.report().tiers["host"] > 0


def test_five_rows_of_very_different_length(poisoned):
    model = build()
    lengths = (120, 1, 70, 5, 33)
    ids, mask = _padded(*lengths)
    options = dict(hbm=0.3, host=0.3, quantized=0.2, evicted=0.2, bits=8, group=8, **SMALL)
    together = TieredCache(model, **options)
    prefill(model, together, ids, mask)
    after = tokens(30, 5, seed=8)
    out = decode(model, together, after, mask)
    for row, length in enumerate(lengths):
        alone = TieredCache(model, **options)
        forward(model, tokens(length, seed=30 + length), alone)
        # A key that differs in its last bit, as another batch size makes it on some processors, may round to the next int8.
        torch.testing.assert_close(decode(model, alone, after[row : row + 1]), out[row : row + 1], atol=5e-4, rtol=1e-5)
        for one, many in zip(alone.sparse_layers, together.sparse_layers, strict=True):
            places = one.token_places(0, length + 5), many.token_places(row, length + 5)
            assert places[0].keys() == places[1].keys()
            assert all(torch.equal(places[0][name], places[1][name]) for name in places[0])


def test_less_is_resident_than_in_a_dense_cache():
    """The device holds what its share says and the tables, from the first token on; an empty cache holds nothing."""
    model = build(num_hidden_layers=4)
    mine = TieredCache(model, hbm=0.25, host=0.75, sinks=2, recent=4, interval=4, reserve=1)
    assert mine.report().host_bytes == mine.report().device_bytes == 0
    forward(model, tokens(600), mine)
    report = mine.report()
    assert report.share < 0.25 + 0.07 + 0.02  # positions and scores of all tokens are 8 of 128 bytes; tables
    assert 0.75 <= report.host_bytes / report.dense_bytes < 0.77


def test_too_little_host_memory_leaves_the_cache_as_it_was():
    model = build()
    needed = 2 * 2 * 30 * 2 * 16 * 4  # layers, heads, entries, key and value
    mine = TieredCache(model, hbm=0.25, host=0.75, host_bytes=needed + 4000, sinks=2, recent=4, interval=4, reserve=4)
    forward(model, tokens(40), mine)
    with pytest.raises(BudgetError, match="host_bytes"):
        decode(model, mine, tokens(200))
    before = snapshot(mine)
    with pytest.raises(BudgetError, match="host_bytes"):
        decode(model, mine, tokens(1))
    assert same_snapshot(snapshot(mine), before)
    steps = mine.report().seen[0] - 40
    assert steps >= 4 and steps % 4 == 0  # the refusal came with a ranking, before the forward
    assert sum(mine.report().tiers.values()) == 4 * (40 + steps)
    with pytest.raises(BudgetError, match="host_bytes"):
        forward(model, tokens(200), mine)
    assert same_snapshot(snapshot(mine), before) and mine.report().seen == [40 + steps]
    fresh = TieredCache(model, hbm=0.25, host=0.75, host_bytes=20_000, sinks=1, recent=1, reserve=4)
    with pytest.raises(BudgetError, match="host_bytes"):
        forward(model, tokens(400), fresh)
    # A first prompt that was refused never came.
    assert int(fresh.get_seq_length()) == 0 and fresh.batch_size == -1
    untouched = TieredCache(model, hbm=0.25, host=0.75, host_bytes=20_000, sinks=1, recent=1, reserve=4)
    assert torch.equal(forward(model, tokens(4), fresh), forward(model, tokens(4), untouched))


def test_50_caches_leak_no_host_memory():
    model = build(num_hidden_layers=1)
    gc.collect()
    before = mapped_bytes()
    for index in range(50):
        mine = TieredCache(model, hbm=0.25, host=0.75, **SMALL)
        generate(model, tokens(20 + index % 3), mine, 3)
        other = copy.deepcopy(mine)
        assert mapped_bytes() - before == mine.report().host_bytes + other.report().host_bytes > 0
        del mine, other  # which frees it at once, without the garbage collector
        assert mapped_bytes() == before


def test_copies_and_files_keep_host_tokens_on_the_host(tmp_path):
    model = build()
    mine = TieredCache(model, **LOSSY, **SMALL)
    generate(model, tokens(60), mine, 20)
    mine.save(tmp_path)
    for other in (mine.fork(), SparseCache.load(tmp_path, model)):
        assert other.report().tiers == mine.report().tiers
        assert other.report().host_bytes == mine.report().host_bytes > 0
        mapped = mapped_bytes()
        del other.layers[0].host
        gc.collect()
        assert mapped_bytes() == mapped - mine.layers[0].host_bytes()


def test_taking_tokens_back_is_exact_or_refused():
    model = build()
    mine, full = TieredCache(model, hbm=0.3, host=0.7, **SMALL), FullCache(model)
    for cache in (mine, full):
        forward(model, tokens(50), cache)
        decode(model, cache, tokens(21, seed=2))
        cache.crop(-13)  # also tokens that have been to the host since
        assert cache.report().seen == [58]
    torch.testing.assert_close(decode(model, mine, tokens(40, seed=3)), decode(model, full, tokens(40, seed=3)), **EXACT)
    lossy = TieredCache(model, **LOSSY, **SMALL)
    forward(model, tokens(50), lossy)
    assert not lossy.is_croppable and not lossy.can_rewind and mine.is_croppable
    before = snapshot(lossy)
    with pytest.raises(UnsupportedOperationError, match="hbm and host"):
        lossy.crop(-1)
    assert same_snapshot(snapshot(lossy), before)


def test_a_prefix_may_be_reused_only_while_all_of_it_is_there():
    model = build()
    assert TieredCache(model).prefix_safe and not TieredCache(model, **LOSSY).prefix_safe
    assert SnapKVCache(model, action="offload").prefix_safe and not SnapKVCache(model).prefix_safe


@pytest.mark.parametrize("options, words", [
    (dict(hbm=0.5, host=0.4), "add up to 0.9"),
    (dict(hbm=0.5, host=0.5, evicted=0.1), "evicted=0.1 add up to 1.1"),
    (dict(hbm=0.5, host=0.5 + 2e-6), "must add up to 1"),
    (dict(hbm=1.5, host=-0.5), "hbm"),
    (dict(hbm=float("nan"), host=0.5), "hbm|add up"),
    (dict(bits=3), "bits"),
    (dict(bits="int8"), "bits"),
    (dict(hbm=0.5, host=0, quantized=0.5, group=32), "does not divide the model's head size 16; use 16"),
    (dict(interval=0), "interval"),
    (dict(recent=0), "recent"),
    (dict(scorer="h2o"), "scorer"),
    (dict(host_bytes="lots"), "host_bytes"),
    (dict(host_bytes=0), "host_bytes"),
    (dict(backend="flash"), "flash"),
    (dict(budget=1024), "budget"),
], ids=str)
def test_bad_options(options, words):
    model = build()
    with pytest.raises(OptionError, match=words):
        TieredCache(model, **options)
    assert model.config._attn_implementation == "sdpa"


def test_shares_may_round():
    assert TieredCache(build(), hbm=0.1 + 0.2, host=0.7 - 5e-7).options.host < 0.7


def test_triton_without_a_gpu_is_an_error(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    model = build()
    mine = TieredCache(model, hbm=0.5, host=0.5, backend="triton")
    with pytest.raises(kvsparse_hf.ops.BackendError, match="triton"):
        forward(model, tokens(200), mine)


@pytest.mark.parametrize("name", [name for name in kvsparse_hf.list_presets() if name.startswith("tiered")])
def test_presets(name):
    model = build(head_dim=32)
    mine = kvsparse_hf.load_preset(name, model)
    assert generate(model, tokens(150), mine, 20).shape == (1, 20)
