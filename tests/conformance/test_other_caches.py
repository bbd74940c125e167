"""Whatever else runs on a model that has had our cache gives, bit for bit, what it gave before."""

import copy
import threading

import pytest
import torch
import transformers
from helpers import CACHE, decode, dense, forward, generate, left_pad, positions, prefill, tiny_tokenizer, tokens
from methods import ALL, BUDGET, CORE, by_all
from tiny_models import build, each_family
from transformers import StaticCache

import kvsparse_hf
from kvsparse_hf import KVSparseError, UnsupportedOperationError

by_core = pytest.mark.parametrize("case", CORE, ids=lambda case: case.id)
by_family = pytest.mark.parametrize("family, attention", each_family())


def _everything_else(model) -> list[torch.Tensor]:
    """Dense, static and no cache, padded and not, several turns, and the gradients of a training step."""
    ids, mask = left_pad([tokens(20), tokens(13, seed=2)])
    out = [forward(model, ids, attention_mask=mask, position_ids=positions(mask), use_cache=False)]
    out.append(forward(model, tokens(15), use_cache=True))
    for make in (dense, lambda model: StaticCache(config=model.config, max_cache_len=48)):
        cache = make(model)
        out += [prefill(model, cache, ids, mask), decode(model, cache, tokens(3, 2), mask)]
        grown = torch.cat((mask, mask.new_ones(2, 7)), dim=1)
        out.append(forward(model, tokens(4, 2), cache, attention_mask=grown, position_ids=positions(grown)[:, -4:]))
    out.append(generate(model, ids, None, 8, attention_mask=mask))
    with torch.enable_grad():
        model.train()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        model.eval()
    out += [weight.grad.clone() for weight in model.parameters() if weight.grad is not None]
    model.zero_grad()
    return out


def _same(left, right) -> bool:
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@by_family
def test_other_caches_are_untouched(family, attention):
    model = build(family, attention)
    before = _everything_else(model)
    mine = ALL["snapkv"].make(model)
    assert _same(_everything_else(model), before)
    generate(model, tokens(30), mine, 5)
    assert _same(_everything_else(model), before)
    kvsparse_hf.detach(model)
    assert model.config._attn_implementation == attention
    assert _same(_everything_else(model), before)


@by_core
def test_other_caches_between_our_steps(case):
    model = build()
    reference = dense(model)
    expected = [prefill(model, reference, tokens(25)), *(decode(model, reference, tokens(1, seed=s)) for s in range(10))]
    mine, alone, other = case.make(model), case.make(model), dense(model)
    out, ours = [], []
    for step in range(-1, 10):
        feed = (tokens(25),) if step < 0 else (tokens(1, seed=step),)
        ours.append(forward(model, feed[0], mine))
        out.append(forward(model, feed[0], other))
        forward(model, tokens(7, 3), use_cache=False)
    assert _same(out, expected)
    assert _same(ours, [prefill(model, alone, tokens(25)), *(decode(model, alone, tokens(1, seed=s)) for s in range(10))])


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_other_caches_from_another_thread(attention):
    model = build(attention=attention)
    before = _everything_else(model)[:-1]
    mine, results, stop = ALL["streaming"].make(model), [], threading.Event()

    def work():
        with torch.no_grad():
            while not stop.is_set():
                results.append(_everything_else_without_training(model))

    expected = _everything_else_without_training(model)
    thread = threading.Thread(target=work)
    thread.start()
    for _ in range(3):
        generate(model, tokens(30), mine, 20)
        mine.reset()
    stop.set()
    thread.join()
    assert results and all(_same(result, expected) for result in results)
    assert _same(_everything_else(model)[:-1], before)


def _everything_else_without_training(model):
    ids, mask = left_pad([tokens(20), tokens(13, seed=2)])
    cache = dense(model)
    return [forward(model, tokens(15), use_cache=False), prefill(model, cache, ids, mask), decode(model, cache, tokens(3, 2), mask)]


