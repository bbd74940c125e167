"""PyramidKV's schedule and choice, and choosing anew after every n decoded tokens (SnapKV, PyramidKV)."""

import pytest
import torch
from token_driver import SCALE, Driver, Row, tiny_config
from token_oracles import window_choice
from transformers import LlamaForCausalLM

from kvsparse_hf import PyramidKVCache, SnapKVCache
from kvsparse_hf.hf.compat import CACHE_ARGUMENT
from kvsparse_hf.methods.snapkv import window_attention
from kvsparse_hf.policy.base import Candidates
from kvsparse_hf.policy.depth import pyramid, weighted


def periodic_run(driver: Driver, prompt: int, steps: int, budget: int, interval: int, choose) -> None:
    """`choose(row, head, read, queries, count)` says what stays. Compression happens before the step that does not fit."""
    given = [prompt - pad for pad in driver.pads]
    held = [[list(range(n)) for _ in range(driver.kv_heads)] for n in given]

    def compress():
        for row, heads in enumerate(held):
            for head, read in enumerate(heads):
                if len(read) > budget:
                    heads[head] = choose(driver.rows[row], head, read, budget)

    compress()
    assert [driver.kept(row) for row in range(len(given))] == held
    for step in range(steps):
        if step and step % interval == 0:
            compress()
        for row, heads in enumerate(held):
            for read in heads:
                read.append(given[row] + step)
        driver.feed(1)
        assert [driver.kept(row) for row in range(len(given))] == held, step
        assert max(len(read) for heads in held for read in heads) <= budget + interval


@pytest.mark.parametrize("heads", [(2, 2), (4, 1), (8, 1), (8, 2)], ids=str)
@pytest.mark.parametrize("cache", [SnapKVCache, PyramidKVCache])
def test_200_steps_of_choosing_anew(cache, heads):
    driver = Driver(cache(tiny_config(*heads), budget=24, window=6, kernel=5, recompress_every=16))
    driver.feed(60)
    periodic_run(driver, 60, 200, 24, 16, lambda row, head, read, n: window_choice(
        row, head, SCALE, read, read[-6:], n, 0, 0, 5))  # fmt: skip


@pytest.mark.parametrize("pooling", ["max", "avg"])
def test_padded_rows_choose_when_the_row_alone_would(pooling):
    options = dict(budget=24, window=6, kernel=5, recompress_every=7, sinks=2, recent=8, pooling=pooling)
    driver = Driver(SnapKVCache(tiny_config(), **options), pads=(0, 17, 57))
    driver.feed(60)
    periodic_run(driver, 60, 60, 24, 7, lambda row, head, read, n: window_choice(
        row, head, SCALE, read, read[-6:], n, 2, 8, 5, pooling))  # fmt: skip


@pytest.mark.parametrize("length", [1, 3, 23, 24, 25])
@pytest.mark.parametrize("interval", [6, 7])
def test_thresholds(length, interval):
    """Prompts shorter than the window, and around the budget; an interval of exactly the window."""
    driver = Driver(SnapKVCache(tiny_config(), budget=24, window=6, kernel=3, recompress_every=interval, reserve=2))
    driver.feed(length)
    periodic_run(driver, length, 50, 24, interval, lambda row, head, read, n: window_choice(
        row, head, SCALE, read, read[-6:], n, 0, 0, 3))  # fmt: skip


def test_a_short_turn_is_judged_by_a_full_window():
    """A turn of 3 tokens brings 3 queries; the ring has the 3 before."""
    driver = Driver(SnapKVCache(tiny_config(), budget=24, window=6, kernel=3, recompress_every=16))
    driver.feed(40)
    for _ in range(5):
        driver.feed(1)
    before = driver.kept()
    driver.feed(3)
    want = [
        window_choice(driver.rows[0], head, SCALE, read + [45, 46, 47], list(range(42, 48)), 24, 0, 0, 3)
        for head, read in enumerate(before)
    ]
    assert driver.kept() == want


def test_published_schedule():
    """methods.md section 5: C=128, W=8, 32 layers, 8000 tokens -> 234 … 17, step 7, mean 125.5; C=2048 -> 3978 … 103."""
    layers = pyramid(120, 8000, 8, 32, 20, exact=False)
    assert (int(layers[0]), int(layers[-1]), int(layers[0] - layers[1])) == (234, 17, 7)
    assert float((layers + 0.0).mean()) == 125.5
    layers = pyramid(2040, 8000, 8, 32, 20, exact=False)
    assert (int(layers[0]), int(layers[-1])) == (3978, 103) and float((layers + 0.0).mean()) == 2040.5


@pytest.mark.parametrize("depths", [1, 2, 3, 26, 32])
@pytest.mark.parametrize("average", [0, 1, 7, 120, 2040])
@pytest.mark.parametrize("length", [130, 240, 241, 249, 4087, 8000])
def test_exact_schedule_keeps_the_total(depths, average, length):
    if length <= average + 8:
        return
    layers = pyramid(average, length, 8, depths, 20, exact=True)
    assert int(layers.sum()) == depths * average
    assert int(layers.min()) >= 0 and int(layers.max()) <= length - 8
    assert all(a >= b for a, b in zip(layers[:-1], layers[1:], strict=True)), "deeper layers never keep more"
    if length < 2 * average:
        assert set(layers.tolist()) == {average}


@pytest.mark.parametrize(("length", "want"), [(25, [24] * 3), (31, [24] * 3), (32, [32, 24, 16]), (39, [39, 24, 9]), (90, [40, 24, 8])])
def test_schedule_at_its_thresholds(length, want):
    """C=24, W=8, b=16: all layers alike below 2 b = 32 tokens; then the first layer keeps all there is; then the line."""
    budgets = []
    for depth in range(3):
        cache = PyramidKVCache(tiny_config(layers=3), budget=24, window=8)
        policy = cache.sparse_layers[depth].policy
        seen = torch.tensor([length])
        budgets.append(int(policy.counts(None, torch.full((1, 2), length), seen, None)[0, 0]))
    assert budgets == want


