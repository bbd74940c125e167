"""A cache owns its state and all of it: interleaving, copies, reset, files, permutations of rows, taking tokens back."""

import copy
import functools
import json
import threading
from collections.abc import Iterable

import pytest
import torch
import transformers
from helpers import (
    decode,
    dense,
    forward,
    generate,
    kept_in_all_layers,
    left_pad,
    prefill,
    same_snapshot,
    seen,
    snapshot,
    tensors_of,
    tokens,
)
from methods import ALL, AMPLE, BUDGET, CORE, METHODS, by_all
from tiny_models import build
from transformers.cache_utils import DynamicSlidingWindowLayer

from kvsparse_hf import KVSparseError, SparseCache, UnsupportedOperationError

by_method = pytest.mark.parametrize("case", METHODS, ids=lambda case: case.id)
by_core = pytest.mark.parametrize("case", CORE, ids=lambda case: case.id)
families = pytest.mark.parametrize("family", ["llama-gqa2", "gemma3"])

ROWS = (30, 21, 3)


def _everywhere(full: Iterable[str], short: Iterable[str]) -> list:
    """Every kind of layer with all of `full` on two architectures; every method with `short` on one."""
    out = [(case, family, what) for case in CORE for family in ("llama-gqa2", "gemma3") for what in full]
    out += [(case, "llama-gqa2", what) for case in METHODS if case not in CORE for what in short]
    return [pytest.param(*values, id=f"{values[0].id}-{values[1]}-{values[2]}") for values in out]


def _started(case, model, budget=BUDGET, rows=ROWS, **options):
    """A cache that saw padded prompts and a few decoded tokens, and the mask up to there."""
    ids, mask = left_pad([tokens(length, seed=20 + index) for index, length in enumerate(rows)])
    mine = case.make(model, budget, **options)
    prefill(model, mine, ids, mask)
    decode(model, mine, tokens(3, len(rows), seed=5), mask)
    return mine, torch.cat((mask, mask.new_ones(len(rows), 3)), dim=1)


# --- several caches ----------------------------------------------------------------------------------------------------


@pytest.mark.feature("interleaved caches")
@by_method
def test_interleaved_caches_do_not_meet(case):
    """Two prompts, step by step in turn on one model, also with a dense cache between: bit-equal to each alone."""
    model = build()
    prompts, after = [tokens(30), tokens(17, seed=2), tokens(25, seed=3)], tokens(12, seed=4)

    def caches():
        return [case.make(model), case.make(model), dense(model)]

    alone = [torch.cat((prefill(model, cache, ids)[:, -1:], decode(model, cache, after)), 1)
             for cache, ids in zip(caches(), prompts, strict=True)]
    mixed = caches()
    out = [[prefill(model, cache, ids)[:, -1:]] for cache, ids in zip(mixed, prompts, strict=True)]
    for step in range(after.shape[1]):
        for logits, cache in zip(out, mixed, strict=True):
            logits.append(decode(model, cache, after[:, step:step + 1]))
    for expected, logits in zip(alone, out, strict=True):
        assert torch.equal(torch.cat(logits, dim=1), expected)


@pytest.mark.feature("threads")
@by_all
def test_two_threads_on_one_model(case):
    model = build()
    prompts = [tokens(30 + index, seed=index) for index in range(4)]
    expected = [generate(model, ids, case.make(model), 20) for ids in prompts]
    caches = [case.make(model) for _ in prompts]
    results, barrier = [None] * 4, threading.Barrier(4)

    def work(index):
        barrier.wait()
        results[index] = generate(model, prompts[index], caches[index], 20)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for got, wanted in zip(results, expected, strict=True):
        assert got is not None and torch.equal(got, wanted)


@by_core
def test_cache_started_in_another_thread(case):
    model = build()
    mine, reference = case.make(model), case.make(model)
    prefill(model, reference, tokens(30))

    def work():
        with torch.no_grad():
            prefill(model, mine, tokens(30))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert torch.equal(decode(model, mine, tokens(8, seed=3)), decode(model, reference, tokens(8, seed=3)))


