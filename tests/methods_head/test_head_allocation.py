"""How entries are shared out: the numbers of the papers' code, exact sums, floors and caps."""

import math

import pytest
import torch
from head_oracles import by_hand, table_choice
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsparse_hf.methods.duo_attention import streaming_heads
from kvsparse_hf.policy.base import Candidates
from kvsparse_hf.policy.budgets import distribute
from kvsparse_hf.policy.depth import pyramid
from kvsparse_hf.policy.heads import AdaptiveHeads, ElasticSpanPolicy, count_best, table_counts
from kvsparse_hf.policy.replay import keep_best

EXAMPLE = torch.tensor([[[0.5, 0.2, 0.1, 0.08, 0.05, 0.04, 0.02, 0.01], [0.16, 0.15, 0.14, 0.13, 0.12, 0.11, 0.10, 0.09]]])


def candidates(scores: torch.Tensor, pad=None) -> Candidates:
    batch, heads, length = scores.shape
    keys = torch.zeros(batch, heads, length, 1)
    positions = torch.arange(length).expand(batch, heads, -1)
    pad = torch.zeros(batch, heads, dtype=torch.int64) if pad is None else pad
    return Candidates(keys[:, :, :1], keys, keys, positions, pad, 1.0, 0.0, None, 0, 1)


@pytest.mark.parametrize(("official", "shares"), [(True, [2, 5]), (False, [2, 6])])
def test_the_published_example(official, shares):
    """Budget 4, alpha 0.2: the published rounding keeps 7 of 8 entries, ours all 8."""
    policy = AdaptiveHeads(alpha=0.2, official=official)
    counts = policy.allocate(candidates(EXAMPLE), EXAMPLE, torch.tensor([[4, 4]]))
    assert counts.tolist() == [shares]


def test_alpha_one_is_uniform_and_alpha_zero_is_global():
    for alpha, shares in ((1.0, [4, 4]), (0.0, [2, 6])):
        counts = AdaptiveHeads(alpha=alpha).allocate(candidates(EXAMPLE), EXAMPLE, torch.tensor([[4, 4]]))
        assert counts.tolist() == [shares]


def test_the_best_of_a_layer_are_counted_by_head_with_ties_to_the_lower():
    scores = torch.tensor([[[1.0, 1.0, 1.0], [1.0, 2.0, 1.0]]])
    assert count_best(scores, torch.ones(1, 2, 3, dtype=torch.bool), torch.tensor([4])).tolist() == [[3, 1]]
    free = torch.tensor([[[True, False, True], [True, True, True]]])
    assert count_best(scores, free, torch.tensor([4])).tolist() == [[2, 2]]


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_distribute_against_hand(data):
    heads = data.draw(st.integers(1, 9))
    weights = data.draw(st.lists(st.sampled_from([0, 0, 0.5, 1, 3, 7, 1000]), min_size=heads, max_size=heads))
    caps = data.draw(st.lists(st.integers(0, 40), min_size=heads, max_size=heads))
    total = data.draw(st.integers(0, 400))
    got = distribute(torch.tensor(weights, dtype=torch.float64), total, torch.tensor(caps))
    assert got.sum() == min(total, sum(caps)) and bool((got <= torch.tensor(caps)).all()) and bool((got >= 0).all())
    assert got.tolist() == by_hand(weights, total, caps)


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_adaptive_sums_floors_and_caps(data):
    """Whatever the scores (non-finite ones too), padding and budget: the sum is exact and nobody is below the floor."""
    seed = data.draw(st.integers(0, 10**6))
    heads, length = data.draw(st.integers(1, 6)), data.draw(st.integers(4, 60))
    pads = [data.draw(st.integers(0, length - 1)) for _ in range(2)]
    budget, alpha = data.draw(st.integers(1, 50)), data.draw(st.sampled_from([0.0, 0.2, 0.5, 1.0]))
    sinks, recent = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 5))
    scores = torch.rand(2, heads, length, generator=torch.Generator().manual_seed(seed)) ** 8
    for value in data.draw(st.lists(st.sampled_from([math.nan, math.inf, -math.inf]), max_size=3)):
        scores[:, :, data.draw(st.integers(0, length - 1))] = value
    pad = torch.tensor(pads).unsqueeze(1).expand(-1, heads)
    counts = torch.full((2, heads), budget)
    policy = AdaptiveHeads(alpha=alpha, sinks=sinks, recent=recent)
    got = policy.allocate(candidates(scores, pad), scores, counts)
    for row, valid in enumerate(length - torch.tensor(pads)):
        valid = int(valid)
        if valid <= budget:
            assert got[row].tolist() == [budget] * heads
            continue
        assert int(got[row].sum()) == budget * heads and int(got[row].max()) <= valid
        safe = min(budget, sinks + recent)
        assert int(got[row].min()) >= safe + math.floor(alpha * (budget - safe))


