"""R-KV against its rule in fp64."""

import pytest
import torch
from test_token_window import periodic_run
from token_driver import SCALE, Driver, tiny_config
from token_oracles import rkv_choice, rkv_redundancy

from kvsparse_hf import RKVCache
from kvsparse_hf.policy.redundancy import redundancy

SMALL = dict(budget=24, window=4, kernel=3, recompress_every=12)


def rule(balance=0.1, threshold=0.5, sinks=0, count_self=True):
    def choose(row, head, read, count):
        return rkv_choice(row, head, SCALE, read, read[-4:], count, sinks, 3, balance, threshold, count_self)

    return choose


@pytest.mark.parametrize("heads", [(2, 2), (4, 1), (8, 1), (8, 2)], ids=str)
def test_200_steps(heads):
    driver = Driver(RKVCache(tiny_config(*heads), **SMALL))
    driver.feed(60)
    periodic_run(driver, 60, 200, 24, 12, rule())


@pytest.mark.parametrize(
    ("options", "want"),
    [
        (dict(balance=0.0), dict(balance=0.0)),
        (dict(balance=1.0), dict(balance=1.0)),
        (dict(threshold=0.1, sinks=3), dict(threshold=0.1, sinks=3)),
        (dict(duplicates="published"), dict(count_self=False)),
    ],
    ids=str,
)
def test_options_and_padding(options, want):
    """Every row by its own keys and queries (the published code uses the first row's)."""
    driver = Driver(RKVCache(tiny_config(), **SMALL, **options), pads=(0, 13, 44, 57))
    driver.feed(60)
    periodic_run(driver, 60, 50, 24, 12, rule(**want))


@pytest.mark.parametrize("length", [1, 3, 4, 5, 23, 24, 25])
def test_thresholds(length):
    driver = Driver(RKVCache(tiny_config(), **SMALL))
    driver.feed(length)
    periodic_run(driver, length, 40, 24, 12, rule())


def test_the_phase_does_not_leak_into_the_next_prompt():
    cache = RKVCache(tiny_config(), **SMALL)
    driver = Driver(cache)
    driver.feed(60)
    for _ in range(7):
        driver.feed(1)
    cache.reset()
    again = Driver(cache, seed=5)
    again.feed(60)
    periodic_run(again, 60, 40, 24, 12, rule())


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("count_self", [True, False])
def test_redundancy_is_that_of_the_whole_matrix(blocks, count_self):
    torch.manual_seed(0)
    base = torch.randn(6, 8)
    keys = base[torch.randint(0, 6, (2, 2, 30))] + 0.3 * torch.randn(2, 2, 30, 8)
    pad = torch.tensor([[0, 0], [7, 7]])
    got = redundancy(keys, pad, 0.5, count_self, 3 * 2 * 2 * 30 if blocks else 1 << 25)
    for row in range(2):
        for head in range(2):
            p = int(pad[row, head])
            want = rkv_redundancy(keys[row, head, p:], 0.5, count_self)
            assert torch.allclose(got[row, head, p:].double(), want, atol=1e-6)
            assert not got[row, head, :p].any()


def test_of_two_duplicates_the_older_is_redundant():
    """With the published rule the two excuse each other."""
    torch.manual_seed(0)
    keys = torch.eye(8)[None, None] + 0.01 * torch.randn(1, 1, 8, 8)
    keys[..., 6, :] = keys[..., 2, :]
    pad = torch.zeros(1, 1, dtype=torch.long)
    mine = redundancy(keys, pad, 0.5)[0, 0]
    assert mine[2] > mine[6] and int(mine.argmax()) == 2
    published = redundancy(keys, pad, 0.5, count_self=False)[0, 0]
    assert float(published[2] - published[6]) == pytest.approx(0.0, abs=1e-6)


def test_drops_the_older_copies_first():
    """Eleven copies of one key among others: with redundancy alone, what is kept of the copies are the newest."""
    driver = Driver(RKVCache(tiny_config(1, 1), budget=20, window=4, kernel=3, balance=0.0))
    q, k, v = driver.random(40)
    copies = list(range(3, 36, 3))
    k[:, :, copies] = k[:, :, :1].clone()
    driver.feed(40, (q, k, v))
    kept = [j for j in driver.kept()[0] if j in copies]
    assert kept == copies[len(copies) - len(kept) :] and len(kept) < len(copies)
