"""SnapKV against loops in fp64: which tokens stay, and the logits that follow."""

import hypothesis.strategies as st
import pytest
import torch
from helpers import decode, forward, generate, kept, kept_in_all_layers, left_pad, prefill, tokens
from hypothesis import given, settings
from oracle import OracleLlama, keep_snapkv, snapkv_scores
from tiny_models import build

from kvsparse_hf import SnapKVCache

STEPS = 12
GROUPS = {1: "llama-mha", 2: "llama-gqa2", 4: "llama-gqa4", 8: "llama-mqa8"}


def _oracle_kept(model, ids, budget, window, kernel, **options) -> list:
    oracle = OracleLlama(model, keep_snapkv(budget, window, kernel, **options))
    oracle.forward(ids.flatten())
    return [layer.positions.tolist() for layer in oracle.layers]


def _kept(model, ids, mask=None, **options) -> list:
    mine = SnapKVCache(model, **options)
    prefill(model, mine, ids, mask)
    return kept_in_all_layers(mine)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("reduce", ["mean", "max", "sum"])
@pytest.mark.parametrize("pooling", ["max", "avg"])
@pytest.mark.parametrize("kernel", [1, 3, 7])
def test_kept_tokens(group, reduce, pooling, kernel):
    model = build(GROUPS[group])
    options = dict(window=5, kernel=kernel, pooling=pooling, reduce=reduce)
    expected = _oracle_kept(model, tokens(50), 16, **options)
    got = _kept(model, tokens(50), budget=16, **options)
    assert [layer[0] for layer in got] == expected
    assert expected[0][0] != list(range(11)) + list(range(45, 50))  # scores decided, not order


@pytest.mark.parametrize("length", [1, 7, 8, 9, 15, 16, 17, 40])
@pytest.mark.parametrize("pad", [0, 1, 9])
def test_kept_tokens_at_the_edges(length, pad):
    """Window 8, budget 16: around both, in a batch whose other row is longer."""
    model = build()
    row = tokens(length, seed=5)
    ids, mask = left_pad([row, tokens(length + pad, seed=6)])
    got = _kept(model, ids, mask, budget=16, window=8, kernel=3)
    assert [layer[0] for layer in got] == _oracle_kept(model, row, 16, 8, 3)
    assert [layer[1] for layer in got] == _oracle_kept(model, tokens(length + pad, seed=6), 16, 8, 3)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    length=st.integers(10, 60),
    pad=st.integers(0, 30),
    window=st.integers(1, 12),
    extra=st.integers(0, 20),
    kernel=st.sampled_from([1, 3, 5, 9]),
    sinks=st.integers(0, 3),
    seed=st.integers(0, 10),
)
def test_kept_tokens_of_any_shape(length, pad, window, extra, kernel, sinks, seed):
    with torch.no_grad():
        model = build("llama-gqa4")
        row, budget = tokens(length, seed=seed), window + sinks + extra
        ids, mask = left_pad([row, tokens(length + pad, seed=99)])
        got = _kept(model, ids, mask, budget=budget, window=window, kernel=kernel, sinks=sinks)
        assert [layer[0] for layer in got] == _oracle_kept(model, row, budget, window, kernel, sinks=sinks)


@pytest.mark.parametrize("pooling, kernel", [("max", 1), ("max", 7), ("avg", 1), ("avg", 5)])
@pytest.mark.parametrize("pad", [0, 6])
def test_ties_go_to_the_older_token(pooling, kernel, pad):
    """Keys of zero: every query looks everywhere alike, so all scores before the window are equal (averages are lower at the ends)."""
    model = build()
    for layer in model.model.layers:
        layer.self_attn.k_proj.weight.zero_()
    ids, mask = left_pad([tokens(40 - pad), tokens(40, seed=2)])
    got = _kept(model, ids, mask, budget=12, window=4, kernel=kernel, pooling=pooling)
    edge = 0 if pooling == "max" or kernel == 1 else kernel // 2
    for layer in got:
        for row, length in enumerate((40 - pad, 40)):
            for head in layer[row]:
                assert head == list(range(edge, edge + 8)) + list(range(length - 4, length))


def test_pooling_keeps_neighbours():
    """A plateau of equal maxima from max pooling is cut from its older side."""
    model = build()
    ids = tokens(50)
    oracle = OracleLlama(model, lambda q, k, positions: plateau.append(snapkv_scores(q, k, 4, 7, "max", "mean")) or
                         torch.arange(50).expand(2, -1))
    plateau = []
    oracle.forward(ids[0])
    scores = plateau[0][0]
    assert len(set(scores)) < len(scores)  # there are ties among the pooled scores
    assert [layer[0] for layer in _kept(model, ids, budget=9, window=4, kernel=7)] == _oracle_kept(model, ids, 9, 4, 7)


