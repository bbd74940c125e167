"""Every model family: dense with an ample budget, exact over what it keeps with a small one, or refused at construction."""

from functools import cache

import pytest
import torch
from helpers import decode, dense, forward, generate, kept_in_all_layers, left_pad, positions, prefill, tokens
from masked import Reference, Renumbered, only
from methods import ALL, AMPLE, BUDGET
from select_tools import quest_pages
from zoo import BY_NAME, REFUSED, SUPPORTED, ZOO, build, rows

from kvsparse_hf import StreamingLLMCache, UnsupportedModelError, UnsupportedOperationError

STEPS, TOLERANCE = 8, 5e-5
# One method for each kind of cache layer, and HiSparse. StreamingLLM's renumbering has tests of its own.
CASES = [ALL[name] for name in ("full", "snapkv", "streaming-original", "h2o", "quest", "adakv", "tiered", "hisparse")]
QUICK = ("full", "snapkv")
UNREADABLE = ("hisparse",)  # in models whose layers share


def _matrix(quick: tuple[str, ...], every_attention: bool) -> list:
    """All of it is slow; a default run takes the `quick` methods on each model's first attention."""
    out = []
    for entry in SUPPORTED:
        for number, attention in enumerate(entry.attentions[: None if every_attention else 1]):
            for case in CASES:
                marks = () if case.id in quick and not number else pytest.mark.slow
                out.append(pytest.param(entry, attention, case, id=f"{entry.name}-{attention}-{case.id}", marks=marks))
    return out


def _make(entry, model, case, budget):
    """The cache; None after checking the refusal, where the model's layers share and the method cannot serve readers."""
    if entry.shares and case.id in UNREADABLE:
        with pytest.raises(UnsupportedOperationError, match="share keys and values"):
            case.make(model, budget)
        return None
    if "kv_lora_rank" in entry.options and case.id == "hisparse":
        with pytest.raises(UnsupportedModelError, match="keys of 24 and values of 12 channels do not share pages"):
            prefill(model, case.make(model, budget), *_batch(20)[:2])
        return None
    return case.make(model, budget)


def _batch(*lengths: int):
    """Left-padded rows in which no token comes twice, so that no two keys of the first layer tie."""
    texts = [torch.randperm(84, generator=torch.Generator().manual_seed(row)) + 3 for row in range(len(lengths))]
    ids, mask = left_pad([text[:length] for text, length in zip(texts, lengths, strict=True)])
    return ids, mask, torch.stack([text[length:length + STEPS] for text, length in zip(texts, lengths, strict=True)])


def _talk(entry, model, make):
    """Logits of a padded prompt, of steps and of a later turn; then greedy tokens."""
    ids, mask, after = _batch(30, 17)
    mine = make()
    first, steps = prefill(model, mine, ids, mask), decode(model, mine, after, mask)
    if entry.turns:
        grown = torch.cat((mask, mask.new_ones(2, STEPS + 3)), dim=1)
        turn = forward(model, tokens(3, 2, seed=5), mine, attention_mask=grown, position_ids=positions(grown)[:, -3:])
        steps = torch.cat((steps, turn), dim=1)
    return first, steps, generate(model, ids, make(), 10, attention_mask=mask)


@cache
def _dense(name: str, attention: str):
    model = build(BY_NAME[name], attention)
    return _talk(BY_NAME[name], model, lambda: dense(model))


@pytest.mark.parametrize("entry, attention, case", _matrix(QUICK, every_attention=True))
def test_an_ample_budget_is_dense(entry, attention, case):
    """Prompt bit for bit, steps, a turn and greedy tokens of a left-padded batch, as Transformers' own cache gives them."""
    model = build(entry, attention)
    if _make(entry, model, case, AMPLE) is None:
        return
    first, later, text = _talk(entry, model, lambda: case.make(model, AMPLE))
    expected = _dense(entry.name, attention)
    assert torch.equal(first, expected[0])
    torch.testing.assert_close(later, expected[1], atol=TOLERANCE, rtol=0)
    assert torch.equal(text, expected[2])


# --- a small budget ----------------------------------------------------------------------------------------------------


def _kept(mine) -> dict[int, list]:
    """Decoder layer -> `[row][head]` positions held, for owners and those that read them."""
    out = {}
    for layer, held in zip(mine.sparse_layers, kept_in_all_layers(mine), strict=True):
        out.update({index: held for index in (layer.layer_idx, *(reader.layer_idx for reader in layer.readers))})
    return out


