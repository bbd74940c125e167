"""What each method keeps, against brute force in fp64: prompts, padded rows, decoded tokens, chunks and turns."""

import pytest
import torch
from head_oracles import adaptive_choice, spanned, table_choice, window_scores
from token_driver import SCALE, Driver, tiny_config

from kvsparse_hf import AdaKVCache, DuoAttentionCache, HeadKVCache, KVSparseError, MoACache
from kvsparse_hf.policy.depth import pyramid

WINDOW, KERNEL = 6, 5
PADS = (0, 17, 41, 52)  # the last row's prompt is shorter than the window


def judged(row, head, read, queries, sinks=0):
    """Scores of what may go, and what may not."""
    scores = window_scores(row, head, SCALE, read, queries, KERNEL)
    safe = [j for j in read if j < sinks or j not in scores]
    return {j: s for j, s in scores.items() if j >= sinks}, safe


def adakv_choice(row, reads, queries, budget, alpha, sinks=0, official=False):
    parts = [judged(row, head, read, queries, sinks) for head, read in enumerate(reads)]
    return adaptive_choice([p[0] for p in parts], [p[1] for p in parts], budget, alpha, official)


@pytest.mark.parametrize("official", [False, True])
@pytest.mark.parametrize("alpha", [0.0, 0.2, 1.0])
@pytest.mark.parametrize("heads", [(4, 2), (8, 8), (4, 1)], ids=str)
def test_adakv(heads, alpha, official):
    """Unequal rows; a row within the budget keeps everything. Decoded tokens are added."""
    options = dict(budget=16, window=WINDOW, kernel=KERNEL, alpha=alpha, sinks=2, formula="official" if official else "exact")
    driver = Driver(AdaKVCache(tiny_config(*heads), **options), pads=PADS, spread=2.5)
    driver.feed(58)
    want = []
    for row in driver.rows:
        reads = [list(range(row.length))] * heads[1]
        if row.length > 16:
            reads = adakv_choice(row, reads, range(row.length - WINDOW, row.length), 16, alpha, 2, official)
            assert official or sum(map(len, reads)) == 16 * heads[1]
        want.append(reads)
    assert [driver.kept(row) for row in range(len(PADS))] == want
    lengths = [row.length for row in driver.rows]
    for step in range(5):
        driver.feed(1)
        want = [[read + [length + step] for read in reads] for reads, length in zip(want, lengths, strict=True)]
    assert [driver.kept(row) for row in range(len(PADS))] == want


def test_heads_really_differ():
    driver = Driver(AdaKVCache(tiny_config(8, 8), budget=16, window=WINDOW, kernel=KERNEL), spread=4.0)
    driver.feed(200)
    sizes = [len(read) for read in driver.kept()]
    assert sum(sizes) == 16 * 8 and min(sizes) >= WINDOW + 2 and max(sizes) > min(sizes) + 5


def test_adakv_on_pyramidkv_shares_each_layers_own_budget():
    layers = pyramid(10, 60, WINDOW, 4, 4, exact=True)
    total = 0
    for layer in range(4):
        cache = AdaKVCache(tiny_config(layers=4), budget=16, window=WINDOW, kernel=KERNEL, scorer="pyramidkv", beta=4)
        driver = Driver(cache, layer=layer, seed=layer)
        driver.feed(60)
        budget = WINDOW + int(layers[layer])
        want = adakv_choice(driver.rows[0], [list(range(60))] * 2, range(54, 60), budget, 0.2)
        assert driver.kept() == want
        total += sum(map(len, want))
    assert total == 4 * 2 * 16


def test_adakv_on_expected_attention_shares_by_its_scores():
    config = tiny_config(4, 2)
    cache = AdaKVCache(config, budget=16, scorer="expected-attention", recent=3, future=32)
    driver = Driver(cache, pads=(0, 20), spread=2.0)
    seen = {}
    policy = cache.layers[0].policy
    scores = type(policy).scores
    object.__setattr__(policy, "scores", lambda candidates: seen.setdefault("scores", scores(policy, candidates)))
    driver.feed(60)
    for row, pad in enumerate((0, 20)):
        length = 60 - pad
        safe = [0, 1, 2, 3, length - 3, length - 2, length - 1]
        parts = [{j: float(seen["scores"][row, h, pad + j]) for j in range(4, length - 3)} for h in range(2)]
        assert driver.kept(row) == adaptive_choice(parts, [list(safe), list(safe)], 16, 0.2)


