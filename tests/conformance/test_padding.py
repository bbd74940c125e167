"""A row of a left-padded batch gives what the row gives alone, in every method, at every edge."""

import pytest
import torch
from helpers import decode, generate, kept_in_all_layers, left_pad, prefill, tokens
from methods import ALL, AMPLE, BUDGET, CORE, METHODS, by_all
from tiny_models import build, each_family

STEPS = 10
by_method = pytest.mark.parametrize("case", METHODS, ids=lambda case: case.id)
by_core = pytest.mark.parametrize("case", CORE, ids=lambda case: case.id)


def _check(model, make, lengths):
    """Feeds rows of these lengths as one batch and one by one: same kept tokens, same logits."""
    # No token comes twice in a row: two equal tokens have equal keys in layer 0, and rounding would decide between them.
    texts = [torch.randperm(94, generator=torch.Generator().manual_seed(10 + index)) + 3 for index in range(len(lengths))]
    rows = [text[:length].unsqueeze(0) for text, length in zip(texts, lengths, strict=True)]
    after = torch.stack([text[length:length + STEPS] for text, length in zip(texts, lengths, strict=True)])
    ids, mask = left_pad(rows)
    batch = make(model)
    first = prefill(model, batch, ids, mask)[:, -1:]
    kept_first = kept_in_all_layers(batch)
    later = decode(model, batch, after, mask)
    kept_later = kept_in_all_layers(batch)
    assert batch.report().seen == [length + STEPS for length in lengths]
    for index, row in enumerate(rows):
        alone = make(model)
        torch.testing.assert_close(first[index:index + 1], prefill(model, alone, row)[:, -1:], atol=5e-5, rtol=0)
        assert [layer[index] for layer in kept_first] == [layer[0] for layer in kept_in_all_layers(alone)]
        torch.testing.assert_close(later[index:index + 1], decode(model, alone, after[index:index + 1]), atol=5e-5, rtol=0)
        assert [layer[index] for layer in kept_later] == [layer[0] for layer in kept_in_all_layers(alone)]


_PADS = [
    pytest.param(case, pad, budget, id=f"{case.id}-{pad}-{budget}")
    for case in METHODS
    for pad in (0, 1, 40)
    for budget in (BUDGET, AMPLE, 0.5, 1.0)
    if case in CORE or (pad, budget) in ((40, BUDGET), (1, 0.5))
]


@pytest.mark.feature("left-padded batches")
@pytest.mark.parametrize("case, pad, budget", _PADS)
def test_one_padded_row(case, pad, budget):
    _check(build(), lambda model: case.make(model, budget), [60, 60 - pad])


@by_method
def test_rows_around_every_edge(case):
    """Rows shorter than the window, the sinks and the budget, beside a long one."""
    lengths = [60, 1, 3, 4, 5, BUDGET - 1, BUDGET, BUDGET + 1]
    _check(build(), lambda model: case.make(model, reserve=3), lengths)


@by_core
@pytest.mark.parametrize("family, attention", each_family(lambda family: not family.all_sliding, every_attention=False))
def test_every_family(case, family, attention):
    _check(build(family, attention), case.make, [33, 9, 26])


@pytest.mark.feature("left-padded batches")
@by_all
def test_generate(case):
    model = build()
    rows = [tokens(40), tokens(23, seed=2), tokens(3, seed=4)]
    ids, mask = left_pad(rows)
    together = generate(model, ids, case.make(model), 24, attention_mask=mask)
    alone = [generate(model, row, case.make(model), 24) for row in rows]
    assert torch.equal(together, torch.cat(alone))


@by_method
@pytest.mark.parametrize("chunk", [8])
def test_padding_over_whole_chunks(case, chunk):
    """16 pads are whole chunks of 8, so the row alone is cut at the same tokens and must keep the same ones."""
    model = build()
    rows = [tokens(40), tokens(24, seed=2)]
    ids, mask = left_pad(rows)
    batch, alone = case.make(model), case.make(model)
    together = generate(model, ids, batch, 8, attention_mask=mask, prefill_chunk_size=chunk)
    assert torch.equal(together[1:], generate(model, rows[1], alone, 8, prefill_chunk_size=chunk))
    assert [layer[1] for layer in kept_in_all_layers(batch)] == [layer[0] for layer in kept_in_all_layers(alone)]


@pytest.mark.parametrize("case", [ALL["full"], ALL["streaming"]], ids=lambda case: case.id)
def test_padding_content_is_never_read(case):
    model = build()
    ids, mask = left_pad([tokens(30), tokens(14, seed=2)])
    other = ids.masked_fill(mask == 0, 77)
    out = [generate(model, x, case.make(model), 20, attention_mask=mask) for x in (ids, other)]
    assert torch.equal(*out)
