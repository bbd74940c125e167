"""What the state machine found: tokens taken back until a row of the batch has none left."""

import pytest
import torch
from helpers import decode, forward, left_pad, positions, prefill, seen, tokens
from methods import ALL, METHODS
from tiny_models import build

from kvsparse_hf import SparseCache

CROPPABLE = [case for case in METHODS if not (case.evicts or case.rounds)]


def _cropped(case, model, rows, removed, **options):
    """A cache of padded prompts with tokens taken back, and the mask of what is left."""
    ids, mask = left_pad([tokens(length, seed=40 + length) for length in rows])
    mine = case.make(model, **options)
    prefill(model, mine, ids, mask)
    mine.crop(-removed)
    return mine, mask[:, :-removed]


@pytest.mark.parametrize("removed", [1, 2, 3])
@pytest.mark.parametrize("case", CROPPABLE, ids=lambda case: case.id)
def test_a_row_without_tokens_survives_a_file_and_goes_on(case, removed, tmp_path):
    """Its padding ends where the cache now ends; the next tokens are its first ones."""
    model = build()
    mine, mask = _cropped(case, model, (1, 9), removed)
    assert mine.session.pad.tolist() == [min(8, 9 - removed), 0]
    mine.save(tmp_path)
    loaded = SparseCache.load(tmp_path, model)
    alone = case.make(model)
    message = tokens(4, 2, seed=7)
    grown = torch.cat((mask, mask.new_ones(2, 4)), dim=1)
    expected = forward(model, message[:1], alone)
    for cache in (mine, loaded):
        at = positions(grown)[:, -4:]
        out = forward(model, message, cache, attention_mask=grown, position_ids=at)
        torch.testing.assert_close(out[:1], expected, atol=2e-5, rtol=0)
        assert seen(cache) == 13 - removed and cache.report().seen == [4, 13 - removed]


@pytest.mark.parametrize(
    "case", [ALL["quest"], ALL["loki"], ALL["hisparse"], ALL["cla-quest"]], ids=lambda case: case.id
)
def test_all_layers_read_alike_in_the_step_that_gives_a_row_its_first_token(case):
    """The first layer counted the token, and the others then took the step for an ordinary one, which reads a selection."""
    model = build()
    reference = case.dense(model)
    mine, mask = _cropped(case, model, (1, 30), 1)
    ids, _ = left_pad([tokens(1, seed=41), tokens(30, seed=70)])
    prefill(model, reference, ids[1:, :-1])
    step = tokens(1, 2, seed=3)
    torch.testing.assert_close(
        decode(model, mine, step, mask)[1:], decode(model, reference, step[1:]), atol=2e-5, rtol=0
    )