def test_adakv_bounded_keeps_the_head_shares():
    """Kept ones of the prompt stay; the window slides in each head."""
    driver = Driver(AdaKVCache(tiny_config(4, 4), budget=16, window=WINDOW, kernel=KERNEL, decode="bounded"), spread=3.0)
    driver.feed(60)
    first = driver.kept()
    assert len({len(read) for read in first}) > 1
    for step in range(100):
        driver.feed(1)
        newest = list(range(55 + step, 61 + step))
        assert driver.kept() == [read[:-WINDOW] + newest for read in first]


def test_adakv_bounded_turn_shares_out_anew():
    driver = Driver(AdaKVCache(tiny_config(4, 2), budget=16, window=WINDOW, kernel=KERNEL, decode="bounded"), spread=3.0)
    driver.feed(60)
    for _ in range(3):
        driver.feed(1)
    reads = [read + list(range(63, 73)) for read in driver.kept()]
    driver.feed(10)
    want = adakv_choice(driver.rows[0], reads, range(67, 73), 16, 0.2)
    assert driver.kept() == want and sum(map(len, want)) == 32


def test_adakv_periodic_stays_within_budget_and_interval():
    """100 steps at a budget of 32, recompressed every 16: shares stay, and no head exceeds its own by more than 16."""
    cache = AdaKVCache(tiny_config(4, 4), budget=32, window=WINDOW, kernel=KERNEL, recompress_every=16)
    driver = Driver(cache, spread=3.0)
    driver.feed(200)
    shares = [len(read) for read in driver.kept()]
    assert sum(shares) == 32 * 4 and len(set(shares)) > 1
    for step in range(100):
        driver.feed(1)
        held = [len(read) for read in driver.kept()]
        assert held == [share + step % 16 + 1 for share in shares]
        assert sum(held) <= (32 + 16) * 4


def test_adakv_chunked_prompt_is_exact_after_every_chunk():
    driver = Driver(AdaKVCache(tiny_config(4, 4), budget=16, window=WINDOW, kernel=KERNEL), pads=(0, 30), spread=3.0)
    for done in range(20, 101, 20):
        driver.feed(20)
        for row, pad in enumerate((0, 30)):
            assert sum(map(len, driver.kept(row))) == 4 * min(max(done - pad, 0), 16)


@pytest.mark.parametrize("beta", [1.005, 1.1, 2.0])
def test_headkv(beta):
    config = tiny_config(8, 4, layers=3)
    table = torch.rand(3, 8, generator=torch.Generator().manual_seed(4)) ** 6
    by_head = table.double().view(3, 4, 2).mean(-1)
    totals = [0, 0, 0]
    for layer in range(3):
        cache = HeadKVCache(config, budget=20, window=WINDOW, kernel=KERNEL, beta=beta, table=table)
        driver = Driver(cache, pads=(0, 17, 45), layer=layer, seed=layer)
        driver.feed(60)
        for index, row in enumerate(driver.rows):
            want = [list(range(row.length))] * 4
            if row.length > 20:
                counts = table_choice(by_head.tolist(), 20, WINDOW, row.length, beta)[layer]
                queries = range(row.length - WINDOW, row.length)
                parts = [judged(row, head, list(range(row.length)), queries) for head in range(4)]
                want = [
                    sorted(safe + sorted(s, key=lambda j, s=s: (-s[j], j))[: n - WINDOW]) for (s, safe), n in zip(parts, counts, strict=True)
                ]
            assert driver.kept(index) == want
            totals[index] += sum(map(len, want))
    assert totals == [20 * 12, 20 * 12, 15 * 12]


def test_headkv_temperature_and_a_table_of_key_heads():
    table = torch.tensor([[1.0, 3.0], [2.0, 2.0]])
    counts = {}
    for temp in (1.0, 2.0):
        cache = HeadKVCache(tiny_config(4, 2, layers=2), budget=20, window=4, table=table, temp=temp, beta=1.0)
        weights = (table.double() / 8) ** temp
        assert torch.allclose(torch.tensor(cache.plan).double(), weights / weights.sum())
        driver = Driver(cache)
        driver.feed(100)
        counts[temp] = [len(read) for read in driver.kept()]
    assert counts[1.0] == [4 + 8, 4 + 24] and counts[2.0][1] > counts[1.0][1]


