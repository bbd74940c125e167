"""Inside `generate()`: compiled equals eager, one graph, the budget holds over 500 steps, and every copy goes on the same."""

import copy

import pytest
import torch
from token_driver import tiny_config
from torch._dynamo.utils import counters
from transformers import CompileConfig, LlamaForCausalLM

from kvsparse_hf import SparseCache, get_method
from kvsparse_hf.hf.compat import CACHE_ARGUMENT

CASES = {
    "h2o": ("h2o", dict()),
    "h2o-count": ("h2o", dict(normalize="count", decay=0.9, sinks=2, recent=4)),
    "tova": ("tova", dict()),
    "scissorhands": ("scissorhands", dict(recent=4, window=40)),
    "pyramidkv": ("pyramidkv", dict()),
    "pyramidkv-bounded": ("pyramidkv", dict(decode="bounded")),
    "pyramidkv-periodic": ("pyramidkv", dict(recompress_every=12)),
    "snapkv-periodic": ("snapkv", dict(window=8, recompress_every=12)),
    "keydiff": ("keydiff", dict(block=16)),
    "keydiff-bounded": ("keydiff", dict(decode="bounded")),
    "knorm-bounded": ("knorm", dict(decode="bounded")),
    "knorm-periodic": ("knorm", dict(recompress_every=9, skip_layers=[0])),
    "expected": ("expected-attention", dict(recompress_every=12, observed=16)),
    "rkv": ("rkv", dict(recompress_every=12)),
}
SLACK = {"pyramidkv-periodic": 12, "snapkv-periodic": 12, "knorm-periodic": 9, "expected": 12, "rkv": 12}


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return LlamaForCausalLM(tiny_config(4, 2, layers=2, initializer_range=0.3, eos_token_id=10**6, pad_token_id=0)).eval()


