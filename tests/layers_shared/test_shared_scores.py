"""An owner's scores see the queries of all layers that read it; every reader of a selecting owner selects for itself."""

import pytest
import torch
from helpers import decode, forward, kept_in_all_layers, left_pad, prefill, tokens
from shared_oracle import group_mean, in_groups, shared_forward
from tiny_models import build

import kvsparse_hf
from kvsparse_hf import CLACache, UnsupportedOperationError, list_methods

LAYERS, HEADS, BUDGET = 4, 2, 12
GROUPS = {0: [0, 1], 2: [2, 3]}
OWN_OPTIONS = dict(
    snapkv=dict(budget=BUDGET, window=4), pyramidkv=dict(budget=BUDGET, window=4), adakv=dict(budget=BUDGET, window=4),
    h2o=dict(budget=BUDGET), tova=dict(budget=BUDGET), scissorhands=dict(budget=BUDGET, recent=2), keydiff=dict(budget=BUDGET),
    knorm=dict(budget=BUDGET), rkv=dict(budget=BUDGET, window=4, recompress_every=6), full={}, kvzip={},
    headkv=dict(budget=BUDGET, window=4, table=[[1.0, 2.0]] * LAYERS), moa=dict(rules={"alphas": [[12, 16]] * LAYERS, "betas": [[0.0, 0.0]] * LAYERS}, minimum=8, multiple=1, sinks=4),
    quest=dict(budget=BUDGET, page_size=2, sinks=2, recent=2, dense_layers=0), loki=dict(budget=BUDGET, sinks=1, recent=2),
    sparq=dict(budget=BUDGET, channels=6, recent=3), retrieval=dict(budget=BUDGET, sinks=2, recent=3, segment=64, per_cluster=2),
)  # fmt: skip
OWN_OPTIONS["streaming-llm"] = OWN_OPTIONS["expected-attention"] = dict(budget=BUDGET)
OWN_OPTIONS["duo-attention"] = dict(pattern=[[0.0, 1.0]] * LAYERS, sinks=2, recent=10)


def _model():
    return build(num_hidden_layers=LAYERS)


def _weights(model, ids, mask=None):
    return shared_forward(model, ids, in_groups(LAYERS, 2), mask)[1]


def _kept(scores: torch.Tensor, keep: int, protected: list[int]) -> list[int]:
    """The best by score, the protected ones among them."""
    scores = scores.clone()
    scores[protected] = float("inf")
    return sorted(scores.topk(keep).indices.tolist())


@pytest.mark.parametrize("reduce", ["mean", "max"])
def test_snapkv_keeps_what_all_readers_attend_to(reduce):
    model, length, window = _model(), 40, 4
    ids, mask = left_pad([tokens(length), tokens(25, seed=2)])
    mine = CLACache(model, factor=2, inner="snapkv", budget=BUDGET, window=window, kernel=1, reduce=reduce)
    prefill(model, mine, ids, mask)
    weights = _weights(model, ids, mask)
    for place, readers in enumerate(GROUPS.values()):
        every = torch.cat([weights[layer].unflatten(1, (HEADS, -1)) for layer in readers], dim=2)[..., -window:, :].sum(-2)
        scores = every.mean(2) if reduce == "mean" else every.amax(2)
        for row, pad in enumerate((0, 15)):
            for head in range(HEADS):
                real = scores[row, head, pad:]
                expected = _kept(real, BUDGET, list(range(len(real) - window, len(real))))
                assert kept_in_all_layers(mine)[place][row][head] == expected


def test_h2o_sums_the_attention_of_all_readers():
    """After a prompt, decoded tokens and a turn: the accumulated attention is the mean over owner and reader."""
    model = _model()
    ids, after = tokens(30), tokens(9, seed=3)
    mine = CLACache(model, factor=2, inner="h2o", budget=512)
    forward(model, ids, mine)
    decode(model, mine, after[:, :4])
    forward(model, after[:, 4:8], mine)
    decode(model, mine, after[:, 8:])
    weights = _weights(model, torch.cat((ids, after), dim=1))
    for layer, readers in zip(mine.sparse_layers, GROUPS.values(), strict=True):
        rows, valid = layer.store.slots()
        got = layer.store.extra["received"][rows][valid].view(HEADS, -1)
        expected = group_mean(weights, readers, HEADS).sum(2)[0]
        torch.testing.assert_close(got[:, : expected.shape[-1]], expected, atol=1e-4, rtol=1e-4)


def test_h2o_gives_up_what_all_readers_want_least():
    """One decoded token after a full budget: the victim is the token with the lowest sum over owner and reader."""
    model, ids = _model(), tokens(BUDGET)
    mine = CLACache(model, factor=2, inner="h2o", budget=BUDGET, recent=4)
    forward(model, ids, mine)
    weights = _weights(model, ids)
    sums = [group_mean(weights, readers, HEADS).sum(2)[0] for readers in GROUPS.values()]
    decode(model, mine, tokens(1, seed=4))
    for place, received in enumerate(sums):
        for head in range(HEADS):
            victim = int(received[head, : BUDGET - 3].argmin())
            assert kept_in_all_layers(mine)[place][0][head] == [p for p in range(BUDGET + 1) if p != victim]