@pytest.mark.parametrize(("beta", "pool", "floor"), [(1.005, 119, 1), (1.01, 118, 2), (2, 60, 60), (10, 12, 108)])
def test_headkv_pool_and_floor(beta, pool, floor):
    """Capacity 128, window 8. A head with no importance keeps the floor; the pool is what importance divides."""
    table = torch.zeros(2, 4)
    table[1, 2] = 1.0
    counts = table_counts(table, 128, 8, 10**6, beta)
    assert counts[0].tolist() == [8 + floor] * 4
    assert int(counts[1, 2]) == 8 + floor + pool * 8
    assert int(counts.sum()) == 128 * 8


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_headkv_sums_caps_and_hand(data):
    layers, heads = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5))
    # No sums of these are in simple proportions: remainders that tie exactly would be told apart by rounding alone.
    values = [0.0, 0.13717, 1.09861, 5.31662, 103.27959]
    table = [[data.draw(st.sampled_from(values)) for _ in range(heads)] for _ in range(layers)]
    table[0][0] += 0.25131
    budget, window = data.draw(st.integers(9, 60)), 8
    length, beta = data.draw(st.integers(budget + 1, 200)), data.draw(st.sampled_from([1.005, 1.2, 3.0]))
    got = table_counts(torch.tensor(table), budget, window, length, beta)
    assert got.tolist() == table_choice(table, budget, window, length, beta)
    assert int(got.sum()) == budget * layers * heads and int(got.max()) <= length and int(got.min()) >= window


def test_short_prompts_and_small_budgets_share_evenly():
    table = torch.tensor([[1.0, 9.0]])
    assert table_counts(table, 20, 8, 20, 1.1).tolist() == [[20, 20]]
    assert table_counts(table, 8, 8, 100, 1.1).tolist() == [[8, 8]]


def test_pyramid_numbers():
    """C=128, W=8, 32 layers: 234 down in steps of 7 to 17, mean 125.5; C=2048: 3978 to 103, mean 2040.5. Exact: 120 and 2040."""
    published = pyramid(120, 8000, 8, 32, 20, exact=False)
    assert (int(published[0]), int(published[0] - published[1]), int(published[-1])) == (234, 7, 17)
    assert float(published.double().mean()) == 125.5
    published = pyramid(2040, 8000, 8, 32, 20, exact=False)
    assert (int(published[0]), int(published[-1]), float(published.double().mean())) == (3978, 103, 2040.5)
    for average in (120, 2040):
        assert int(pyramid(average, 8000, 8, 32, 20, exact=True).sum()) == 32 * average


@pytest.mark.parametrize(
    ("rule", "length", "span"),
    [
        ((0.0, 0.125), 4096, 512),
        ((0.0, 0.125), 4104, 576),  # 513, rounded up
        ((0.0, 0.125), 4103, 512),  # 512.875 is cut to 512 first
        ((-1024.0, 1.0), 4096, 3072),
        ((-1024.0, 1.0), 1000, 128),  # negative: the minimum
        ((0.0, 0.5), 100, 128),
        ((8192.0, 0.0), 4096, 4096),  # longer than the text
        ((0.0, 0.3), 1000, 320),
    ],
)
def test_elastic_spans(rule, length, span):
    policy = ElasticSpanPolicy(rules=((rule,),))
    assert policy.span((rule,), length) == span


def test_a_group_takes_the_mean_or_the_widest_span():
    rules = ((0.0, 0.25), (0.0, 0.75))
    assert ElasticSpanPolicy(rules=(rules,)).span(rules, 1024) == 512
    assert ElasticSpanPolicy(rules=(rules,), widest=True).span(rules, 1024) == 768


@pytest.mark.parametrize("sparsity", [0.0, 0.25, 0.5, 0.75, 1.0])
def test_the_stated_share_streams(sparsity):
    scores = torch.rand(6, 8, dtype=torch.float64)
    streams = streaming_heads(scores, sparsity, 0)
    assert int(streams.sum()) == round(sparsity * 48)
    if 0 < sparsity < 1:  # the published rule: below the quantile
        assert torch.equal(streams, scores < torch.quantile(scores, sparsity))
        assert scores[streams].max() <= scores[~streams].min()


def test_ties_are_broken_by_the_seed():
    scores = torch.zeros(4, 8)
    first, again, other = (streaming_heads(scores, 0.5, seed) for seed in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, other) and int(first.sum()) == int(other.sum()) == 16


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_one_threshold_over_layers_and_heads(data):
    layers, heads, length = (data.draw(st.integers(1, top)) for top in (3, 3, 20))
    protected, total = data.draw(st.integers(0, length)), data.draw(st.integers(0, 200))
    total = max(total, protected * layers * heads)
    scores = torch.randint(0, 4, (layers, heads, length + 3)).float()  # many ties
    keep = keep_best(scores, length, protected, total)
    ranked = sorted(
        (-math.inf if j < protected else -float(scores[layer, head, j]), layer, head, j)
        for layer in range(layers) for head in range(heads) for j in range(length)
    )  # fmt: skip
    want = torch.zeros_like(keep)
    for _, layer, head, j in ranked[:total]:
        want[layer, head, j] = True
    assert torch.equal(keep, want)
    assert int(keep.sum()) == min(total, layers * heads * length)