def streams(driver, spans, sinks, steps):
    """Checks every head after the prompt and after each step; None keeps everything."""
    lengths = [row.length for row in driver.rows]
    for step in range(steps + 1):
        for row, length in enumerate(lengths):
            total = length + step
            assert driver.kept(row) == [spanned(total, total if span is None else span, sinks) for span in spans[row]], (row, step)
        driver.feed(1)


def test_duo_attention_streams_and_grows():
    """Retrieval heads outgrow their reserve while streaming heads slide beside them."""
    pattern = [[0.9, 0.1, 0.6, 0.2]]
    cache = DuoAttentionCache(tiny_config(4, 4), pattern=pattern, sparsity=0.5, sinks=3, recent=9, reserve=4)
    driver = Driver(cache, pads=(0, 25, 37))
    driver.feed(40)
    streams(driver, [[None, 12, None, 12]] * 3, 3, 60)
    assert len({int(n) for n in cache.layers[0].store.capacity[0]}) == 2


@pytest.mark.parametrize("sparsity", [0.0, 1.0])
def test_duo_attention_of_one_class_alone(sparsity):
    cache = DuoAttentionCache(tiny_config(4, 2), pattern=[[1, 0]], sparsity=sparsity, sinks=2, recent=6, reserve=3)
    driver = Driver(cache, pads=(0, 13))
    driver.feed(20)
    streams(driver, [[8 if sparsity else None] * 2] * 2, 2, 20)


def test_duo_attention_takes_turns_and_chunks():
    cache = DuoAttentionCache(tiny_config(4, 2), pattern=[[1, 0]], sinks=2, recent=6, reserve=3)
    driver = Driver(cache)
    total = 0
    for tokens in (7, 9, 1, 1, 12, 1, 3):
        driver.feed(tokens)
        total += tokens
        assert driver.kept() == [list(range(total)), spanned(total, 8, 2)]


def test_moa_spans_follow_each_rows_length():
    rules = {"alphas": [[0.0, 0.0, 4.0, -10.0]], "betas": [[0.25, 0.5, 0.0, 1.0]]}
    cache = MoACache(tiny_config(4, 4), rules=rules, new_tokens=20, sinks=2, minimum=3, multiple=2)
    driver = Driver(cache, pads=(0, 20, 50))
    driver.feed(60)
    spans = []
    for length in (60, 40, 10):
        n = length + 20
        plain = [max(min(int(a + b * n), n), 3) for a, b in ((0, 0.25), (0, 0.5), (4, 0), (-10, 1))]
        spans.append([-(-span // 2) * 2 for span in plain])
    assert spans[0] == [20, 40, 4, 70]
    streams(driver, spans, 2, 40)


def test_moa_spans_longer_than_the_text_keep_it_all_and_no_more_memory():
    rules = {"alphas": [[10.0**9, 0.0]], "betas": [[0.0, 1.0]]}
    cache = MoACache(tiny_config(2, 2), rules=rules, new_tokens=50, reserve=8)
    driver = Driver(cache)
    driver.feed(300)
    assert driver.kept() == [list(range(300))] * 2
    assert cache.layers[0].store.keys.shape[0] == 2 * 308


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_keys_cost_nobody_his_place(value):
    """A damaged key ranks last (or first), the sum stays exact, and finite tokens are ranked as ever."""
    driver = Driver(AdaKVCache(tiny_config(4, 2), budget=16, window=WINDOW, kernel=1))
    q, k, v = driver.random(60)
    k[0, 1, 20] = value
    driver.feed(60, (q, k, v))
    assert sum(map(len, driver.kept())) == 32
    assert min(map(len, driver.kept())) >= WINDOW + 2


def test_a_budget_below_the_window_is_refused():
    for cache, options in ((AdaKVCache, {}), (HeadKVCache, {"table": [[1, 1, 1, 1]]})):
        with pytest.raises(KVSparseError, match="smaller than"):
            cache(tiny_config(), budget=5, window=WINDOW, **options)
