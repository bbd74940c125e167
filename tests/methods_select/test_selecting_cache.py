"""Selecting caches on a model: metadata through every operation, graphs, drafts, turns, bytes."""

import copy

import pytest
import torch
from helpers import decode, dense, forward, generate, left_pad, prefill, tokens
from tiny_models import build
from torch._dynamo.utils import counters
from transformers import CompileConfig

from kvsparse_hf import LokiCache, QuestCache, RetrievalAttentionCache, SparQCache
from kvsparse_hf.layers.selecting import SelectingLayer
from kvsparse_hf.layers.selectors.base import dense_view
from kvsparse_hf.layers.selectors.clusters import ClusterSelector
from kvsparse_hf.layers.selectors.pages import PageSelector
from kvsparse_hf.layers.selectors.tokens import ChannelSelector

_ZONES = dict(sinks=2, recent=4, update_every=8, per_cluster=2, segment=64)
MAKE = {
    "quest": lambda model, **o: QuestCache(model, **{"page_size": 4, "sinks": 4, "recent": 1, "dense_layers": 0, **o}),
    "loki": lambda model, **o: LokiCache(model, **{"d_f": 0.5, **o}),
    "sparq": lambda model, **o: SparQCache(model, **{"channels": 4, "recent": 4, "channel_major": True, **o}),
    "flat": lambda model, **o: RetrievalAttentionCache(model, **{**_ZONES, "index": "flat", **o}),
    "ivf": lambda model, **o: RetrievalAttentionCache(model, **{**_ZONES, **o}),
    "ivf-queries": lambda model, **o: RetrievalAttentionCache(model, **{**_ZONES, "train_on": "queries", **o}),
    "hnsw": lambda model, **o: RetrievalAttentionCache(model, **{**_ZONES, "index": "hnsw", "links": 4, "effort": 32, **o}),
}
every = pytest.mark.parametrize("name", MAKE)
static = pytest.mark.parametrize("name", [name for name in MAKE if name != "hnsw"])


@pytest.fixture(autouse=True)
def _needs_faiss(request):
    if "hnsw" in request.node.name:
        pytest.importorskip("faiss").omp_set_num_threads(1)


