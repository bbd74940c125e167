"""A cache with all its tiers through the kernels: what the torch references give, and the same tokens in the same places."""

from __future__ import annotations

import pytest
import torch
from helpers import decode, forward, left_pad, prefill, tokens
from tiny_models import build

from kvsparse_hf import H2OCache, TieredCache

ALL_TIERS = dict(hbm=0.3, host=0.2, quantized=0.3, evicted=0.2, group=8)


def _run(make, family: str, backend: str, device: str) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Logits of 7 steps (one ranking between them) and of a second turn; positions and scores of every tier."""
    model = build(family).to(device)
    ids, mask = (x.to(device) for x in left_pad([tokens(30), tokens(1, seed=2)]))
    cache = make(model, backend)
    prefill(model, cache, ids, mask)
    out = [decode(model, cache, tokens(7, 2, seed=4).to(device), mask)]
    mask = torch.cat((mask, mask.new_ones(2, 11)), dim=1)
    turn = dict(attention_mask=mask, position_ids=(mask.cumsum(-1) - 1)[:, -4:])
    out.append(forward(model, tokens(4, 2).to(device), cache, **turn))
    state = [t for layer in cache.sparse_layers for store in layer.stores for t in (store.positions, store.length)]
    return torch.cat(out, dim=1), [t.clone() for t in state]


def _tiered(**options):
    return lambda model, backend: TieredCache(model, sinks=1, recent=3, interval=5, reserve=16, backend=backend, **options)


@pytest.mark.parametrize(
    "family, make",
    [
        pytest.param("llama-gqa2", _tiered(**ALL_TIERS, bits=8), id="int8", marks=pytest.mark.slow),
        pytest.param("gpt-oss", _tiered(**ALL_TIERS, bits=4), id="int4-sinks"),
        pytest.param("llama-gqa2", _tiered(**ALL_TIERS, bits="fp8", scorer="last"), id="fp8-last", marks=pytest.mark.slow),
        pytest.param("gpt-oss", lambda model, backend: H2OCache(model, budget=12, action="offload", interval=5, backend=backend),
                     id="h2o-offload-sinks"),
    ],
)  # fmt: skip
def test_kernels_give_what_the_references_give(target, family, make):
    if target.backend == "torch":
        pytest.skip("the references are compared with themselves")
    expected, places = _run(make, family, "torch", "cpu")
    got, mine = _run(make, family, target.backend, target.device)
    torch.testing.assert_close(got.cpu(), expected, atol=2e-5 if target.device == "cpu" else 1e-3, rtol=1e-5)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(mine, places, strict=True))