def _read_pages(full):
    """Quest's choice from the keys themselves: pages of 2 tokens, 6 of them read."""

    def allowed(layer, q, k, scale):
        if layer not in full:
            return None
        heads, group = k.shape[1], q.shape[1] // k.shape[1]
        out = torch.zeros(*k.shape[:3], dtype=torch.bool)
        for row, first in enumerate(full[layer]):
            for head in range(heads):
                query, keys = q[row, head * group:(head + 1) * group, 0].numpy(), k[row, head, first:].numpy()
                for page in quest_pages(query, keys, scale, 2, 2, 2, "softmax_mean", BUDGET // 2)[0]:
                    out[row, head, first + 2 * page:first + 2 * page + 2] = True
        return out.repeat_interleave(group, 1).unsqueeze(2)

    return allowed


def _scores(case, weights):
    """`[H-group rows, T, S]` weights of one row and head -> a score per token, by the method's rule; None where position decides."""
    if case.id == "h2o":
        return weights.sum(1).mean(0)
    total = weights[:, -4:].sum(1).mean(0)[:-4]
    return torch.nn.functional.max_pool1d(total[None, None], 3, 1, 1)[0, 0]


def _check_choice(case, mine, reference, pad):
    """What stayed of the prompt is what the reference's own attention weights say, up to scores that tie within rounding."""
    for layer, held in zip(mine.sparse_layers, kept_in_all_layers(mine), strict=True):
        calls = [reference.calls[index] for index in (layer.layer_idx, *(reader.layer_idx for reader in layer.readers))]
        group = calls[0].q.shape[1] // calls[0].k.shape[1]
        for row, heads in enumerate(held):
            length = calls[0].k.shape[2] - pad[row]
            for head, kept in enumerate(heads):
                if case.streaming:
                    assert kept == [*range(4), *range(length - BUDGET + 4, length)]
                    continue
                part = torch.cat([call.weights[row, head * group:(head + 1) * group, pad[row]:, pad[row]:] for call in calls])
                scores = _scores(case, part)
                newest = 5 if case.id == "h2o" else 4
                assert len(kept) == BUDGET and set(range(length - newest, length)) <= set(kept)
                free = range(length - newest - (case.id == "h2o"))  # H2O's oldest recent token goes with the next one
                worst = min(float(scores[j]) for j in kept if j in free)
                best = max(float(scores[j]) for j in free if j not in kept)
                assert worst >= best - 1e-5 * abs(best)


@pytest.mark.parametrize("entry, attention, case", _matrix(("snapkv",), every_attention=False))
def test_a_small_budget(entry, attention, case):
    """The budget is held, the right tokens are kept, and every step attends to exactly those that are."""
    model = build(entry, attention)
    mine = _make(entry, model, case, BUDGET)
    if mine is None or not mine.sparse_layers:
        return
    ids, mask, after = _batch(40, 29)
    reference = Reference(model)
    first = prefill(model, mine, ids, mask)
    torch.testing.assert_close(first[:, -1], reference.forward(ids, mask)[:, -1], atol=TOLERANCE, rtol=0)
    pad = (mask == 0).sum(1).tolist()
    if case.id in ("snapkv", "h2o", "streaming-original"):
        _check_choice(case, mine, reference, pad)
    if case.selects and entry.shares:
        return  # owner and readers choose together there
    if case.selects:
        reference.mask = _read_pages({layer.layer_idx: pad for layer in mine.sparse_layers})
    for step in range(STEPS):
        got = decode(model, mine, after[:, step:step + 1], mask)
        mask = torch.cat((mask, mask.new_ones(2, 1)), dim=1)
        if case.evicts:
            assert case.held(mine) == {case.kept_after_decode(29, step + 1)}
            reference.mask = only(_kept(mine), mask)
        torch.testing.assert_close(got, reference.forward(after[:, step:step + 1], mask), atol=TOLERANCE, rtol=0)


# --- positions by place in the cache -----------------------------------------------------------------------------------


@pytest.mark.parametrize("entry", [entry for entry in SUPPORTED if not entry.all_sliding], ids=lambda entry: entry.name)
def test_renumbered_positions(entry):
    """Exact against keys that the model's own modules rotate to the places in the cache, or refused."""
    model = build(entry)
    if entry.renumber:
        with pytest.raises(UnsupportedModelError, match=f"{entry.renumber}.*positions='original'"):
            StreamingLLMCache(model, budget=BUDGET)
        assert not model.config.get_text_config(decoder=True)._attn_implementation.startswith("kvsparse")
        return
    mine = StreamingLLMCache(model, budget=BUDGET)
    full = [layer.layer_idx for layer in mine.sparse_layers]
    full += [reader.layer_idx for layer in mine.sparse_layers for reader in layer.readers]
    ids, mask, after = _batch(30)
    reference = Renumbered(model, full)
    prefill(model, mine, ids, mask)
    reference.forward(ids, mask)
    for step in range(STEPS):
        reference.kept = [*range(4), *range(31 + step - BUDGET + 4, 31 + step)]
        got = decode(model, mine, after[:, step:step + 1], mask)
        mask = torch.cat((mask, mask.new_ones(1, 1)), dim=1)
        torch.testing.assert_close(got, reference.forward(after[:, step:step + 1], mask), atol=TOLERANCE, rtol=0)


# --- refusals, and the table -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("entry", REFUSED, ids=lambda entry: entry.name)
def test_refused_at_construction(entry):
    model = build(entry)
    before = model.config.get_text_config(decoder=True)._attn_implementation
    for case in CASES:
        with pytest.raises(UnsupportedModelError, match=entry.why):
            case.make(model)
        with pytest.raises(UnsupportedModelError, match=entry.why):
            case.make(model.config)
    assert model.config.get_text_config(decoder=True)._attn_implementation == before


def test_the_table_names_every_model():
    table = rows()
    assert [row[0] for row in table] == [entry.name for entry in ZOO]
    assert {row[1].split(" (")[0] for row in table} <= {"supported", "refused", "not in this version"}
    assert sum(row[1].startswith("supported") for row in table) == len(SUPPORTED)
