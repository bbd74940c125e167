"""Logits equal those of the same sharing written out over the model's modules, however the tokens are fed."""

import copy

import pytest
import torch
from helpers import decode, forward, generate, left_pad, positions, prefill, storage_bytes, tensors_of, tokens
from shared_oracle import in_groups, shared_forward, yoco_map, yoco_windows
from tiny_models import build

from kvsparse_hf import CLACache, FullCache, KVSharerCache, SparseCache, YOCOCache

LAYERS, WINDOW = 6, 5


def _cases():
    return {
        "cla-2": (lambda model: CLACache(model, factor=2), in_groups(LAYERS, 2), None),
        "cla-3": (lambda model: CLACache(model, factor=3), in_groups(LAYERS, 3), None),
        "cla-4": (lambda model: CLACache(model, factor=4), in_groups(LAYERS, 4), None),
        "groups": (lambda model: CLACache(model, groups=[[1, 2, 5], [3, 4]]), [0, 1, 1, 3, 3, 1], None),
        "kvsharer": (lambda model: KVSharerCache(model, plan=[[5, 2], [2, 1], [4, 0]]), [0, 1, 1, 3, 0, 1], None),
        "yoco": (lambda model: YOCOCache(model, window=WINDOW), yoco_map(LAYERS), yoco_windows(LAYERS, WINDOW)),
        "yoco-wide": (lambda model: YOCOCache(model, window=64), yoco_map(LAYERS), None),
    }


CASES = _cases()
by_case = pytest.mark.parametrize("case", CASES)


def _model(**options):
    return build(num_hidden_layers=LAYERS, initializer_range=0.15, **options)


def _text(lengths, extra=0):
    """Rows of these lengths, padded in front, and `extra` further tokens of each row."""
    ids, mask = left_pad([tokens(length, seed=length) for length in lengths])
    return ids, mask, tokens(extra, len(lengths), seed=77)


def _close(got, expected, mask=None):
    """Equal within 1e-5 at every real token."""
    if mask is not None:
        got, expected = got[mask.bool()], expected[mask.bool()]
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)


@by_case
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("lengths", [(30,), (30, 17, 3)], ids=["one", "padded"])
def test_prompt_steps_and_turn(case, attention, lengths):
    make, sources, windows = CASES[case]
    model = _model(attention=attention)
    ids, mask, after = _text(lengths, 12)
    whole = torch.cat((ids, after), dim=1)
    whole_mask = torch.cat((mask, mask.new_ones(len(ids), 12)), dim=1)
    expected, _ = shared_forward(model, whole, sources, whole_mask, windows)
    mine = make(model)
    length = ids.shape[1]
    _close(prefill(model, mine, ids, mask), expected[:, :length], mask)
    _close(decode(model, mine, after[:, :4], mask), expected[:, length : length + 4])
    turn = dict(attention_mask=whole_mask[:, : length + 11], position_ids=positions(whole_mask)[:, length + 4 : length + 11])
    _close(forward(model, after[:, 4:11], mine, **turn), expected[:, length + 4 : length + 11])
    _close(decode(model, mine, after[:, 11:], whole_mask[:, : length + 11]), expected[:, length + 11 :])


@by_case
def test_chunks_and_single_tokens_equal_the_whole_prompt(case):
    make, sources, windows = CASES[case]
    model, ids = _model(), tokens(23)
    expected, _ = shared_forward(model, ids, sources, windows=windows)
    for chunk in (1, 4, 7, 22):
        mine = make(model)
        _close(torch.cat([forward(model, part, mine) for part in ids.split(chunk, dim=1)], dim=1), expected)


@by_case
def test_greedy_text(case):
    """16 tokens of `generate()`, each the best continuation of everything before it, written out."""
    make, sources, windows = CASES[case]
    model, ids = _model(), tokens(20)
    new = generate(model, ids, make(model), 16)
    logits, _ = shared_forward(model, torch.cat((ids, new), dim=1), sources, windows=windows)
    assert torch.equal(logits[:, 19:-1].argmax(-1), new)
    assert not torch.equal(new, generate(model, ids, FullCache(model), 16))  # sharing changes an unmodified model


@by_case
def test_copies_files_rows_and_crops(case, tmp_path):
    make, sources, windows = CASES[case]
    model = _model()
    ids, mask, after = _text((20, 11), 4)
    mine = make(model)
    prefill(model, mine, ids, mask)
    mine.save(tmp_path)
    loaded, copied = SparseCache.load(tmp_path, model), copy.deepcopy(mine)
    expected = decode(model, mine, after, mask)
    for other in (loaded, copied):
        assert type(other) is type(mine) and other.layer_map == mine.layer_map
        assert torch.equal(decode(model, other, after, mask), expected)
    mine.reorder_cache(torch.tensor([1, 1]))
    grown = torch.cat((mask, mask.new_ones(2, 4)), dim=1)
    again = decode(model, mine, after[[1, 1]], grown[[1, 1]])
    whole, whole_mask = torch.cat((ids, after, after), dim=1)[1:], torch.cat((grown, grown.new_ones(2, 4)), dim=1)[1:]
    _close(again[:1], shared_forward(model, whole, sources, whole_mask, windows)[0][:, -4:])
    if not case.startswith("yoco"):
        copied.crop(-4)
        torch.testing.assert_close(decode(model, copied, after, mask), expected, atol=1e-5, rtol=0)
    mine.reset()
    _close(prefill(model, mine, ids, mask), shared_forward(model, ids, sources, mask, windows)[0], mask)


@pytest.mark.parametrize("factor", [1, 2, 3, 6])
def test_bytes_are_one_over_the_factor(factor):
    model, ids = _model(), tokens(400)
    full, mine = FullCache(model, reserve=1), CLACache(model, factor=factor, reserve=1)
    for cache in (full, mine):
        forward(model, ids, cache)
    tables = 2048
    assert abs(storage_bytes(tensors_of(mine)) * factor - storage_bytes(tensors_of(full))) <= tables * factor
    assert mine.report().dense_bytes == full.report().dense_bytes
    assert mine.report().read_bytes == full.report().read_bytes  # every layer still reads


def test_bytes_of_yoco():
    """Half the layers hold a window, one layer everything, the others nothing."""
    model, ids = _model(), tokens(400)
    mine = YOCOCache(model, window=16, reserve=1)
    forward(model, ids, mine)
    entry = 2 * (2 * 16 * 4 + 4)  # two heads: key, value and position
    held = storage_bytes(tensors_of(mine))
    assert entry * (LAYERS // 2 * 16 + 400) <= held <= entry * (LAYERS // 2 * 16 + 401) + 2048


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision(dtype):
    model, ids = _model(dtype=dtype), tokens(20)
    for name in ("cla-2", "yoco"):
        make, sources, windows = CASES[name]
        mine = make(model)
        got = torch.cat((forward(model, ids, mine), decode(model, mine, tokens(5, seed=3))), dim=1)
        expected, _ = shared_forward(model.float(), torch.cat((ids, tokens(5, seed=3)), dim=1), sources, windows=windows)
        torch.testing.assert_close(got.float(), expected, atol=0.04 if dtype == torch.float16 else 0.2, rtol=0)
        model.to(dtype)
