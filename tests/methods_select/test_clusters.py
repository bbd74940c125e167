"""The clustered index: k-means, bounded groups, the step against brute force, and what the estimate is worth on real keys."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from select_tools import call_of, chosen, make_query, make_store, ready, segment, softmax, step

from kvsparse_hf.layers.selectors.clusters import ClusterSelector
from kvsparse_hf.policy.basis import query_metric
from kvsparse_hf.policy.clusters import group_tokens, groups_for, kmeans, nearest

REAL = Path(__file__).parent / "data" / "smollm2_layer12.safetensors"


def _selector(sinks=2, recent=3, reduce="softmax_mean", every=8, per_cluster=4, segment=64, estimate=0.4, by_queries=False):
    return ClusterSelector(sinks, recent, reduce, every, per_cluster, segment, estimate, by_queries)


def test_kmeans_finds_separated_clusters():
    centres = torch.eye(4, 8) * 10
    label = torch.arange(40) % 4
    points = centres[label] + torch.randn(40, 8, generator=torch.Generator().manual_seed(0)) * 0.1
    for spherical in (True, False):
        assigned = kmeans(points.unsqueeze(0), 4, spherical=spherical)[0]
        assert all(len(set(assigned[label == c].tolist())) == 1 for c in range(4))
        assert len(set(assigned.tolist())) == 4


def test_nearest_is_nearest():
    points, centres = torch.randn(2, 30, 5), torch.randn(2, 7, 5)
    assert torch.equal(nearest(points, centres, spherical=False), torch.cdist(points, centres).argmin(-1))


@settings(max_examples=60, deadline=None)
@given(tokens=st.integers(1, 90), per_cluster=st.integers(1, 8), most=st.integers(1, 12), seed=st.integers(0, 1000))
def test_groups_partition_the_tokens(tokens, per_cluster, most, seed):
    generator = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, tokens, 4, generator=generator), torch.randn(2, tokens, 3, generator=generator)
    clusters, groups = groups_for(tokens, per_cluster, most)
    assigned = torch.randint(0, clusters, (2, tokens), generator=generator)
    made = group_tokens(keys, values, assigned, most, groups)
    for head in range(2):
        assert sorted(made.order[head].tolist()) == list(range(tokens))
        assert int(made.size[head].sum()) == tokens and int(made.size[head].max()) <= most
        first = 0
        for group, size in enumerate(made.size[head].tolist()):
            members = made.order[head, first:first + size]
            first += size
            if size:
                assert len(set(assigned[head, members].tolist())) == 1
                torch.testing.assert_close(made.centroid[head, group], keys[head, members].mean(0), atol=1e-5, rtol=1e-5)
                torch.testing.assert_close(made.mean_value[head, group], values[head, members].mean(0), atol=1e-5, rtol=1e-5)


def test_query_metric_measures_logit_differences():
    queries, keys = torch.randn(1, 500, 6) * torch.arange(1, 7), torch.randn(1, 2, 6)
    root = query_metric(queries)
    difference = keys[:, 0] - keys[:, 1]
    expected = (queries @ difference.unsqueeze(-1)).square().mean()
    assert float((difference @ root[0]).square().sum()) == pytest.approx(float(expected), rel=0.05)


@pytest.mark.parametrize("reduce", ["softmax_mean", "max", "none"])
@pytest.mark.parametrize("estimate", [0.0, 0.3, 1.0])
def test_step_equals_the_maths(reduce, estimate):
    """Whole groups in order of their score while they fit, the next ones by their means, all in one softmax."""
    lengths, budget = [100, 40, 12, 5, 1], 5 + 20
    store = make_store(lengths, page=1, scale=2.0)
    selector = ready(_selector(reduce=reduce, estimate=estimate), store, budget)
    query, call = make_query(store), call_of(store)
    out = step(selector, store, query, call).view(store.batch, store.heads, -1, 8)
    tokens = chosen(selector.select(query, store, call).pages)
    grouped = query.view(store.batch, store.heads, -1, 8).double().numpy()
    for row, length in enumerate(lengths):
        always = [t for t in range(length) if t < 2 or t >= max(length - 3, 2)]
        for head in range(store.heads):
            keys, values = segment(store, row, head)
            groups = _groups_of(selector, row, head)
            centroids = np.array([keys[g].mean(0) for g in groups]).reshape(-1, 8)
            logits = grouped[row, head] @ centroids.T * call.scale
            for g, q in enumerate(grouped[row, head]):
                scores = _group_scores(logits, g, reduce)
                order = sorted(range(len(groups)), key=lambda m: -scores[m])
                ends = np.cumsum([len(groups[m]) for m in order])
                read = [m for m, end in zip(order, ends, strict=True) if end <= 20]
                means = order[len(read):len(read) + math.ceil(estimate * len(groups))]
                exact = sorted([*always, *(t for m in read for t in groups[m])])
                reader = head * 3 + g if reduce == "none" else head
                assert sorted(tokens[row][reader]) == exact
                weight = np.concatenate([keys[exact] @ q * call.scale, logits[g, means] + np.log([len(groups[m]) for m in means])])
                what = np.concatenate([values[exact], np.array([values[groups[m]].mean(0) for m in means]).reshape(-1, 8)])
                np.testing.assert_allclose(out[row, head, g].numpy(), softmax(weight) @ what, atol=2e-5)


def _groups_of(selector, row, head) -> list[list[int]]:
    table = zip(selector.first[row, head].tolist(), selector.size[row, head].tolist(), strict=True)
    members = selector.members[row, head].tolist()
    return [members[first:first + size] for first, size in table if size]


def _group_scores(logits: np.ndarray, g: int, reduce: str) -> np.ndarray:
    if reduce == "none" or logits.shape[1] == 0:
        return logits[g]
    return logits.max(0) if reduce == "max" else np.mean([softmax(row) for row in logits], axis=0)


def test_index_covers_what_is_neither_sink_nor_recent():
    store = make_store([100, 40, 12, 5, 1], page=1)
    selector = ready(_selector(segment=64), store, 30)
    for row, length in enumerate([100, 40, 12, 5, 1]):
        for head in range(store.heads):
            held = sorted(t for group in _groups_of(selector, row, head) for t in group)
            assert held == list(range(2, max(length - 3, 2)))


def test_decoded_tokens_enter_in_lots():
    """Between two lots they are read exactly; the lot then is indexed, in place."""
    store = make_store([40, 20], page=64)
    store.keys.nan_to_num_()
    store.values.nan_to_num_()
    selector = ready(_selector(every=8), store, 30)
    address, ends = selector.centroid.data_ptr(), selector.indexed.tolist()
    assert ends == [37, 17] and selector.due_in(store) == 8
    for _ in range(8):
        store.length += 1
        read = chosen(selector.select(make_query(store), store, call_of(store)).pages)[0][0]
        assert set(range(37, int(store.length[0, 0]))) <= set(read)
    assert selector.due_in(store) == 0
    assert selector.maintain(store) is False
    assert selector.indexed.tolist() == [45, 25] and selector.due_in(store) == 8 and selector.centroid.data_ptr() == address
    held = sorted(t for group in _groups_of(selector, 0, 1) for t in group)
    assert held == list(range(2, 45))


def test_crop_into_the_index_rebuilds_it():
    store = make_store([60, 50], page=1)
    selector = ready(_selector(), store, 30)
    store.length.copy_(store.length - 20)
    selector.refresh(store, 30)
    rebuilt = ready(_selector(), store, 30)
    assert torch.equal(selector.indexed, rebuilt.indexed) and torch.equal(selector.size, rebuilt.size)
    assert torch.equal(selector.first[selector.size > 0], rebuilt.first[rebuilt.size > 0])
    query, call = make_query(store), call_of(store)
    torch.testing.assert_close(step(selector, store, query, call), step(rebuilt, store, query, call))


# --- real keys ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real():
    """SmolLM2-135M-Instruct, layer 12, on a page of Moby Dick: keys, values `[3, 1024, 64]` before the last 32 queries."""
    tensors = {name: tensor.float() for name, tensor in load_file(REAL).items()}
    store = make_store([tensors["keys"].shape[1]], heads=3, dim=64, page=1)
    width = store.max_capacity
    store.keys.view(3, width, 64)[:, :-3] = tensors["keys"]
    store.values.view(3, width, 64)[:, :-3] = tensors["values"]
    return store, tensors["queries"]


@pytest.mark.parametrize("by_queries", [False, True])
@pytest.mark.parametrize("budget", [64, 256])
def test_estimating_is_better_than_dropping_on_real_keys(real, by_queries, budget):
    """Mean error of the attention output, against dense, over heads and queries: the estimate takes off a good part."""
    store, queries = real
    error = {}
    for estimate in (0.0, 0.232):
        selector = _selector(4, 16, "softmax_mean", 1024, 16, 8192, estimate, by_queries)
        selector.begin(1)
        selector.observe(queries, store.keys.view(1, 3, -1, 64)[:, :, :queries.shape[2]], torch.tensor([0]))
        selector.set_budget(torch.tensor([budget]), store.keys.device)
        selector.refresh(store, 0)
        error[estimate] = _mean_error(selector, store, queries)
    assert error[0.232] < 0.9 * error[0.0]


def _mean_error(selector, store, queries) -> float:
    from kvsparse_hf import ops

    call, errors = call_of(store), []
    for at in range(queries.shape[2]):
        query = queries[:, :, at]
        dense, _, _ = ops.decode_attention(query, store.keys, store.values, store.start, store.length,
                                           max_len=store.max_capacity, scale=call.scale)
        errors.append((step(selector, store, query, call) - dense).norm(dim=-1) / dense.norm(dim=-1))
    return float(torch.stack(errors).mean())
