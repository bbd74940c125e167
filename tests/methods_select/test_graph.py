"""The graph index: true inner products, and what it finds among real keys for real queries."""

import copy
import pickle

import numpy as np
import pytest
import torch
from select_tools import call_of, chosen, make_query, make_store, ready, segment
from test_clusters import REAL

from kvsparse_hf.layers.selectors.graph import Graph, GraphSelector

faiss = pytest.importorskip("faiss")


@pytest.fixture(autouse=True)
def _one_thread():
    faiss.omp_set_num_threads(1)


def _numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape, dtype=np.float32)


def test_scores_are_the_true_inner_products():
    """Also of keys that came later, unless they are longer than the first ones."""
    keys, queries = _numbers(60, 8), _numbers(5, 8) + 3
    keys[40:] *= 0.5
    graph = Graph(keys[:40], 8, 64)
    graph.add(keys[40:])
    scores, entries = graph.search(queries, 10)
    np.testing.assert_allclose(scores, np.take_along_axis(queries @ keys.T, entries, axis=1), atol=1e-4)
    assert bool((np.diff(scores, axis=1) <= 1e-5).all()) and graph.size == 60


def test_copies_are_their_own():
    graph = Graph(_numbers(20, 4), 4, 16)
    for other in (copy.deepcopy(graph), pickle.loads(pickle.dumps(graph))):
        other.add(_numbers(5, 4))
        assert (graph.size, other.size) == (20, 25)


def test_an_exhaustive_search_is_exact_top_k():
    store = make_store([70, 30, 9, 3], page=1)
    selector = ready(GraphSelector(2, 3, "none", 8, 16, 128, False), store, 15)
    query, call = make_query(store), call_of(store)
    tokens = chosen(selector.select(query, store, call).pages)
    for row, length in enumerate([70, 30, 9, 3]):
        always = {t for t in range(length) if t < 2 or t >= max(length - 3, 2)}
        for head in range(store.heads):
            keys, _ = segment(store, row, head)
            for g in range(3):
                logits = keys @ query[row, head * 3 + g].double().numpy()
                between = sorted(set(range(2, max(length - 3, 2))), key=lambda t: -logits[t])[:10]
                assert set(tokens[row][head * 3 + g]) == always | set(between)


@pytest.mark.parametrize("by_queries, least", [(False, 0.8), (True, 0.8)])
def test_recall_on_real_keys(by_queries, least):
    """SmolLM2, layer 12: share of the exact top 30 that a search keeping 30 candidates finds, for queries it has not seen."""
    from safetensors.torch import load_file

    tensors = {name: tensor.float() for name, tensor in load_file(REAL).items()}
    store = make_store([1024], heads=3, dim=64, page=1)
    store.keys.view(3, -1, 64)[:, :1024] = tensors["keys"]
    seen, asked = tensors["queries"][:, :, ::2], tensors["queries"][:, :, 1::2]
    selector = GraphSelector(0, 1, "none", 1024, 32, 30, by_queries)
    selector.begin(1)
    selector.observe(seen, tensors["keys"].unsqueeze(0)[:, :, : seen.shape[2]], torch.tensor([0]))
    selector.set_budget(torch.tensor([31]), store.keys.device)
    selector.refresh(store, 0)
    found = []
    for at in range(asked.shape[2]):
        tokens = chosen(selector.select(asked[:, :, at], store, call_of(store)).pages)[0]
        for head, mine in enumerate(tokens):
            true = (tensors["keys"][head // 3, :1023] @ asked[0, head, at]).topk(30).indices.tolist()
            found.append(len(set(mine) & set(true)) / 30)
    assert sum(found) / len(found) > least
