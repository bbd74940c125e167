"""Inside `generate()`: compiled equals eager in one graph, and every copy goes on the same."""

import copy

import pytest
import torch
from head_cases import CASES, make, start
from helpers import decode, generate, left_pad, tokens
from tiny_models import build
from torch._dynamo.utils import counters
from transformers import CompileConfig

from kvsparse_hf import SparseCache, fast_decode
from kvsparse_hf.hf.compat import CACHE_ARGUMENT

by_case = pytest.mark.parametrize("name", CASES)


@pytest.fixture(scope="module")
def model():
    return build(num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4)


def prompts():
    return left_pad([tokens(60), tokens(45, seed=2), tokens(9, seed=3)])


@pytest.mark.slow  # conformance compiles every method, with other budgets
@by_case
def test_compiled_equals_eager_without_recompiling(model, name):
    ids, mask = prompts()
    # KVzip's prompt is compressed before `generate()`, which then needs a token to feed.
    more, full = ids, mask
    if name == "kvzip":
        more = torch.cat((ids, tokens(2, 3, seed=8)), 1)
        full = torch.cat((mask, mask.new_ones(3, 2)), 1)

    def run(**options):
        cache = start(name, model, ids, mask) if name == "kvzip" else make(name, model)
        return generate(model, more, cache, 40, attention_mask=full, **options)

    eager = run()
    config = CompileConfig(fullgraph=True, backend="eager", mode=None)
    config._compile_all_devices = True
    torch._dynamo.reset()
    counters.clear()
    assert torch.equal(run(compile_config=config), eager)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    torch._dynamo.reset()


@by_case
def test_every_copy_goes_on_the_same(model, name, tmp_path):
    """Saved and loaded, deep-copied, rows repeated, chosen and reordered (as beams are): all state travels."""
    ids, mask = prompts()
    cache = start(name, model, ids, mask)
    first, after = tokens(14, 3, seed=4), tokens(20, 3, seed=5)
    decode(model, cache, first, mask)
    mask = torch.cat((mask, mask.new_ones(3, 14)), 1)
    cache.save(tmp_path)
    loaded, forked = SparseCache.load(tmp_path, model), copy.deepcopy(cache)
    order = torch.tensor([2, 0, 1])
    swapped, chosen, repeated = (copy.deepcopy(cache) for _ in range(3))
    swapped.reorder_cache(order)
    chosen.batch_select_indices(torch.tensor([1]))
    repeated.batch_repeat_interleave(2)
    want = decode(model, cache, after, mask)
    assert torch.equal(decode(model, loaded, after, mask), want)
    assert torch.equal(decode(model, forked, after, mask), want)
    torch.testing.assert_close(decode(model, swapped, after[order], mask[order]), want[order], atol=2e-5, rtol=0)
    torch.testing.assert_close(decode(model, chosen, after[1:2], mask[1:2]), want[1:2], atol=2e-5, rtol=0)
    twice = [x.repeat_interleave(2, 0) for x in (after, mask, want)]
    torch.testing.assert_close(decode(model, repeated, twice[0], twice[1]), twice[2], atol=2e-5, rtol=0)


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("kvzip",)])
def test_beams_and_padded_rows(model, name):
    ids, mask = prompts()
    both = generate(model, ids, make(name, model), 12, attention_mask=mask, num_beams=3)
    alone = generate(model, ids[1:2, 15:], make(name, model), 12, num_beams=3)
    assert torch.equal(both[1:2], alone)


@pytest.mark.parametrize("name", ["adakv", "duo-attention", "moa"])
def test_fast_decode(model, name):
    ids, mask = prompts()
    want = generate(model, ids, make(name, model), 30, attention_mask=mask)
    got = model.generate(
        ids, attention_mask=mask, do_sample=False, max_new_tokens=30, min_new_tokens=30, custom_generate=fast_decode,
        **{CACHE_ARGUMENT: make(name, model)},
    )  # fmt: skip
    assert torch.equal(got[:, ids.shape[1] :], want)