@pytest.mark.parametrize("length", [1, 23, 24])
def test_a_prompt_within_the_budget_has_no_pyramid(length):
    policy = PyramidKVCache(tiny_config(layers=3), budget=24, window=8).sparse_layers[2].policy
    assert int(policy.counts(None, torch.full((1, 2), length), torch.tensor([length]), None)[0, 0]) == 24


def test_weighted_keeps_the_total():
    assert weighted(10, [1, 2, 3]).tolist() == [5, 10, 15]
    assert int(weighted(7, [0.1, 0.9, 0.333]).sum()) == 21


def _kept_per_layer(cache, row=0):
    return [int(layer.store.length[row, 0]) for layer in cache.sparse_layers]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("decode", ["grow", "bounded"])
def test_layers_of_different_size_run_everywhere(attention, decode):
    """One-token and multi-token forwards, padded batches: layers hold different numbers of tokens, and a padded row keeps
    what the row alone keeps, by a schedule of its own length."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(tiny_config(layers=4, attn_implementation=attention)).eval()
    ids = torch.randint(0, 16, (2, 96))
    mask = torch.ones(2, 90, dtype=torch.long)
    mask[1, :38] = 0
    caches = {}
    for name, rows in (("both", slice(None)), ("alone", slice(1, 2))):
        cache = caches[name] = PyramidKVCache(model, budget=24, window=8, beta=4, decode=decode)
        first = 0 if name == "both" else 38
        out, fed = [], mask[rows, first:]
        for start, stop in ((first, 90), (90, 95), (95, 96)):
            if start >= 90:
                fed = torch.cat((fed, fed.new_ones(len(fed), stop - start)), 1)
            positions = (fed.cumsum(-1) - 1).clamp(min=0)[:, -(stop - start) :]
            out.append(model(ids[rows, start:stop], attention_mask=fed, position_ids=positions, **{CACHE_ARGUMENT: cache}).logits)
        caches[name + " out"] = out
    kept = _kept_per_layer(caches["both"], 0)
    if decode == "bounded":
        assert sum(kept) == 24 * 4 and kept == sorted(kept, reverse=True) and kept[0] > kept[-1]
    assert _kept_per_layer(caches["both"], 1) == _kept_per_layer(caches["alone"], 0)
    for both, alone in zip(caches["both out"][1:], caches["alone out"][1:], strict=True):
        assert torch.allclose(both[1:], alone, atol=1e-5)


def test_last_layers_choice_follows_the_schedule():
    """The choice of one layer against the oracle, with the layer's own budget."""
    model = LlamaForCausalLM(tiny_config(layers=3)).eval()
    cache = PyramidKVCache(model, budget=24, window=8, beta=4)
    seen = {}
    for index, layer in enumerate(cache.sparse_layers):
        attend = layer.attend

        def spy(module, query, key, value, *args, _attend=attend, _index=index, **kwargs):
            seen[_index] = query[0], key[0], value[0]
            return _attend(module, query, key, value, *args, **kwargs)

        layer.attend = spy
    model(torch.randint(0, 16, (1, 90)), **{CACHE_ARGUMENT: cache})
    for index, layer in enumerate(cache.sparse_layers):
        del layer.attend
        count = 8 + int(pyramid(16, 90, 8, 3, 4, True)[index])
        read = list(range(90))
        for head in range(2):
            start, length = int(layer.store.start[0, head]), int(layer.store.length[0, head])
            kept = layer.store.positions[start : start + length].tolist()
            assert kept == window_choice(Row(*seen[index]), head, SCALE, read, read[-8:], count, 0, 0, 7)


@pytest.mark.parametrize("earlier", [False, True], ids=["prompt", "ragged turn"])
@pytest.mark.parametrize("reduce", ["mean", "max", "sum"])
def test_learned_sinks_take_their_part(reduce, earlier):
    """gpt-oss: an extra logit per query head in every denominator. Against loops in fp64; without it other tokens win."""
    window, length, heads, group, dim = 4, 30, 2, 3, 16
    generator = torch.Generator().manual_seed(3)
    query = torch.randn(2, heads * group, 9, dim, generator=generator)
    keys = torch.randn(2, heads, length, dim, generator=generator)
    sinks = torch.randn(heads * group, generator=generator) * 3
    pad = torch.tensor([[0, 0], [11, 11]]) if not earlier else torch.tensor([[0, 4], [11, 7]])
    positions = torch.arange(length).expand(2, heads, -1) - pad.unsqueeze(-1)
    candidates = Candidates(query, keys, keys, positions, pad, 0.3, 0.0, sinks, 0, 2)
    got = window_attention(candidates, window, 1, "max", reduce, "torch")
    for row in range(2):
        for head in range(heads):
            first = int(pad[row, head])
            sums = []
            for member in range(head * group, (head + 1) * group):
                total = torch.zeros(length, dtype=torch.float64)
                for back in range(window):
                    last = length - 1 - back
                    logits = keys[row, head, first : last + 1].double() @ query[row, member, -1 - back].double() * 0.3
                    denominator = logits.exp().sum() + sinks[member].double().exp()
                    total[first : last + 1] += logits.exp() / denominator
                sums.append(total)
            stacked = torch.stack(sums)
            want = {"mean": stacked.mean(0), "max": stacked.amax(0), "sum": stacked.sum(0)}[reduce]
            want[-window:] = 0
            torch.testing.assert_close(got[row, head].double(), want, atol=1e-5, rtol=1e-4)