def padded():
    ids = torch.randint(1, 16, (2, 60), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[1, :48] = 0
    return ids, mask


def run(model, cache, ids, mask, new, **kwargs):
    return model.generate(
        ids, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, do_sample=False, **{CACHE_ARGUMENT: cache}, **kwargs
    )


@pytest.mark.slow  # conformance compiles every method, with other budgets
@pytest.mark.parametrize(
    "case", ["h2o-count", "tova", "scissorhands", "pyramidkv-bounded", "keydiff-bounded", "expected", "rkv", "snapkv-periodic"]
)
def test_compiled_equals_eager_without_recompiling(model, case):
    method, options = CASES[case]
    ids, mask = padded()
    eager = run(model, get_method(method)(model, budget=24, **options), ids, mask, 64)
    config = CompileConfig(fullgraph=True, backend="eager", mode=None)
    config._compile_all_devices = True
    torch._dynamo.reset()
    counters.clear()
    cache = get_method(method)(model, budget=24, **options)
    assert torch.equal(run(model, cache, ids, mask, 64, compile_config=config), eager)
    cache.reset()
    assert torch.equal(run(model, cache, ids, mask, 64, compile_config=config), eager)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    torch._dynamo.reset()


@pytest.mark.parametrize("case", CASES)
def test_padded_row_is_the_row_alone(model, case):
    """Also where it is close: in the first layer the keys of a repeated token are equally long but for rounding (Knorm)."""
    method, options = CASES[case]
    ids, mask = padded()
    both = run(model, get_method(method)(model, budget=24, **options), ids, mask, 60)
    alone = run(model, get_method(method)(model, budget=24, **options), ids[1:, 48:], mask[1:, 48:], 60)
    assert torch.equal(both[1:, 48:], alone)


@pytest.mark.parametrize(
    "case", ["h2o", "tova", "scissorhands", "pyramidkv-bounded", "pyramidkv-periodic", "keydiff-bounded", "knorm-periodic", "rkv"]
)
def test_500_steps_within_the_budget(model, case):
    method, options = CASES[case]
    cache = get_method(method)(model, budget=24, **options)
    ids = torch.randint(1, 16, (1, 540), generator=torch.Generator().manual_seed(3))
    model(ids[:, :40], **{CACHE_ARGUMENT: cache})
    layers = [layer for layer in cache.sparse_layers if layer.policy.budget is not None]
    limits = [int(layer._limit.max()) + SLACK.get(case, 0) for layer in layers]
    assert sum(limits) == len(layers) * (24 + SLACK.get(case, 0))
    addresses = [[t.data_ptr() for t in layer.tensors().values()] for layer in layers]
    moved = 0
    for t in range(40, 540):
        model(ids[:, t : t + 1], **{CACHE_ARGUMENT: cache})
        assert all(int(layer.store.length.max()) <= limit for layer, limit in zip(layers, limits, strict=True))
        now = [[t.data_ptr() for t in layer.tensors().values()] for layer in layers]
        moved += now != addresses
        addresses = now
    assert not moved
    assert int(cache.get_seq_length()) == 540


@pytest.mark.parametrize("case", CASES)
def test_every_copy_goes_on_the_same(model, case, tmp_path):
    """Saved and loaded, deep-copied, rows repeated, chosen and reordered: all state travels."""
    method, options = CASES[case]
    ids, mask = padded()
    ids = torch.cat((ids, torch.randint(1, 16, (2, 200), generator=torch.Generator().manual_seed(4))), 1)

    def feed(cache, first, last, rows):
        for t in range(first, last):
            seen = torch.cat((mask[rows], mask.new_ones(len(rows), t - 59)), 1)
            out = model(ids[rows, t : t + 1], attention_mask=seen, position_ids=seen.sum(1, keepdim=True) - 1,
                        **{CACHE_ARGUMENT: cache})  # fmt: skip
        return out.logits[:, -1]

    cache = get_method(method)(model, budget=24, **options)
    model(ids[:, :60], attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0), **{CACHE_ARGUMENT: cache})
    feed(cache, 60, 77, [0, 1])
    cache.save(tmp_path)
    loaded, forked = SparseCache.load(tmp_path, model), copy.deepcopy(cache)
    swapped, chosen, repeated = (copy.deepcopy(cache) for _ in range(3))
    swapped.reorder_cache(torch.tensor([1, 0]))
    chosen.batch_select_indices(torch.tensor([1]))
    repeated.batch_repeat_interleave(2)
    want = feed(cache, 77, 110, [0, 1])
    assert torch.equal(feed(loaded, 77, 110, [0, 1]), want)
    assert torch.equal(feed(forked, 77, 110, [0, 1]), want)
    assert torch.allclose(feed(swapped, 77, 110, [1, 0]), want.flip(0), atol=1e-5)
    assert torch.allclose(feed(chosen, 77, 110, [1]), want[1:], atol=1e-5)
    assert torch.allclose(feed(repeated, 77, 110, [0, 0, 1, 1]), want.repeat_interleave(2, 0), atol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_interleaved_caches_do_not_meet(model, case):
    method, options = CASES[case]
    ids = torch.randint(1, 16, (2, 120), generator=torch.Generator().manual_seed(5))
    alone = []
    for row in range(2):
        cache = get_method(method)(model, budget=24, **options)
        model(ids[row : row + 1, :50], **{CACHE_ARGUMENT: cache})
        alone.append([model(ids[row : row + 1, t : t + 1], **{CACHE_ARGUMENT: cache}).logits for t in range(50, 80)][-1])
    caches = [get_method(method)(model, budget=24, **options) for _ in range(2)]
    for row, cache in enumerate(caches):
        model(ids[row : row + 1, :50], **{CACHE_ARGUMENT: cache})
    for t in range(50, 80):
        out = [model(ids[row : row + 1, t : t + 1], **{CACHE_ARGUMENT: cache}).logits for row, cache in enumerate(caches)]
    assert all(torch.equal(mine, other) for mine, other in zip(out, alone, strict=True))