# --- copies and files --------------------------------------------------------------------------------------------------


@pytest.mark.feature("`deepcopy`, `save` and `load`")
@pytest.mark.parametrize("case, family, how", _everywhere(("deepcopy", "fork", "file"), ("file",)))
def test_a_copy_continues_like_the_original(case, family, how, tmp_path):
    model = build(family)
    mine, mask = _started(case, model)
    before = snapshot(mine)
    if how == "file":
        mine.save(tmp_path / "saved")
        other = SparseCache.load(tmp_path / "saved", model)
        assert type(other) is type(mine) and other.option_dict() == mine.option_dict()
    else:
        other = copy.deepcopy(mine) if how == "deepcopy" else mine.fork()
    pointers = {t.untyped_storage().data_ptr() for t in tensors_of(mine) if t.numel()}
    assert pointers.isdisjoint(t.untyped_storage().data_ptr() for t in tensors_of(other) if t.numel())
    assert (seen(other), other.report().seen, other.report().layers) == (seen(mine), mine.report().seen, mine.report().layers)
    first, second = tokens(8, 3, seed=6), tokens(8, 3, seed=7)
    forked = decode(model, other, first, mask)  # the copy goes another way …
    assert same_snapshot(snapshot(mine), before)  # … and the original did not notice
    mine_second = decode(model, mine, second, mask)
    straight, _ = _started(case, model)
    assert torch.equal(mine_second, decode(model, straight, second, mask))
    straight, _ = _started(case, model)
    assert torch.equal(forked, decode(model, straight, first, mask))


@by_method
def test_a_loaded_cache_takes_another_turn(case, tmp_path):
    model = build()
    mine = case.make(model, reserve=5)
    answer = generate(model, tokens(30), mine, 7)
    mine.save(tmp_path)
    whole = torch.cat((tokens(30), answer, tokens(9, seed=8)), dim=1)
    expected = generate(model, whole, mine, 9)
    loaded = SparseCache.load(tmp_path, model)
    assert torch.equal(generate(model, whole, loaded, 9), expected)
    assert kept_in_all_layers(loaded) == kept_in_all_layers(mine)


@by_core
@pytest.mark.parametrize("family", ["llama-gqa2", "gemma3", "mistral-sliding"])
def test_empty_and_sliding_caches_survive_a_file(case, family, tmp_path):
    model = build(family)
    mine = case.make(model)
    mine.save(tmp_path / "empty")
    loaded = SparseCache.load(tmp_path / "empty", model)
    assert seen(loaded) == 0
    expected = forward(model, tokens(20), mine)
    assert torch.equal(forward(model, tokens(20), loaded), expected)
    mine.save(tmp_path / "full")
    loaded = SparseCache.load(tmp_path / "full", model)
    assert seen(loaded) == 20
    assert torch.equal(decode(model, loaded, tokens(5, seed=2)), decode(model, mine, tokens(5, seed=2)))


@by_core
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_files_keep_the_dtype(case, dtype, tmp_path):
    model = build(dtype=dtype)
    mine, mask = _started(case, model)
    mine.save(tmp_path)
    loaded = SparseCache.load(tmp_path, model)
    assert same_snapshot(snapshot(loaded), snapshot(mine))
    assert torch.equal(decode(model, loaded, tokens(4, 3), mask), decode(model, mine, tokens(4, 3), mask))


