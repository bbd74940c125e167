"""Single layers against the rule in plain Python: who is where after every step, what a step gives, what is held."""

import pytest
import torch
from tier_oracle import Tiers, held_values, rounded, tiers_of
from token_driver import SCALE, Driver, tiny_config
from token_oracles import group

from kvsparse_hf import TieredCache
from kvsparse_hf.ops import quantize

SHARES = [
    dict(hbm=0.25, host=0.75),
    dict(hbm=0.5, host=0.2, quantized=0.2, evicted=0.1),
    dict(hbm=0.3, quantized=0.5, evicted=0.2, host=0.0),
    dict(hbm=0.6, evicted=0.4, host=0.0),
    dict(hbm=0.0, host=1.0),
    dict(hbm=1 / 3, host=1 / 3, quantized=1 / 3),
    dict(hbm=1.0, host=0.0),
]
_FORMATS = {8: "int8", 4: "int4", "fp8": "fp8"}


def start(shares, pads=(0,), interval=5, sinks=2, recent=4, bits=8, heads=(4, 2), prompt=40, **options):
    driver = Driver(TieredCache(tiny_config(*heads), sinks=sinks, recent=recent, interval=interval, bits=bits, group=4,
                                **shares, **options), pads=pads)
    out = driver.feed(prompt)
    oracles = [[Tiers(row, head, SCALE, shares, sinks, recent, _FORMATS[bits], 4) for head in range(heads[1])] for row in driver.rows]
    for row, pad in enumerate(pads):
        for head, oracle in enumerate(oracles[row]):
            if prompt > pad:
                compare(oracle.feed(0, prompt - pad), out, driver, row, head)
                oracle.rank(prompt - pad)
    return driver, oracles


def compare(expected, out, driver, row, head):
    """`expected` `[group, T, D]` against the last T tokens of the layer's `[B, T, Hq, D]`."""
    tokens = expected.shape[1]
    if tokens:
        part = out[row, -tokens:, group(driver.rows[row], head)].double()
        torch.testing.assert_close(part, expected.transpose(0, 1), atol=1e-4, rtol=0)


def check_places(driver, oracles):
    for row, heads in enumerate(oracles):
        for head, oracle in enumerate(heads):
            assert tiers_of(driver.held, row, head) == oracle.tier


def check_values(driver, oracles):
    """Bit for bit what was given, or what one rounding of it gives, however often a token moved."""
    for row, heads in enumerate(oracles):
        for head, oracle in enumerate(heads):
            for position, held in held_values(driver.held, row, head).items():
                given = driver.rows[row].k[head, position], driver.rows[row].v[head, position]
                rules = oracle.rounded_key, lambda value, oracle=oracle: rounded(value, oracle.format, oracle.group)
                for mine, original, rule in zip(held, given, rules, strict=True):
                    if position in oracle.coded:
                        expected = rule(original)
                        torch.testing.assert_close(mine.double(), expected, atol=1e-5, rtol=1e-5)
                    else:
                        assert torch.equal(mine, original)


def run(driver, oracles, steps, interval, seen):
    """Decodes, with all comparisons at every step. `seen` `[rows]` real tokens before."""
    moved = set()
    for step in range(steps):
        if step and step % interval == 0:
            for row, heads in enumerate(oracles):
                for oracle in heads:
                    before = dict(oracle.tier)
                    oracle.rank(seen[row] + step)
                    moved |= {(before[p], now) for p, now in oracle.tier.items() if before[p] != now}
        out = driver.feed(1)
        for row, heads in enumerate(oracles):
            for head, oracle in enumerate(heads):
                t = seen[row] + step
                compare(oracle.feed(t, t + 1), out, driver, row, head)
        check_places(driver, oracles)
    check_values(driver, oracles)
    return moved


@pytest.mark.parametrize("shares", SHARES, ids=lambda shares: "-".join(f"{value:.2f}" for value in shares.values()))
def test_every_step(shares):
    """60 steps over padded rows, one of which is shorter than what is protected."""
    pads = (0, 13, 37)
    driver, oracles = start(shares, pads)
    check_places(driver, oracles)
    run(driver, oracles, 60, 5, [40 - pad for pad in pads])


@pytest.mark.parametrize("heads", [(2, 2), (8, 1), (6, 2)], ids=str)
def test_groups_of_query_heads(heads):
    driver, oracles = start(SHARES[1], heads=heads)
    run(driver, oracles, 22, 5, [40])


@pytest.mark.parametrize("bits", [8, 4, "fp8"])
def test_tokens_move_both_ways_and_are_rounded_once(bits):
    shares = dict(hbm=0.2, host=0.4, quantized=0.4)
    driver, oracles = start(shares, interval=2, recent=1, sinks=0, bits=bits, prompt=30)
    moved = run(driver, oracles, 120, 2, [30])
    ways = {("device", "host"), ("host", "device"), ("host", "quantized"), ("quantized", "host")}
    assert ways <= moved
    returned = {p for heads in oracles for oracle in heads for p in oracle.coded if oracle.tier[p] != "quantized"}
    assert returned, "no token came back from few bits: the test shows nothing"


@pytest.mark.parametrize("interval, reserve", [(1, 1), (1, 64), (3, 2), (16, 4), (64, 3)])
def test_intervals_and_reserves(interval, reserve):
    """Rankings at every step and rarer than the reserve: nothing is lost at any edge."""
    driver, oracles = start(SHARES[1], (0, 9), interval=interval, reserve=reserve, prompt=20)
    run(driver, oracles, 40, interval, [20, 11])