def test_tova_looks_at_the_last_query_of_all_layers():
    model, ids = _model(), tokens(30)
    mine = CLACache(model, factor=2, inner="tova", budget=BUDGET)
    forward(model, ids, mine)
    weights = _weights(model, ids)
    for place, readers in enumerate(GROUPS.values()):
        last = group_mean(weights, readers, HEADS)[0, :, -1].mean(0)
        assert kept_in_all_layers(mine)[place][0] == [_kept(last, BUDGET, [])] * HEADS


def test_a_reader_of_quest_selects_for_its_own_query():
    """The pages chosen by owner and reader differ, and each is the best by the sum of its own bounds."""
    model, ids, size = _model(), tokens(64), 4
    mine = CLACache(model, factor=2, inner="quest", budget=24, page_size=size, sinks=0, recent=1, reduce="max", dense_layers=0)
    forward(model, ids, mine)
    owner = mine.sparse_layers[0]
    chosen, original = [], owner.selector.select

    def select(query, store, call):
        selection = original(query, store, call)
        chosen.append((query, selection.pages))
        return selection

    owner.selector.select = select
    decode(model, mine, tokens(1, seed=5))
    assert len(chosen) == 2 and not torch.equal(chosen[0][0], chosen[1][0])
    assert not torch.equal(chosen[0][1], chosen[1][1])
    keys = owner.store.keys.view(HEADS, -1, owner.store.keys.shape[-1])[:, :65]
    for query, pages in chosen:
        for head in range(HEADS):
            group = query[0].unflatten(0, (HEADS, -1))[head]
            parts = keys[head].split(size)
            bounds = torch.stack([torch.maximum(group * part.amax(0), group * part.amin(0)).sum(-1).amax() for part in parts])
            bounds[-1] = float("inf")
            assert pages[0, head].tolist() == sorted(bounds.topk(24 // size).indices.tolist())


def test_rkv_rings_hold_the_queries_of_all_readers():
    model = _model()
    mine = CLACache(model, factor=2, inner="rkv", budget=BUDGET, window=4, recompress_every=6)
    forward(model, tokens(30), mine)
    decode(model, mine, tokens(8, seed=3))
    for layer in mine.sparse_layers:
        assert layer.ring.buffer.shape[1] == 8  # 4 query heads of each of two layers
        assert layer.ring.buffer.abs().sum(-1).gt(0).all()


@pytest.mark.parametrize("inner", sorted(OWN_OPTIONS))
def test_every_method_takes_a_map(inner):
    """Prompt, steps, a turn and steps, with padding: a row gives what it gives alone, and no prompt tensor stays."""
    model, options = _model(), OWN_OPTIONS[inner]
    text = [torch.randperm(94, generator=torch.Generator().manual_seed(row)) + 3 for row in range(2)]
    ids, mask = left_pad([text[0][:40], text[1][:23]])
    after = torch.stack([text[0][40:46], text[1][23:29]])
    mine = CLACache(model, factor=2, inner=inner, **options)
    assert isinstance(mine, kvsparse_hf.get_method(inner)) and mine.method == "cla"
    assert [layer.layer_idx for layer in mine.sparse_layers] == [0, 2]
    prefill(model, mine, ids, mask)
    got = decode(model, mine, after, mask)
    for row, length in enumerate((40, 23)):
        alone = CLACache(model, factor=2, inner=inner, **options)
        prefill(model, alone, text[row][None, :length])
        torch.testing.assert_close(got[row : row + 1], decode(model, alone, after[row : row + 1]), atol=5e-5, rtol=0)
        assert [layer[row] for layer in kept_in_all_layers(mine)] == [layer[0] for layer in kept_in_all_layers(alone)]
    assert all(layer.forward is None and not layer._gathered for layer in mine.sparse_layers)


def test_methods_that_take_no_map_say_so():
    others = set(list_methods()) - set(OWN_OPTIONS) - {"cla", "yoco", "kvsharer"}
    for inner in others:
        model = _model()
        try:
            CLACache(model, factor=2, inner=inner)
        except UnsupportedOperationError as error:
            assert "share" in str(error)
            assert model.config._attn_implementation == "sdpa"
        CLACache(model, factor=1, inner=inner)


def test_kvzip_is_judged_by_all_readers():
    """The compressed prompt keeps the budget, and what it needs is the largest attention of any of the layers."""
    model, ids = _model(), tokens(40)
    mine = CLACache(model, factor=2, inner="kvzip", budget=0.5, sinks=2)
    mine.compress(model, ids)
    assert mine.report().kept == 20 and len(mine.report().layers) == 2
    decode(model, mine, tokens(4, seed=3))
    assert mine.report().seen == [44]


def test_a_byte_budget_counts_the_owners():
    model, ids = _model(), tokens(600)
    mine = CLACache(model, factor=2, inner="snapkv", budget="40KiB", window=4, reserve=1)
    plain = kvsparse_hf.SnapKVCache(model, budget="40KiB", window=4, reserve=1)
    for cache in (mine, plain):
        forward(model, ids, cache)
        assert 0.9 * 40960 <= cache.report().device_bytes - cache.report().reserve_bytes <= 40960 + 512
    assert abs(mine.report().kept - 2 * plain.report().kept) <= 2