def test_query_heads_of_a_group_may_trade_places():
    model, twin = build("llama-gqa4"), build("llama-gqa4")
    dim = 8
    order = torch.tensor([2, 0, 3, 1, 5, 7, 4, 6])  # inside the groups 0-3 and 4-7
    rows = (order.unsqueeze(1) * dim + torch.arange(dim)).flatten()
    for layer in twin.model.layers:
        layer.self_attn.q_proj.weight.copy_(layer.self_attn.q_proj.weight[rows])
        layer.self_attn.o_proj.weight.copy_(layer.self_attn.o_proj.weight[:, rows])
    ids = tokens(50)
    torch.testing.assert_close(forward(twin, ids), forward(model, ids), atol=1e-5, rtol=0)
    for reduce in ("mean", "max", "sum"):
        options = dict(budget=14, window=4, kernel=3, reduce=reduce)
        assert _kept(twin, ids, **options) == _kept(model, ids, **options)
    across = (torch.tensor([0, 4, 1, 5, 2, 6, 3, 7]).unsqueeze(1) * dim + torch.arange(dim)).flatten()
    for layer in twin.model.layers:
        layer.self_attn.q_proj.weight.copy_(layer.self_attn.q_proj.weight[across])
    assert _kept(twin, ids, **options)[0] != _kept(model, ids, **options)[0]  # heads h % H would not notice


@pytest.mark.parametrize("kernel, pooling", [(1, "max"), (5, "max"), (5, "avg")])
def test_a_larger_budget_keeps_a_superset(kernel, pooling):
    """The prompt is always read densely, so the scores do not depend on the budget."""
    model = build()
    sets = [_kept(model, tokens(60), budget=budget, window=4, kernel=kernel, pooling=pooling) for budget in (5, 8, 13, 30, 59, 60, 100)]
    for small, large in zip(sets, sets[1:], strict=False):
        for layer, larger in zip(small, large, strict=True):
            for head in range(2):
                assert set(layer[0][head]) <= set(larger[0][head])
    assert sets[-1] == sets[-2] == [[[list(range(60))] * 2]] * 2


@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("positions", ["original", "cache"])
@pytest.mark.parametrize("decode_mode", ["grow", "bounded"])
def test_logits_after_compression(group, positions, decode_mode):
    """Decode, a second turn and decode again, against the paper's arithmetic with unrotated keys."""
    model = build(GROUPS[group])
    budget, window, kernel = 14, 4, 3
    mine = SnapKVCache(model, budget=budget, window=window, kernel=kernel, positions=positions, decode=decode_mode, reserve=3)
    # bounded: the newest `window` entries are a ring, so the oldest of them gives way
    evict = (lambda row: budget - window) if decode_mode == "bounded" else None
    keep = keep_snapkv(budget, window, kernel)
    oracle = OracleLlama(model, keep, keep_turn=keep if evict else None, evict=evict, budget=budget, cache_positions=positions == "cache")
    ids, after, message, more = tokens(45), tokens(STEPS, seed=3), tokens(6, seed=4), tokens(STEPS, seed=5)
    torch.testing.assert_close(forward(model, ids, mine)[0].double(), oracle.forward(ids[0]), atol=1e-4, rtol=0)
    for part in (after, message, more):
        if part is message:
            got, expected = forward(model, part, mine)[0], oracle.forward(part[0])
        else:
            got = decode(model, mine, part)[0]
            expected = torch.cat([oracle.forward(token.view(1)) for token in part[0]])
        torch.testing.assert_close(got.double(), expected, atol=1e-4, rtol=0)
        assert [layer[0] for layer in kept_in_all_layers(mine)] == [layer.positions.sort(-1).values.tolist() for layer in oracle.layers]


def test_bounded_decode_of_a_prompt_below_the_budget():
    """The budget fills up first; then the oldest entry outside the pinned ones gives way, and the newest `window` always stay."""
    model = build()
    for length in (3, 8, 11, 12):
        mine = SnapKVCache(model, budget=12, window=4, kernel=3, decode="bounded")
        forward(model, tokens(length), mine)
        pinned = min(length, 8)
        for step in range(30):
            decode(model, mine, tokens(1, seed=step))
            total = length + step + 1
            want = list(range(total)) if total <= 12 else list(range(pinned)) + list(range(total - 12 + pinned, total))
            assert kept(mine) == [[want] * 2]


def test_chunks_are_compressed_as_they_come():
    """Each chunk's own last queries choose among the kept and the new tokens; the oracle does the same."""
    model = build()
    budget, window, kernel = 12, 4, 3
    keep = keep_snapkv(budget, window, kernel)
    oracle = OracleLlama(model, keep, keep_turn=keep)
    ids = tokens(40)
    mine = SnapKVCache(model, budget=budget, window=window, kernel=kernel)
    answer = generate(model, ids, mine, 6, prefill_chunk_size=10)
    logits = [oracle.forward(chunk)[-1:] for chunk in ids[0].split(10)][-1:]
    logits += [oracle.forward(token.view(1)) for token in answer[0, :-1]]
    assert torch.cat(logits).argmax(-1).tolist() == answer[0].tolist()
    assert [layer[0] for layer in kept_in_all_layers(mine)] == [layer.positions.tolist() for layer in oracle.layers]
