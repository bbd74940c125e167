"""Models that see: image tokens are cached and chosen like others, at whatever positions the model gives them."""

import inspect

import pytest
import torch
from helpers import decode, dense, generate, positions, tokens
from methods import ALL, AMPLE, BUDGET
from zoo import BY_NAME, build

IMAGE = 90  # what the zoo's configs call an image token
_PIXELS = torch.randn(1, 3, 28, 28, generator=torch.Generator().manual_seed(7))
_PATCHES = torch.randn(16, 3 * 2 * 4 * 4, generator=torch.Generator().manual_seed(7))
_GRID = torch.tensor([[1, 4, 4]])
INPUTS = {
    "llava": dict(pixel_values=_PIXELS),
    "gemma-3-vl": dict(pixel_values=_PIXELS),
    "qwen-2-vl": dict(pixel_values=_PATCHES, image_grid_thw=_GRID),
    "qwen-2.5-vl": dict(pixel_values=_PATCHES, image_grid_thw=_GRID),
    "qwen-3-vl": dict(pixel_values=_PATCHES, image_grid_thw=_GRID),
}
by_model = pytest.mark.parametrize("name", INPUTS)


def _prompt() -> torch.Tensor:
    """Text, one image of four tokens between its marks, text."""
    text = tokens(30)
    return torch.cat((text[:, :8], torch.tensor([[92, *[IMAGE] * 4, 93]]), text[:, 8:]), dim=1)


def _generate(model, name: str, cache, new: int = 12, **more):
    ids = _prompt()
    kinds = (ids == IMAGE).long()
    names = inspect.signature(model.forward).parameters
    kinds = {kind: kinds for kind in ("token_type_ids", "mm_token_type_ids") if kind in names}
    return generate(model, ids, cache, new, **INPUTS[name], **kinds, **more)


@by_model
@pytest.mark.parametrize("case", [ALL[name] for name in ("full", "snapkv", "h2o", "quest")], ids=lambda case: case.id)
def test_an_ample_budget_is_dense(name, case):
    model = build(BY_NAME[name])
    both = dict(return_dict_in_generate=True, output_logits=True)
    expected, got = (_generate(model, name, cache, **both) for cache in (dense(model), case.make(model, AMPLE)))
    assert torch.equal(got.sequences, expected.sequences)
    torch.testing.assert_close(torch.stack(got.logits), torch.stack(expected.logits), atol=5e-5, rtol=0)


@by_model
def test_the_image_matters_and_a_small_budget_holds(name):
    model = build(BY_NAME[name])
    mine = ALL["snapkv"].make(model)
    out = _generate(model, name, mine, return_dict_in_generate=True, output_logits=True)
    assert torch.stack(out.logits).isfinite().all()
    assert ALL["snapkv"].held(mine) == {BUDGET + 11}
    blind = generate(model, _prompt().masked_fill(_prompt() == IMAGE, 5), ALL["snapkv"].make(model), 12, return_dict_in_generate=True,
                     output_logits=True)  # fmt: skip
    assert not torch.allclose(blind.logits[0], out.logits[0], atol=1e-3)


@pytest.mark.parametrize("name", ["llava", "gemma-3-vl"])
def test_a_text_turn_after_the_image(name):
    model = build(BY_NAME[name])
    turns = []
    for cache in (dense(model), ALL["full"].make(model)):
        _generate(model, name, cache, 4)
        mask = torch.ones(1, _prompt().shape[1] + 3, dtype=torch.long)
        turns.append(decode(model, cache, tokens(3, seed=4), mask))
        assert int(positions(mask)[0, -1]) == mask.shape[1] - 1
    torch.testing.assert_close(turns[1], turns[0], atol=5e-5, rtol=0)