@pytest.mark.feature("`reset`")
@pytest.mark.parametrize("case, family", [
    pytest.param(case, family, id=f"{case.id}-{family}") for case in METHODS for family in ("llama-gqa2", "gemma3")
    if case in CORE or family == "llama-gqa2"
])
def test_reset_then_another_prompt(case, family):
    """Shorter, longer, another batch size, another padding: always as a fresh cache."""
    model = build(family)
    mine = case.make(model, reserve=4)
    for rows in ((30, 21, 3), (12, 20, 1), (50,), (4,)):
        ids, mask = left_pad([tokens(length, seed=30 + length) for length in rows])
        fresh = case.make(model, reserve=4)
        expected = generate(model, ids, fresh, 8, attention_mask=mask)
        assert torch.equal(generate(model, ids, mine, 8, attention_mask=mask), expected)
        assert kept_in_all_layers(mine) == kept_in_all_layers(fresh) and seen(mine) == seen(fresh)
        mine.reset()
        assert seen(mine) == 0 and mine.report().seen == []


# --- rows --------------------------------------------------------------------------------------------------------------

_SELECTIONS = {
    "reorder": (lambda cache: cache.reorder_cache(torch.tensor([2, 0, 0])), [2, 0, 0]),
    "swap": (lambda cache: cache.reorder_cache(torch.tensor([1, 0, 2])), [1, 0, 2]),
    "select-short": (lambda cache: cache.batch_select_indices(torch.tensor([2])), [2]),
    "select-two": (lambda cache: cache.batch_select_indices(torch.tensor([2, 0])), [2, 0]),
    "repeat": (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
}


@pytest.mark.feature("rows reordered, selected, repeated")
@pytest.mark.parametrize("budget", [BUDGET, pytest.param(AMPLE, marks=pytest.mark.slow), 0.5], ids=str)
@pytest.mark.parametrize("case, family, selection", _everywhere(_SELECTIONS, ("reorder", "select-short")))
def test_rows_move_with_all_their_state(case, family, selection, budget):
    model = build(family)
    apply, index = _SELECTIONS[selection]
    mine, mask = _started(case, model, budget, reserve=5)
    other = mine.fork()
    before = kept_in_all_layers(mine)
    apply(mine)
    assert mine.batch_size == len(index)
    assert kept_in_all_layers(mine) == [[layer[row] for row in index] for layer in before]
    assert mine.report().seen == [ROWS[row] + 3 for row in index]
    after = tokens(8, 3, seed=9)
    expected = decode(model, other, after, mask)
    got = decode(model, mine, after[index], mask[index])
    torch.testing.assert_close(got, expected[index], atol=1e-5, rtol=0)
    assert kept_in_all_layers(mine) == [[layer[row] for row in index] for layer in kept_in_all_layers(other)]
    message, grown = tokens(4, 3, seed=10), torch.cat((mask, mask.new_ones(3, 12)), dim=1)
    expected = prefill_turn(model, other, message, grown)
    torch.testing.assert_close(prefill_turn(model, mine, message[index], grown[index]), expected[index], atol=1e-5, rtol=0)


def prefill_turn(model, cache, ids, mask):
    """A later multi-token forward with the positions `generate()` would give."""
    at = (mask.cumsum(-1) - 1)[:, -ids.shape[1]:]
    return forward(model, ids, cache, attention_mask=mask, position_ids=at)


@by_core
def test_row_operations_before_the_first_token(case):
    model = build()
    mine = case.make(model)
    mine.reorder_cache(torch.tensor([1, 0]))
    mine.batch_select_indices(torch.tensor([0]))
    mine.batch_repeat_interleave(3)
    mine.reset()
    mine.crop(0)
    assert (seen(mine), mine.batch_size) == (0, -1)
    assert torch.equal(generate(model, tokens(20), mine, 8), generate(model, tokens(20), case.make(model), 8))


# --- counters ----------------------------------------------------------------------------------------------------------


@by_method
def test_seen_and_kept_are_counted_apart(case):
    model = build()
    mine = case.make(model, reserve=3)
    assert (seen(mine), mine.report().kept, mine.report().evicted) == (0, 0, 0)
    forward(model, tokens(20), mine)
    heads = 2 * case.owners(case.layers)
    for steps in range(0, 30, 5):
        report = mine.report()
        kept = case.kept_after_decode(20, steps)
        assert seen(mine) == 20 + steps and report.seen == [20 + steps]
        assert case.held(mine) == {kept} and report.kept == kept
        assert report.evicted == (20 + steps - kept) * heads
        assert all(int(mine.get_seq_length(layer)) == 20 + steps for layer in range(case.layers))
        decode(model, mine, tokens(5, seed=steps))


@by_core
def test_a_counter_read_earlier_does_not_move(case):
    model = build()
    mine = case.make(model)
    forward(model, tokens(20), mine)
    before = mine.get_seq_length()
    value = int(before)
    decode(model, mine, tokens(3))
    assert seen(mine) == 23 and value == 20
    assert int(before) == 20


@by_core
def test_members_of_the_cache_contract(case):
    """Every public member of Transformers' cache classes answers, or refuses with our error."""
    model = build()
    mine = case.make(model)
    for started in (False, True):
        if started:
            forward(model, tokens(20), mine)
        assert len(mine) == 2 and mine.is_compileable
        assert mine.is_initialized == started
        assert list(mine.is_sliding) == [False, False]
        assert mine.is_croppable == (case.croppable and not case.evicts)  # of everything it has seen
        assert str(mine).startswith(case.cache.__name__)
        length = mine.get_max_length() if hasattr(mine, "get_max_length") else mine.get_max_cache_shape()
        assert length == -1
        sizes, offset = mine.get_mask_sizes(1, 0)
        assert int(sizes) >= 1
        for layer in mine.layers:
            assert not layer.is_sliding and layer.is_compileable
            for refused in (layer.offload, layer.prefetch):
                with pytest.raises(UnsupportedOperationError):
                    refused()
        mine.early_initialization(batch_size=1, num_heads=2, head_dim=16, dtype=torch.float32, device=torch.device("cpu"))
        assert mine.is_initialized == started


# --- taking tokens back ------------------------------------------------------------------------------------------------


@by_core
@families
def test_crop_zero_changes_nothing(case, family):
    model = build(family)
    mine, mask = _started(case, model)
    before = snapshot(mine)
    mine.crop(0)
    assert same_snapshot(snapshot(mine), before)
    straight, _ = _started(case, model)
    assert torch.equal(decode(model, mine, tokens(4, 3), mask), decode(model, straight, tokens(4, 3), mask))


@pytest.mark.feature("`crop` of decoded tokens", refused=lambda case: not case.croppable)
@pytest.mark.parametrize("case, rows, taken", [
    pytest.param(case, rows, taken, id=f"{case.id}-{len(rows)}-{taken}")
    for case in METHODS for rows in ((30,), ROWS) for taken in (1, 3, 6) if case in CORE or (rows, taken) == (ROWS, 3)
])
def test_crop_of_decoded_tokens(case, rows, taken):
    model = build()
    mine, mask = _started(case, model, rows=rows, reserve=4)
    straight = mine.fork()
    before = snapshot(mine)
    drafts = tokens(taken, len(rows), seed=9)
    if not case.croppable:
        with pytest.raises(UnsupportedOperationError, match="take"):
            mine.crop(-1)
        assert same_snapshot(snapshot(mine), before) and seen(mine) == seen(straight)
    else:
        decode(model, mine, drafts, mask)
        mine.crop(-taken)
        assert seen(mine) == seen(straight)
    assert kept_in_all_layers(mine) == kept_in_all_layers(straight)
    after = tokens(10, len(rows), seed=10)
    torch.testing.assert_close(decode(model, mine, after, mask), decode(model, straight, after, mask), atol=1e-5, rtol=0)


@pytest.mark.feature("`crop` into the prompt", refused=lambda case: case.evicts or not case.croppable)
@by_method
def test_crop_into_the_prompt(case):
    """Exact where nothing was evicted; refused, with nothing changed, where something was."""
    model = build()
    mine = case.make(model, BUDGET)
    forward(model, tokens(30), mine)
    before = snapshot(mine)
    if case.evicts or not case.croppable:
        with pytest.raises(UnsupportedOperationError):
            mine.crop(-5)
        assert same_snapshot(snapshot(mine), before) and seen(mine) == 30
    if case.croppable:
        roomy, reference = case.make(model, AMPLE), case.dense(model)
        for cache in (roomy, reference):
            forward(model, tokens(30), cache)
            cache.crop(-5)
        assert seen(roomy) == 25
        torch.testing.assert_close(decode(model, roomy, tokens(6)), decode(model, reference, tokens(6)), atol=1e-5, rtol=0)


@by_core
@pytest.mark.parametrize("removed", [33, 34, 1000])
def test_crop_of_everything_or_more(case, removed):
    """Empties the cache, as Transformers' own does, or is refused."""
    model = build()
    mine, _ = _started(case, model, AMPLE, rows=(30,))
    try:
        mine.crop(-removed)
    except UnsupportedOperationError:
        assert not case.croppable or case.evicts
        assert seen(mine) == 33
        mine.reset()
    assert seen(mine) == 0
    assert torch.equal(generate(model, tokens(20), mine, 8), generate(model, tokens(20), case.make(model, AMPLE), 8))


@pytest.mark.parametrize("family", ["gemma3", "qwen2-hybrid", "mistral-sliding"])
def test_crop_past_a_sliding_window_changes_nothing_when_refused(family):
    model = build(family)
    mine, straight = ALL["full"].make(model), ALL["full"].make(model)
    for cache in (mine, straight):
        forward(model, tokens(20), cache)
    with pytest.raises(UnsupportedOperationError):
        mine.crop(-2)
    assert seen(mine) == 20
    assert torch.equal(decode(model, mine, tokens(6)), decode(model, straight, tokens(6)))


def _drafting(family, how):
    """Options of `generate()`, and a prompt that repeats itself, so that prompt lookup proposes right and wrong drafts."""
    ids = tokens(10).repeat(1, 5)
    if how == "prompt-lookup":
        return ids, {"prompt_lookup_num_tokens": 4}
    assistant = build(family, seed=0)  # a draft model that is right often, but not always
    torch.manual_seed(7)
    for weight in assistant.parameters():
        weight.add_(torch.randn_like(weight) * 0.02 * weight.std().nan_to_num())
    return ids, {"assistant_model": assistant}


@functools.cache
def _own_failure(family, how) -> str:
    """How this version of Transformers breaks down with its own cache in the same run, if it does. A refusal is none."""
    model, (ids, options) = build(family), _drafting(family, how)
    try:
        generate(model, ids, dense(model), 30, **options)
    except ValueError:
        return ""
    except RuntimeError as error:
        return str(error)
    return ""


@by_core
@pytest.mark.parametrize("budget", [BUDGET, AMPLE])
@pytest.mark.parametrize("family", ["llama-gqa2", "gemma3", "mistral-sliding"])
@pytest.mark.parametrize("how", ["prompt-lookup", "assistant"])
def test_drafts_equal_greedy_or_are_refused(case, budget, family, how):
    if failure := _own_failure(family, how):
        pytest.skip(f"transformers {transformers.__version__} fails with its own cache: {failure}")
    model, (ids, options) = build(family), _drafting(family, how)
    mine, drafted = case.make(model, budget), True
    try:
        got = generate(model, ids, mine, 30, **options)
    except ValueError as error:
        # Where every layer is Transformers' own, the refusal may be too.
        assert isinstance(error, UnsupportedOperationError) or family == "mistral-sliding"
        # Sliding layers of the older versions cannot take tokens back once the window has moved.
        assert family != "llama-gqa2" and not hasattr(DynamicSlidingWindowLayer, "activate_past_recording")
        mine.reset()
        got, drafted = generate(model, ids, mine, 30), False
    # A selecting method verifies drafts densely, and so generates what the model does without it.
    alone = dense(model) if case.selects and drafted else case.make(model, budget)
    assert torch.equal(got, generate(model, ids, alone, 30))


# --- modes of autograd -------------------------------------------------------------------------------------------------


@by_core
def test_inference_mode_then_no_grad(case):
    """A prompt read under `inference_mode` (evaluation harnesses do) can be continued outside of it, and the other way round."""
    model = build()
    expected = case.make(model)
    answer = generate(model, tokens(20), expected, 5)
    whole = torch.cat((tokens(20), answer, tokens(4, seed=3)), dim=1)
    second = generate(model, whole, expected, 8)
    for first_mode, second_mode in ((torch.inference_mode, torch.no_grad), (torch.no_grad, torch.inference_mode)):
        mine = case.make(model)
        with first_mode():
            assert torch.equal(generate(model, tokens(20), mine, 5), answer)
        with second_mode():
            assert torch.equal(generate(model, whole.clone(), mine, 8), second)
            mine.reset()
            assert torch.equal(generate(model, tokens(20), mine, 5), answer)


@by_method
def test_no_graph_is_kept(case):
    """A forward without `no_grad` must not tie the cache to its graph."""
    model = build()
    mine, reference = case.make(model), case.make(model)
    with torch.enable_grad():
        forward(model, tokens(20), mine)
        forward(model, tokens(3, seed=3), mine)
        forward(model, tokens(1), mine)
    assert not any(t.requires_grad or t.grad_fn is not None for t in tensors_of(mine))
    forward(model, tokens(20), reference)
    forward(model, tokens(3, seed=3), reference)
    forward(model, tokens(1), reference)
    assert torch.equal(decode(model, copy.deepcopy(mine), tokens(5)), decode(model, reference, tokens(5)))


# --- damaged files -----------------------------------------------------------------------------------------------------


def _saved(tmp_path, family="llama-gqa2"):
    model = build(family)
    mine, _ = _started(ALL["snapkv"], model)
    mine.save(tmp_path)
    return model


@pytest.mark.parametrize("name", ["cache.json", "cache.safetensors"])
@pytest.mark.parametrize("damage", ["missing", "empty", "truncated", "garbage"])
def test_damaged_files(name, damage, tmp_path):
    model = _saved(tmp_path)
    path = tmp_path / name
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes({"empty": b"", "truncated": content[:-7], "garbage": bytes(len(content))}[damage])
    with pytest.raises(KVSparseError):
        SparseCache.load(tmp_path, model)


@pytest.mark.parametrize("where", [0.3, 0.6, 0.99])
def test_a_flipped_bit_is_noticed(where, tmp_path):
    model = _saved(tmp_path)
    path = tmp_path / "cache.safetensors"
    content = bytearray(path.read_bytes())
    header = 8 + int.from_bytes(content[:8], "little")
    content[header + int((len(content) - header) * where)] ^= 0x40
    path.write_bytes(content)
    with pytest.raises(KVSparseError):
        SparseCache.load(tmp_path, model)


_JSON_KEYS = ["format", "method", "options", "model", "seen", "pad", "decoding", "layers", "tensors"]


@pytest.mark.parametrize("key", _JSON_KEYS)
@pytest.mark.parametrize("value", ["absent", None, [], "x", -1, {"a": [1]}], ids=repr)
def test_a_damaged_description(key, value, tmp_path):
    model = _saved(tmp_path)
    path = tmp_path / "cache.json"
    content = json.loads(path.read_text())
    assert key in content
    if value == "absent":
        del content[key]
    else:
        content[key] = value
    path.write_text(json.dumps(content))
    with pytest.raises(KVSparseError):
        SparseCache.load(tmp_path, model)


@pytest.mark.parametrize("other", ["llama-mha", "llama-gqa4", "qwen3", "gemma3"])
def test_a_file_of_another_model(other, tmp_path):
    _saved(tmp_path)
    model = build(other)
    before = model.config._attn_implementation
    with pytest.raises(KVSparseError, match="another model|layers"):
        SparseCache.load(tmp_path, model)
    assert model.config._attn_implementation == before
