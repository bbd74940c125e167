"""Public reports on caches that no other test holds (see `bug_reports.py`)."""

import weakref

import pytest
import torch
from helpers import CACHE, decode, forward, generate, kept_in_all_layers, left_pad, prefill, tokens
from methods import BUDGET, CORE, EVICTING, METHODS
from tiny_models import NEVER, build

from kvsparse_hf import BudgetError, FullCache, SnapKVCache, StreamingLLMCache
from kvsparse_hf.bench.decode import GRID

by_method = pytest.mark.parametrize("case", METHODS, ids=lambda case: case.id)
by_core = pytest.mark.parametrize("case", CORE, ids=lambda case: case.id)
evicting = pytest.mark.parametrize("case", EVICTING, ids=lambda case: case.id)


@by_core
def test_one_prefix_goes_on_with_several_suffixes(case):
    """A prompt read once, repeated over a batch, continued differently in each row: what each row alone would give."""
    model = build()
    prefix, suffixes = tokens(30), tokens(5, 3, seed=8)
    together = case.make(model)
    prefill(model, together, prefix)
    together.batch_repeat_interleave(3)
    out = forward(model, suffixes, together)
    for row in range(3):
        alone = case.make(model)
        prefill(model, alone, prefix)
        torch.testing.assert_close(
            out[row : row + 1], forward(model, suffixes[row : row + 1], alone), atol=1e-5, rtol=0
        )


@by_method
@pytest.mark.parametrize("chunk", [30, 999_999])
def test_a_chunk_larger_than_the_prompt_is_the_prompt(case, chunk):
    model = build()
    whole = generate(model, tokens(30), case.make(model), 6)
    assert torch.equal(generate(model, tokens(30), case.make(model), 6, prefill_chunk_size=chunk), whole)


@evicting
@pytest.mark.parametrize("length", [1, 2, 3])
@pytest.mark.parametrize("share", [0.1, 0.4])
def test_shares_of_tiny_prompts_keep_at_least_one(case, length, share):
    """Or the share is refused with an error, where more must always stay than it is."""
    model = build()
    mine = case.make(model, share)
    try:
        logits = prefill(model, mine, tokens(length))
    except BudgetError:
        return
    assert all(head for layer in kept_in_all_layers(mine) for row in layer for head in row)
    assert bool(logits.isfinite().all()) and bool(decode(model, mine, tokens(5, seed=3)).isfinite().all())


@evicting
def test_a_tenth_of_a_hundred_is_ten(case):
    model = build()
    mine = case.make(model, 0.1)
    prefill(model, mine, tokens(100))
    assert case.held(mine) == {10}


@evicting
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_stays_finite_after_eviction(case, dtype):
    model = build(dtype=dtype)
    mine = case.make(model)
    ids, mask = left_pad([tokens(40, seed=1), tokens(10, seed=2)])
    assert bool(prefill(model, mine, ids, mask).isfinite().all())
    assert bool(decode(model, mine, tokens(20, 2, seed=3), mask).isfinite().all())


def _window_choice(weights, heads: int, window: int, budget: int) -> list[list[int]]:
    """SnapKV's choice from a layer's own attention weights `[Hq, N, N]`: mean over the group, maximum over three neighbours."""
    total = weights.shape[-1]
    received = weights[:, -window:, : total - window].sum(1).unflatten(0, (heads, -1)).mean(1)
    pooled = torch.nn.functional.max_pool1d(received.unsqueeze(1), 3, stride=1, padding=1).squeeze(1)
    best = pooled.sort(dim=-1, descending=True, stable=True).indices[:, : budget - window]
    return [sorted(row) + list(range(total - window, total)) for row in best.tolist()]


@pytest.mark.parametrize(
    "family", ["llama-gqa2", "llama-mqa8", "qwen3", "qwen3-moe", "mixtral", "phi3-partial", "gpt-neox"]
)
def test_scores_are_the_models_own_attention(family):
    """Norms of queries and keys, fused projections, partial rotary: what scores is what the model attends with."""
    model = build(family, "eager")
    weights = model(tokens(40), output_attentions=True).attentions
    mine = SnapKVCache(model, budget=BUDGET, window=4, kernel=3)
    prefill(model, mine, tokens(40))
    for layer, held in enumerate(kept_in_all_layers(mine)):
        assert held[0] == _window_choice(weights[layer][0], len(held[0]), 4, BUDGET)


def test_sinks_stay_through_a_hundred_steps():
    model = build()
    mine = StreamingLLMCache(model, budget=32, sinks=4)
    generate(model, tokens(60), mine, 101)
    assert all(
        head == [0, 1, 2, 3, *range(132, 160)] for layer in kept_in_all_layers(mine) for row in layer for head in row
    )


def test_an_assistant_gets_a_cache_of_its_own():
    """Ours belongs to the main model alone, and to the layers of that model."""
    model, assistant = build(), build("llama-mha", seed=3)
    ids = tokens(12).repeat(1, 3)
    mine = FullCache(model)
    got = generate(model, ids, mine, 20, assistant_model=assistant)
    assert torch.equal(got, generate(model, ids, None, 20))
    # The last token is never fed; drafts that were turned down have been taken back.
    assert 36 + 19 <= mine.report().seen[0] <= 36 + 20
    assert all(
        len(head) == mine.report().seen[0] for layer in kept_in_all_layers(mine) for row in layer for head in row
    )


@by_core
def test_nothing_recomputes_when_no_token_is_new(case):
    """The boundary token is fed once: the cache has seen every token of the text but the last one."""
    model = build()
    mine = case.make(model)
    answer = generate(model, tokens(30), mine, 6)
    lengths = []
    hook = model.model.embed_tokens.register_forward_pre_hook(lambda module, args: lengths.append(args[0].shape[1]))
    generate(model, torch.cat((tokens(30), answer, tokens(5, seed=4)), dim=1), mine, 2)
    hook.remove()
    assert lengths == [6, 1]  # the last generated token and five new ones, then one by one


def test_every_benchmark_row_says_what_ran():
    for case in GRID:
        system, how = case.name.split("/")
        assert how.startswith(("fast_decode", "generate", "eager", "compiled")) and system


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@by_core
def test_layers_on_two_devices(case):
    """Every tensor of a layer is where the layer computes, also after rows moved and a file; the text is that of one device."""
    accelerate = pytest.importorskip("accelerate")
    model = build(num_hidden_layers=4, eos_token_id=NEVER).cuda(0)
    ids = tokens(40).cuda(0)
    expected = generate(model, ids, case.make(model), 20, disable_compile=True)
    names = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.norm": 1, "lm_head": 1}
    split = accelerate.dispatch_model(model, {**names, **{f"model.layers.{index}": index // 2 for index in range(4)}})
    mine = case.make(split)
    got = generate(split, ids, mine, 20, disable_compile=True)
    assert torch.equal(got.cpu(), expected.cpu())
    mine.reorder_cache(torch.tensor([0]))
    for index, layer in enumerate(mine.sparse_layers):
        where = {
            tensor.device.index for name, tensor in layer.tensors().items() if tensor.is_cuda and "host" not in name
        }
        assert where == {index // 2}


@by_core
def test_outputs_name_the_cache_that_was_passed(case):
    """And nothing else keeps it: once it is dropped, its tensors are gone."""

    model = build()
    out = generate(model, tokens(20), case.make(model), 3, return_dict_in_generate=True)
    alive = weakref.ref(out[CACHE].sparse_layers[0].stores[0])
    del out
    assert alive() is None