@pytest.mark.parametrize("prompt", [1, 2, 5, 6, 7])
def test_prompts_around_what_is_protected(prompt):
    driver, oracles = start(SHARES[1], prompt=prompt, interval=3)
    check_places(driver, oracles)
    run(driver, oracles, 20, 3, [prompt])


def test_turns_and_chunks():
    """Several tokens at once attend to all tiers and rank at their end; padding spans the first chunk of one row."""
    driver, oracles = start(SHARES[1], (0, 12), prompt=16, interval=4)
    seen, since = [16, 4], 0
    for tokens in (9, 1, 1, 7, *[1] * 11, 30, 2, *[1] * 5):
        if tokens == 1 and since == 4:
            for row, heads in enumerate(oracles):
                for oracle in heads:
                    oracle.rank(seen[row])
            since = 0
        out = driver.feed(tokens)
        for row, heads in enumerate(oracles):
            for head, oracle in enumerate(heads):
                compare(oracle.feed(seen[row], seen[row] + tokens), out, driver, row, head)
                if tokens > 1:
                    oracle.rank(seen[row] + tokens)
        seen, since = [count + tokens for count in seen], since + 1 if tokens == 1 else 0
        check_places(driver, oracles)
    check_values(driver, oracles)


def test_a_chunk_that_is_all_padding():
    driver, oracles = start(SHARES[1], (0, 14), prompt=10, interval=4)
    assert tiers_of(driver.held, 1, 0) == {}
    out = driver.feed(10)
    for row, (first, last) in enumerate(((10, 20), (0, 6))):
        for head, oracle in enumerate(oracles[row]):
            compare(oracle.feed(first, last), out, driver, row, head)
            oracle.rank(last)
    check_places(driver, oracles)
    run(driver, oracles, 9, 4, [20, 6])


def _expected_order(driver, scorer: str) -> list[int]:
    """All positions of the only head, best first, from what the row was given."""
    row = driver.rows[0]
    keys = row.k[0].double()
    if scorer == "knorm":
        worth = -keys.norm(dim=-1)
    elif scorer == "keydiff":
        unit = keys / keys.norm(dim=-1, keepdim=True)
        worth = -(unit @ unit.mean(0)) / unit.mean(0).norm()
    else:
        logits = row.q[:, -1].double() @ keys.T * SCALE
        worth = torch.softmax(logits, -1).mean(0)
    return sorted(range(len(keys)), key=lambda p: -float(worth[p]))


@pytest.mark.parametrize("scorer", ["last", "keydiff", "knorm"])
def test_other_scorers(scorer):
    """After the prompt and after a ranking between two steps."""
    driver, _ = start(dict(hbm=0.25, host=0.75), heads=(4, 1), sinks=0, recent=1, interval=6, scorer=scorer, prompt=40)

    def best(count: int, protected: int) -> set[int]:
        order = [p for p in _expected_order(driver, scorer) if p != protected]
        return {protected, *order[: count - 1]}

    on_device = {p for p, tier in tiers_of(driver.held, 0, 0).items() if tier == "device"}
    assert on_device == best(10, 39)
    for _ in range(6):
        driver.feed(1)
    expected = best(12, 45)  # 46 seen: 34 on the host
    driver.feed(1)
    assert {p for p, tier in tiers_of(driver.held, 0, 0).items() if tier == "device"} == expected | {46}


def test_counts_of_queries_divide_the_sums():
    """With one query per token the first tokens no longer win by age alone."""
    plain, _ = start(dict(hbm=0.25, host=0.75), heads=(4, 1), sinks=0, recent=1)
    driver, _ = start(dict(hbm=0.25, host=0.75), heads=(4, 1), sinks=0, recent=1, normalize="count")
    row, total = driver.rows[0], torch.zeros(40, dtype=torch.float64)
    for position in range(40):
        logits = row.q[:, position].double() @ row.k[0, : position + 1].double().T * SCALE
        total[: position + 1] += torch.softmax(logits, -1).mean(0)
    worth = total / (40 - torch.arange(40))
    expected = set(sorted(range(39), key=lambda p: -float(worth[p]))[:9]) | {39}
    on_device = {p for p, tier in tiers_of(driver.held, 0, 0).items() if tier == "device"}
    assert on_device == expected != {p for p, tier in tiers_of(plain.held, 0, 0).items() if tier == "device"}


@pytest.mark.parametrize("bits, expected", [(8, 8 + 2 * 2 * 4), (4, 4 + 2 * 2 * 4), ("fp8", 8 + 2 * 4)])
def test_bytes_of_every_tier(bits, expected):
    """Host bytes are those of the mapped tensors; a quantized entry has its codes and the ends of two groups of 4 channels."""
    driver, _ = start(dict(hbm=0.4, host=0.3, quantized=0.2, evicted=0.1), bits=bits, prompt=100, reserve=1)
    layer, report = driver.held, driver.cache.report()
    assert report.tiers == {"device": 2 * 40, "host": 2 * 30, "quantized": 2 * 20} and report.evicted == 2 * 10
    assert report.kept == 90
    assert layer.quantized.entry_bytes == 2 * expected and layer.host.entry_bytes == layer.store.entry_bytes == 2 * 8 * 4
    assert report.host_bytes == int(layer.host.allocated.sum()) * layer.host.entry_bytes
    assert int(layer.host.allocated.max()) == 31  # one further token of the reserve, or the interval
    codes, ranges = quantize(torch.randn(1, 8), layer.coding.format, 4)
    assert codes.numel() + ranges.numel() * 4 == expected
    assert report.read_bytes == 2 * (70 * 64 + 20 * 2 * expected)
