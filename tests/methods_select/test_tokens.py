"""Loki, SparQ and the flat index, against brute force."""

import numpy as np
import pytest
import torch
from select_tools import (
    EDGES,
    attend,
    call_of,
    chosen,
    make_query,
    make_store,
    ready,
    segment,
    softmax,
    step,
    token_choice,
)

from kvsparse_hf.layers.selectors.tokens import ChannelSelector, LowRankSelector, TokenSelector
from kvsparse_hf.policy.basis import components_of, key_covariance
from kvsparse_hf.policy.reading import merge_partials, top_ragged


def _grouped(query, store):
    return query.view(store.batch, store.heads, -1, query.shape[-1]).double().numpy()


@pytest.mark.parametrize("reduce", ["softmax_mean", "max", "mean", "none"])
@pytest.mark.parametrize("sinks, recent, budget", [(0, 1, 2), (2, 3, 12), (4, 16, 40), (0, 1, 1000)])
def test_flat_is_exact_top_k(reduce, sinks, recent, budget):
    store = make_store(EDGES, page=1)
    selector = ready(TokenSelector(sinks, recent, reduce), store, budget)
    query, call = make_query(store), call_of(store)
    tokens = chosen(selector.select(query, store, call).pages)
    for row in range(store.batch):
        expected = []
        for head in range(store.heads):
            keys, _ = segment(store, row, head)
            logits = _grouped(query, store)[row, head] @ keys.T * call.scale
            expected += token_choice(logits, sinks, recent, reduce, budget)
        assert tokens[row] == expected


def _loki(store, components, basis=None, budget=12):
    """A selector that saw the store's own keys, and the store with its keys turned."""
    selector = LowRankSelector(0, 1, "softmax_mean", components, basis)
    selector.begin(store.batch)
    keys = store.keys.view(store.batch, store.heads, store.max_capacity, -1)
    longest = max(EDGES)
    padded = torch.stack([torch.roll(k[:, :longest], longest - n, dims=1) for k, n in zip(keys, EDGES, strict=True)])
    selector.observe(make_query(store).unsqueeze(2), padded, longest - torch.tensor(EDGES))
    selector.set_budget(torch.full((store.batch,), budget), keys.device)
    store.keys.copy_(selector.enter(keys).flatten(0, 2))
    return selector


def test_loki_with_all_components_is_exact_top_k():
    store = make_store(EDGES, page=1)
    flat = ready(TokenSelector(0, 1, "softmax_mean"), store, 12)
    query, call = make_query(store), call_of(store)
    expected, out = chosen(flat.select(query, store, call).pages), step(flat, store, query, call)
    loki = _loki(store, store.keys.shape[-1])
    assert chosen(loki.select(loki.enter(query), store, call).pages) == expected
    torch.testing.assert_close(step(loki, store, loki.enter(query), call), out)


def test_loki_ranks_by_leading_components():
    store = make_store(EDGES, page=1)
    raw = [[segment(store, row, head)[0] for head in range(store.heads)] for row in range(store.batch)]
    loki = _loki(store, 3)
    query, call = make_query(store), call_of(store)
    tokens = chosen(loki.select(loki.enter(query), store, call).pages)
    for row in range(store.batch):
        for head in range(store.heads):
            keys = raw[row][head]
            centred = keys - keys.mean(0)
            prior = 0.1 * 8 / len(keys) * np.square(keys).mean() * np.diag(np.linspace(1, 0.5, 8))
            vectors = np.linalg.eigh(centred.T @ centred / len(keys) + prior)[1][:, ::-1][:, :3]
            logits = (_grouped(query, store)[row, head] @ vectors) @ (keys @ vectors).T * call.scale
            assert tokens[row][head] == token_choice(logits, 0, 1, "softmax_mean", 12)[0]


def test_basis_is_orthonormal_and_sorted():
    keys = torch.randn(2, 5000, 8) * torch.arange(8, 0, -1)
    basis, variance = components_of(key_covariance(keys))
    torch.testing.assert_close(basis.transpose(1, 2) @ basis, torch.eye(8).expand(2, 8, 8), atol=1e-5, rtol=0)
    assert bool((variance.diff(dim=-1) <= 0).all())
    turned = (keys - keys.mean(1, keepdim=True)) @ basis
    torch.testing.assert_close(turned.square().mean(1), variance, rtol=1e-3, atol=1e-2)
    assert components_of(key_covariance(torch.ones(1, 1, 4)))[0].isfinite().all()


