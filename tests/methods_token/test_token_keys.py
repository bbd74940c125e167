"""KeyDiff and Knorm against their rules in fp64."""

import pytest
import torch
from test_token_window import periodic_run
from token_driver import Driver, tiny_config
from token_oracles import keydiff_choice, top_with_protected

from kvsparse_hf import KeyDiffCache, KnormCache


def keydiff(block, sinks=0, recent=0):
    """The choice as `periodic_run` wants it; what was settled before is told by the row's own record."""
    settled: dict = {}

    def choose(row, head, read, count):
        kept = [j for j in read if j in settled.get((id(row), head), ())]
        out = keydiff_choice(row, head, kept, [j for j in read if j not in kept], count, block, sinks, recent)
        settled[id(row), head] = set(out)
        return out

    return choose


def knorm(sinks=0, recent=0):
    def choose(row, head, read, count):
        norms = -row.k[head, read].double().norm(dim=-1)
        return top_with_protected(dict(zip(read, norms.tolist(), strict=True)), count, sinks, recent)

    return choose


@pytest.mark.parametrize("heads", [(2, 2), (4, 1), (8, 1), (8, 2)], ids=str)
@pytest.mark.parametrize(("cache", "choose"), [(KeyDiffCache, keydiff(128)), (KnormCache, knorm())], ids=["keydiff", "knorm"])
def test_200_steps_of_choosing_anew(cache, choose, heads):
    driver = Driver(cache(tiny_config(*heads), budget=24, recompress_every=10))
    driver.feed(60)
    periodic_run(driver, 60, 200, 24, 10, choose)


@pytest.mark.parametrize("block", [1, 7, 23, 24, 25, 128, None])
@pytest.mark.parametrize(("sinks", "recent"), [(0, 0), (2, 5)])
def test_keydiff_blocks(block, sinks, recent):
    """Blocks are counted from each row's first real token."""
    driver = Driver(KeyDiffCache(tiny_config(), budget=24, block=block, sinks=sinks, recent=recent), pads=(0, 31, 70))
    driver.feed(90)
    for row in range(3):
        n = driver.rows[row].length
        for head in range(2):
            read = list(range(n))
            want = read if n <= 24 else keydiff_choice(driver.rows[row], head, [], read, 24, block or n, sinks, recent)
            assert driver.kept(row)[head] == want


def test_keydiff_chunks_of_a_block_are_the_block_wise_method():
    """Feeding chunks of one block gives the same choice as one prompt; keys are synthetic, so attention has no say."""
    whole, parts = (Driver(KeyDiffCache(tiny_config(), budget=24, block=16)) for _ in range(2))
    q, k, v = whole.random(96)
    whole.feed(96, (q, k, v))
    for first in range(0, 96, 16):
        parts.feed(16, tuple(x[:, :, first : first + 16] for x in (q, k, v)))
    assert whole.kept() == parts.kept()
    once = Driver(KeyDiffCache(tiny_config(), budget=24, block=None))
    once.feed(96, (q, k, v))
    assert once.kept() != whole.kept()


@pytest.mark.parametrize("heads", [(2, 2), (8, 1), (8, 2)], ids=str)
@pytest.mark.parametrize("name", ["keydiff", "knorm"])
def test_bounded_decode(name, heads):
    """One in, one out: the worst of what is held makes way for the next token."""
    cache = {"keydiff": KeyDiffCache, "knorm": KnormCache}[name]
    driver = Driver(cache(tiny_config(*heads), budget=20, decode="bounded", sinks=1, recent=3), pads=(0, 30))
    driver.feed(50)
    held = [driver.kept(row) for row in range(2)]
    for step in range(100):
        for row, heads_held in enumerate(held):
            for head, read in enumerate(heads_held):
                if len(read) == 20:
                    k = driver.rows[row].k[head, read].double()
                    score = -k.norm(dim=-1)
                    if name == "keydiff":
                        unit = k / k.norm(dim=-1, keepdim=True)
                        score = -(unit @ unit.mean(0))
                    read[:] = top_with_protected(dict(zip(read, score.tolist(), strict=True)), 19, 1, 2)
                read.append(driver.rows[row].length)
        driver.feed(1)
        assert [driver.kept(row) for row in range(2)] == held, step


def test_keydiff_prefers_the_odd_one_out():
    driver = Driver(KeyDiffCache(tiny_config(1, 1), budget=4, block=None))
    q, k, v = driver.random(20)
    k = k * 0.01 + torch.eye(8)[0]
    k[:, :, 7] = -k[:, :, 7]
    driver.feed(20, (q, k, v))
    assert 7 in driver.kept()[0]


@pytest.mark.parametrize(("cache", "options"), [(KeyDiffCache, {}), (KnormCache, {})], ids=["keydiff", "knorm"])
def test_ties_keep_the_earlier_token(cache, options):
    driver = Driver(cache(tiny_config(1, 1), budget=5, sinks=1, recent=2, **options))
    driver.feed(12, tuple(torch.ones_like(t) for t in driver.random(12)))
    assert driver.kept()[0] == [0, 1, 2, 10, 11]


def test_knorm_in_bf16_compares_in_fp32():
    """Norms that differ by less than bf16 can say still rank."""
    driver = Driver(KnormCache(tiny_config(1, 1), budget=10), spread=4.0, dtype=torch.bfloat16)
    driver.feed(200)
    assert driver.kept()[0] == knorm()(driver.rows[0], 0, list(range(200)), 10)
    rounded = driver.rows[0].k[0].norm(dim=-1)
    assert rounded.dtype == torch.bfloat16 and len(rounded.unique()) < 120


def test_knorm_skips_layers():
    cache = KnormCache(tiny_config(layers=3), budget=10, skip_layers=[0, 1])
    assert [layer.policy.budget is None for layer in cache.sparse_layers] == [True, True, False]