@pytest.mark.parametrize("left_over", ["update", "get_mask_sizes", "both", "failed-forward"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_an_interrupted_forward_leaves_nothing_behind(left_over, attention):
    """`update()` and `get_mask_sizes()` hand our layer to the functions that follow; if those never come, nobody else may take it."""
    model = build(attention=attention)
    before = _everything_else(model)
    mine = ALL["full"].make(model)
    forward(model, tokens(10), mine)
    if left_over in ("get_mask_sizes", "both"):
        mine.get_mask_sizes(1, 0)
    if left_over in ("update", "both"):
        mine.update(torch.randn(1, 2, 1, 16), torch.randn(1, 2, 1, 16), 0)
    if left_over == "failed-forward":
        handle = model.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            forward(model, tokens(1), mine)
        handle.remove()
    assert _same(_everything_else(model), before)


@by_core
def test_detach_and_attach_again(case):
    model = build(attention="eager")
    mine = case.make(model)
    expected = generate(model, tokens(30), mine, 8)
    kvsparse_hf.detach(model)
    kvsparse_hf.detach(model)
    assert model.config._attn_implementation == "eager"
    with pytest.raises(UnsupportedOperationError, match="switched"):
        forward(model, tokens(1), mine)
    assert torch.equal(generate(model, tokens(30), case.make(model), 8), expected)
    kvsparse_hf.detach(model.config)
    assert model.config._attn_implementation == "eager"


def test_a_copied_model_keeps_its_own_attention():
    model = build(attention="eager")
    mine = ALL["snapkv"].make(model)
    twin = copy.deepcopy(model)
    kvsparse_hf.detach(model)
    ours = ALL["snapkv"].make(twin)
    assert torch.equal(generate(twin, tokens(30), ours, 8), generate(model, tokens(30), ALL["snapkv"].make(model), 8))
    assert mine.options == ours.options


def test_a_cache_from_the_config():
    model = build()
    from_config = kvsparse_hf.SnapKVCache(model.config, budget=BUDGET, window=4)
    assert torch.equal(generate(model, tokens(30), from_config, 8),
                       generate(model, tokens(30), kvsparse_hf.SnapKVCache(model, budget=BUDGET, window=4), 8))


# --- use() -------------------------------------------------------------------------------------------------------------


def _factory(case, made):
    def make(model):
        made.append(case.make(model))
        return made[-1]

    return make


@pytest.mark.feature("`use()` and pipelines")
@by_all
def test_use_gives_every_generate_a_fresh_cache(case):
    model, twin = build(), build()
    expected = [generate(twin, tokens(30, seed=seed), case.make(twin), 10) for seed in (1, 2)]
    before = generate(model, tokens(30), None, 10)
    made = []
    with kvsparse_hf.use(model, _factory(case, made)):
        made.clear()
        for seed in (1, 2):
            assert torch.equal(generate(model, tokens(30, seed=seed), None, 10), expected[seed - 1])
        assert len(made) == 2 and all(cache.report().seen == [39] for cache in made)
        given = dense(model)
        assert torch.equal(generate(model, tokens(30), given, 10), before)  # a cache that is passed wins
        assert torch.equal(generate(model, tokens(30), None, 10, use_cache=False), before)
        assert len(made) == 2
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(generate(model, tokens(30), None, 10), before) and len(made) == 2


def test_use_nested():
    model = build()
    plain = generate(model, tokens(30), None, 8)
    outer, inner = [], []
    with kvsparse_hf.use(model, _factory(ALL["snapkv"], outer)):
        with kvsparse_hf.use(model, _factory(ALL["streaming"], inner)):
            generate(model, tokens(30), None, 8)
            counts = len(outer), len(inner)
            generate(model, tokens(30), None, 8)
            assert (len(outer), len(inner)) == (counts[0], counts[1] + 1)
        generate(model, tokens(30), None, 8)
        assert (len(outer), len(inner)) == (counts[0] + 1, counts[1] + 1)
    assert torch.equal(generate(model, tokens(30), None, 8), plain)
    assert (len(outer), len(inner)) == (counts[0] + 1, counts[1] + 1)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_use_when_something_fails_inside(attention):
    model = build(attention=attention)
    plain = _everything_else(model)
    with pytest.raises(ZeroDivisionError), kvsparse_hf.use(model, ALL["snapkv"].make):
        generate(model, tokens(30), None, 3)
        raise ZeroDivisionError
    assert model.config._attn_implementation == attention and _same(_everything_else(model), plain)
    with pytest.raises(KVSparseError), kvsparse_hf.use(model, "no-such-preset"):
        raise AssertionError("must not get here")
    with pytest.raises(ZeroDivisionError), kvsparse_hf.use(model, lambda model: 1 / 0):
        raise AssertionError("must not get here")
    assert model.config._attn_implementation == attention and _same(_everything_else(model), plain)


def test_use_leaves_an_attached_model_attached():
    model = build()
    mine = ALL["snapkv"].make(model)
    expected = generate(model, tokens(30), ALL["snapkv"].make(model), 8)
    with kvsparse_hf.use(model, ALL["streaming"].make):
        generate(model, tokens(30), None, 3)
    assert torch.equal(generate(model, tokens(30), mine, 8), expected)


def test_enable_and_disable():
    model = build()
    plain = generate(model, tokens(30), None, 8)
    kvsparse_hf.enable(model, ALL["streaming"].make)
    assert torch.equal(generate(model, tokens(30), None, 8), generate(model, tokens(30), ALL["streaming"].make(model), 8))
    kvsparse_hf.disable(model)
    assert torch.equal(generate(model, tokens(30), None, 8), plain) and model.config._attn_implementation == "sdpa"


@pytest.mark.feature("`use()` and pipelines")
@by_all
def test_a_transformers_pipeline(case):
    """Single texts and a padded batch, through the pipeline's own code."""
    model, twin = build(), build()
    pipe = transformers.pipeline("text-generation", model=model, tokenizer=tiny_tokenizer(), device="cpu")
    texts = [" ".join(f"w{token}" for token in row.tolist()) for row in (tokens(30)[0], tokens(17, seed=2)[0])]
    options = dict(max_new_tokens=8, do_sample=False, return_full_text=False)
    with kvsparse_hf.use(model, case.make):
        one = [pipe(text, **options)[0]["generated_text"] for text in texts]
        batch = [out[0]["generated_text"] for out in pipe(texts, batch_size=2, **options)]
    ids = [torch.tensor([[int(word[1:]) for word in text.split()]]) for text in texts]
    answers = [generate(twin, row, case.make(twin), 8)[0].tolist() for row in ids]
    expected = [" ".join(f"w{token}" for token in answer if token > 2) for answer in answers]  # special tokens are not printed
    assert [text.strip() for text in one] == expected
    assert [text.strip() for text in batch] == expected


def test_generate_returns_our_cache_to_the_caller():
    model = build()
    with kvsparse_hf.use(model, ALL["snapkv"].make):
        out = generate(model, tokens(30), None, 3, return_dict_in_generate=True)
    assert type(out[CACHE]) is kvsparse_hf.SnapKVCache