@pytest.mark.parametrize("channel_major", [False, True])
@pytest.mark.parametrize("reduce", ["sum", "softmax_mean"])
@pytest.mark.parametrize("recent, budget", [(1, 3), (4, 12), (4, 1000)])
def test_sparq_equals_the_maths(channel_major, reduce, recent, budget):
    store = make_store(EDGES, page=1)
    selector = ready(ChannelSelector(0, recent, reduce, 3, channel_major), store, budget)
    query, call = make_query(store), call_of(store)
    out = step(selector, store, query, call).view(store.batch, store.heads, -1, 8)
    tokens = chosen(selector.select(query, store, call).pages)
    for row in range(store.batch):
        for head in range(store.heads):
            keys, values = segment(store, row, head)
            group = _grouped(query, store)[row, head]
            channels = np.argsort(-np.abs(group).sum(0), kind="stable")[:3]
            tau = np.sqrt(8 * np.abs(group[:, channels]).sum(1) / np.abs(group).sum(1))
            logits = group[:, channels] @ keys[:, channels].T / tau[:, None]
            picked = token_choice(logits, 0, recent, reduce, budget)[0]
            assert tokens[row][head] == picked
            for g, q in enumerate(group):
                share = softmax(logits[g])[picked].sum()
                expected = share * attend(q, keys[picked], values[picked], call.scale) + (1 - share) * values.mean(0)
                np.testing.assert_allclose(out[row, head, g].numpy(), expected, atol=1e-5)


def test_sparq_follows_appends():
    """Mean value and channel-major copy after appends equal those built from scratch."""
    from kvsparse_hf import ops

    store = make_store([5, 9], page=16)
    selector = ready(ChannelSelector(0, 1, "sum", 3, True), store, 4)
    for at in range(6):
        key, value = torch.randn(2, 2, 2, 8, generator=torch.Generator().manual_seed(at))
        ops.store_token(store.keys, store.values, store.positions, key, value, store.length[:, 0].clone(), store.start,
                        store.capacity, store.length, store.pinned, store.cursor)
        selector.appended(store, key, value)
    rebuilt = ready(ChannelSelector(0, 1, "sum", 3, True), store, 4)
    torch.testing.assert_close(selector.value_sum, rebuilt.value_sum, rtol=1e-12, atol=1e-12)
    filled = (torch.arange(store.max_capacity) < store.length.unsqueeze(-1)).unsqueeze(2).expand_as(selector.key_channels)
    assert torch.equal(selector.key_channels[filled], rebuilt.key_channels[filled])


def test_learned_sink_takes_its_share():
    """With everything read SparQ is exact, also beside an extra logit in the denominator (gpt-oss)."""
    store = make_store([20, 7], page=1)
    sinks = torch.linspace(-1, 2, 6)
    query, call = make_query(store), call_of(store, sinks=sinks)
    exact = step(ready(TokenSelector(0, 1, "max"), store, 1000), store, query, call)
    torch.testing.assert_close(step(ready(ChannelSelector(0, 1, "sum", 3), store, 1000), store, query, call), exact)


def test_merge_of_partial_attentions_is_attention_over_the_union():
    generator = torch.Generator().manual_seed(3)
    query, keys, values = (torch.randn(2, 3, n, 8, generator=generator, dtype=torch.float64) for n in (1, 40, 40))

    def partial(part):
        logits = (query @ keys[:, :, part].transpose(-1, -2)).squeeze(2) * 9
        return (logits.softmax(-1).unsqueeze(2) @ values[:, :, part]).squeeze(2), logits.logsumexp(-1)

    parts = [partial(slice(*ends)) for ends in ((0, 1), (1, 17), (17, 40))]
    empty = (torch.zeros(2, 3, 8, dtype=torch.float64), torch.full((2, 3), float("-inf"), dtype=torch.float64))
    outs, lses = zip(*parts, empty, strict=True)
    torch.testing.assert_close(merge_partials(list(outs), list(lses)), partial(slice(0, 40))[0])
    assert torch.equal(merge_partials([empty[0]] * 2, [empty[1]] * 2), empty[0])


def test_top_ragged():
    scores = torch.tensor([[[3.0, 1.0, 3.0, float("inf"), float("-inf")]], [[3.0, 1.0, 3.0, float("inf"), float("-inf")]]])
    out = top_ragged(scores, 4, torch.tensor([2, 9], dtype=torch.int32))
    assert out.tolist() == [[[0, 3, -1, -1]], [[0, 1, 2, 3]]]