def check_metadata(cache) -> None:
    """What the selectors hold is what they would hold if built from the stored tokens now."""
    for layer in cache.sparse_layers:
        selector, store = layer.selector, layer.store
        lengths = store.length[:, 0].tolist()
        assert store.max_capacity % selector.page_size == 0
        if isinstance(selector, PageSelector):
            fresh = copy.deepcopy(selector)
            fresh.bounds.fill_(float("nan"))
            fresh.refresh(store, 0)
            for row, length in enumerate(lengths):
                pages = -(-length // selector.page_size)
                assert torch.equal(selector.bounds[row, :, :pages], fresh.bounds[row, :, :pages])
        elif isinstance(selector, ChannelSelector):
            fresh = copy.deepcopy(selector)
            fresh.refresh(store, 0)
            torch.testing.assert_close(selector.value_sum, fresh.value_sum, rtol=1e-12, atol=1e-12)
            for row, length in enumerate(lengths):
                assert torch.equal(selector.key_channels[row, ..., :length], fresh.key_channels[row, ..., :length])
        elif isinstance(selector, ClusterSelector):
            _check_groups(selector, store, lengths)


def _check_groups(selector, store, lengths) -> None:
    keys, values = dense_view(store, store.keys), dense_view(store, store.values)
    for row, length in enumerate(lengths):
        end = int(selector.indexed[row])
        assert selector.sinks <= end <= max(length - selector.recent, selector.sinks)
        assert int(selector.size[row].sum()) == store.heads * (end - selector.sinks)
        assert length - end <= selector.recent + selector.update_every
        for head in range(store.heads):
            held = []
            table = zip(selector.first[row, head].tolist(), selector.size[row, head].tolist(), strict=True)
            for group, (first, size) in enumerate(table):
                if size:
                    members = selector.members[row, head, first:first + size].long()
                    held += members.tolist()
                    torch.testing.assert_close(selector.centroid[row, head, group], keys[row, head, members].mean(0))
                    torch.testing.assert_close(selector.mean_value[row, head, group], values[row, head, members].mean(0))
            assert sorted(held) == list(range(selector.sinks, end))


def _started(name, model, lengths=(45, 30, 3), budget=16, **options):
    ids, mask = left_pad([tokens(n, seed=n) for n in lengths])
    cache = MAKE[name](model, budget=budget, **options)
    prefill(model, cache, ids, mask)
    return cache, mask


@every
def test_metadata_follows_everything(name, tmp_path):
    model = build(num_hidden_layers=1)
    cache, mask = _started(name, model, reserve=5)
    check_metadata(cache)
    for seed, steps in enumerate([1, 3, 4, 9, 14]):  # over page edges, lots, and the reserve
        mask = torch.cat((mask, mask.new_ones(len(mask), steps)), dim=1)
        decode(model, cache, tokens(steps, len(mask), seed=seed), mask[:, :-steps])
        check_metadata(cache)
    for removed in (1, 2, 5, 11):
        cache.crop(-removed)
        mask = mask[:, :-removed]
        check_metadata(cache)
    forward(model, tokens(7, 3), cache, attention_mask=torch.cat((mask, mask.new_ones(3, 7)), dim=1))
    mask = torch.cat((mask, mask.new_ones(3, 7)), dim=1)
    check_metadata(cache)
    for operation in (lambda c: c.reorder_cache(torch.tensor([2, 0, 0])), lambda c: c.batch_repeat_interleave(2),
                      lambda c: c.batch_select_indices(torch.tensor([3, 1]))):
        operation(cache)
        check_metadata(cache)
    cache.save(tmp_path)
    loaded = type(cache).load(tmp_path, model)
    check_metadata(loaded)
    for layer, other in zip(cache.sparse_layers, loaded.sparse_layers, strict=True):
        mine, theirs = layer.selector.tensors(), other.selector.tensors()
        assert mine.keys() == theirs.keys() and all(torch.equal(mine[key], theirs[key]) for key in mine)
    check_metadata(cache.fork())


@every
def test_rows_reordered_equal_rows_fed_so(name):
    """After a permutation with repeats each row goes on as the row it came from."""
    model = build()
    cache, mask = _started(name, model, lengths=(45, 30, 3))
    straight = cache.fork()
    order = torch.tensor([2, 0, 0])
    cache.reorder_cache(order)
    after = tokens(12, 3, seed=5)
    expected = decode(model, straight, after, mask)
    got = decode(model, cache, after[order], mask[order])
    torch.testing.assert_close(got, expected[order], atol=2e-5, rtol=0)


@static
def test_one_graph_for_500_steps(name):
    """Compiled equals eager, over hundreds of steps and dozens of index updates, with one graph; none more after `reset()`."""
    model = build(num_hidden_layers=1)
    ids, mask = left_pad([tokens(40), tokens(22, seed=2)])
    eager = generate(model, ids, MAKE[name](model, budget=16, reserve=512), 500, attention_mask=mask)
    torch._dynamo.reset()
    counters.clear()
    config = CompileConfig(fullgraph=True, backend="eager", mode=None)
    config._compile_all_devices = True
    cache = MAKE[name](model, budget=16, reserve=512)
    for _ in range(2):
        got = generate(model, ids, cache, 500, attention_mask=mask, compile_config=config)
        assert torch.equal(got, eager)
        assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
        cache.reset()


@every
def test_assisted_decoding_is_the_dense_model(name):
    """Drafts are verified densely, so what is generated does not depend on how they fall, nor on the budget."""
    model = build()
    ids = tokens(10).repeat(1, 5)
    got = generate(model, ids, MAKE[name](model, budget=16), 40, prompt_lookup_num_tokens=4)
    assert torch.equal(got, generate(model, ids, dense(model), 40))


@every
def test_a_second_turn_sees_everything(name):
    """Turns are read densely over all that was ever seen: nothing was evicted, whatever the first question selected."""
    model = build()
    mine, reference = MAKE[name](model, budget=16), dense(model)
    for cache in (mine, reference):
        forward(model, tokens(60), cache)
    torch.testing.assert_close(forward(model, tokens(9, seed=3), mine), forward(model, tokens(9, seed=3), reference),
                               atol=1e-5, rtol=0)
    assert mine.prefix_safe and mine.action == "skip" and mine.report().evicted == 0


@pytest.mark.parametrize("name", ["quest", "loki", "flat", "ivf"])
def test_query_heads_for_themselves(name):
    """With one query head per key/value head there is no group, and both modes choose alike."""
    model = build("llama-mha")
    out = [generate(model, tokens(50), MAKE[name](model, budget=16, per_query_head=own), 30) for own in (False, True)]
    assert torch.equal(*out)
    model = build("llama-gqa4")
    ample = generate(model, tokens(50), MAKE[name](model, budget=500, per_query_head=True), 30)
    assert torch.equal(ample, generate(model, tokens(50), dense(model), 30))


def test_dense_layers_read_everything():
    model = build(num_hidden_layers=3)
    cache = QuestCache(model, budget=64)
    assert [isinstance(layer, SelectingLayer) for layer in cache.sparse_layers] == [False, False, True]
    ids = tokens(30)
    ample = QuestCache(model, budget=500, page_size=16, reserve=8)
    assert torch.equal(generate(model, ids, ample, 50), generate(model, ids, dense(model), 50))
    every = QuestCache(model, budget=8, page_size=2, sinks=0, recent=1, dense_layers=3)
    assert torch.equal(generate(model, ids, every, 20), generate(model, ids, dense(model), 20))


@static
def test_report_states_what_a_step_reads(name):
    model = build(num_hidden_layers=1)
    options = {"dense_layers": 0} if name == "quest" else {}
    cache, _ = _started(name, model, lengths=(400,), budget=16, **options)
    report, layer = cache.report(), cache.sparse_layers[0]
    entry = 2 * 16 * 4  # key and value of one head in fp32
    read = int(layer.selector.entries_read(layer.store).sum()) * entry
    assert read <= (16 + 8) * 2 * entry
    assert report.read_bytes == read + layer.selector.bytes_read(layer.store, 2)
    metadata = sum(t.numel() * t.element_size() for t in layer.selector.tensors().values())
    kept = sum(t.numel() * t.element_size() for t in layer.store.tensors().values())
    assert report.device_bytes == metadata + kept
    if name != "flat":
        assert report.read_bytes < 0.6 * 400 * 2 * entry


def test_loki_turns_follow_the_basis():
    """Keys lie in the basis; a copy, a file and a crop keep it, and chunks of a prompt are read in it."""
    model = build()
    ids = tokens(50)
    whole = generate(model, ids, LokiCache(model, budget=500), 20)
    assert torch.equal(whole, generate(model, ids, LokiCache(model, budget=500), 20, prefill_chunk_size=7))
    cache = LokiCache(model, budget=500)
    forward(model, ids, cache)
    layer, reference = cache.sparse_layers[0], dense(model)
    forward(model, ids, reference)
    keys = dense_view(layer.store, layer.store.keys)[:, :, :50] @ layer.selector.basis.transpose(-1, -2)
    torch.testing.assert_close(keys, reference.layers[0].keys, atol=1e-5, rtol=0)
    forked = cache.fork()
    cache.reset()
    forward(model, tokens(50, seed=9), cache)  # another text: another basis, in place
    assert not torch.equal(cache.sparse_layers[0].selector.basis, forked.sparse_layers[0].selector.basis)


def test_hnsw_is_not_compiled_and_says_so():
    pytest.importorskip("faiss")
    model = build()
    cache = MAKE["hnsw"](model, budget=16)
    assert not cache.is_compileable and MAKE["ivf"](model, budget=16).is_compileable
    forward(model, tokens(40), cache)
    assert cache.report().host_bytes > 0
