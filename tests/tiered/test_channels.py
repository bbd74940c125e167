"""Channels of keys that are unlike: what a quantized tier learns of them from the prompt."""

import copy

import pytest
import torch
from torch.testing import assert_close

from kvsparse_hf import ops
from kvsparse_hf.layers.base import AttentionCall
from kvsparse_hf.layers.tiers import Coding, QuantizedTier

ROWS, HEADS, GROUP, DIM, TOKENS = 2, 2, 3, 32, 60
CALL = AttentionCall(scale=DIM**-0.5, softcap=0.0, sinks=None)


def _keys(tokens=TOKENS):
    """Offsets of up to 60 and sizes of 0.1 to 20, another in each channel and head."""
    torch.manual_seed(3)
    size = torch.logspace(-1, 1.3, DIM)[torch.stack([torch.randperm(DIM) for _ in range(ROWS * HEADS)])].view(ROWS, HEADS, 1, DIM)
    return torch.randn(ROWS, HEADS, tokens, DIM) * size + 3 * size * torch.randn(ROWS, HEADS, 1, DIM)


def _tier(keys, fitted=True, format="int4", pad=(0, 0)):
    """A tier that holds all keys of a prompt and random values."""
    values = torch.randn_like(keys)
    tier = QuantizedTier(Coding(format, 16), torch.full((ROWS, HEADS), keys.shape[2] + 5), keys, values)
    pad = torch.tensor(pad).view(ROWS, 1).expand(ROWS, HEADS)
    if fitted:
        tier.fit(keys, pad)
    tier.open_all()
    tier.length.copy_(keys.shape[2] - pad)
    rows, valid = tier.slots()
    real = torch.arange(keys.shape[2]) >= pad.unsqueeze(-1)
    tier.put(rows[valid], keys[real], values[real])
    return tier, values


def _exact(query, keys, values):
    logits = torch.einsum("bhgd,bhnd->bhgn", query.unflatten(1, (HEADS, GROUP)).double(), keys.double()) * CALL.scale
    out = torch.einsum("bhgn,bhnd->bhgd", logits.softmax(-1), values.double())
    return out.flatten(1, 2), logits.flatten(1, 2)


@pytest.mark.parametrize("format", ["int8", "int4", "fp8"])
def test_large_channels_leave_the_small_ones_their_bits(format):
    keys, query = _keys(), torch.randn(ROWS, HEADS * GROUP, DIM)
    errors = []
    for fitted in (True, False):
        tier, values = _tier(keys, fitted, format)
        _, logits = _exact(query, keys, values)
        mine = tier.attend(query, CALL, None, True, True, "torch")[2][..., :TOKENS]
        errors.append(float((mine - logits).pow(2).mean().sqrt()))
    assert errors[0] < 0.4 * errors[1]


def test_parts_are_those_of_the_keys_that_come_back():
    """Output, logs of the denominators and logits, the offsets included."""
    tier, _ = _tier(_keys())
    query = torch.randn(ROWS, HEADS * GROUP, DIM)
    rows, _ = tier.slots(TOKENS)
    out, logits = _exact(query, *tier.fetch(rows))
    mine = tier.attend(query, CALL, None, True, True, "torch")
    assert_close(mine[0].double(), out, atol=1e-4, rtol=0)
    assert_close(mine[1].double(), logits.logsumexp(-1), atol=1e-3, rtol=0)
    assert_close(mine[2][..., :TOKENS].double(), logits, atol=1e-3, rtol=0)


def test_capped_logits_hold_the_offsets_inside_the_cap():
    tier, _ = _tier(_keys())
    query = torch.randn(ROWS, HEADS * GROUP, DIM)
    call = AttentionCall(scale=CALL.scale, softcap=20.0, sinks=None)
    keys, values = tier.fetch(torch.arange(len(tier.positions)))
    options = dict(max_len=tier.max_capacity, scale=call.scale, softcap=20.0, backend="torch")
    expected, _, _ = ops.decode_attention(query, keys, values, tier.start, tier.length, **options)
    assert_close(tier.attend(query, call, None, False, False, "torch")[0], expected)


def test_padding_is_not_looked_at_and_short_prompts_are_coded_as_they_are():
    keys = _keys(40)
    keys[0, :, :20] = 1e6  # padding
    tier, _ = _tier(keys, pad=(20, 0))
    assert torch.equal(tier.center[0], torch.zeros(HEADS, DIM)) and torch.equal(tier.spread[0], torch.ones(HEADS, DIM))
    assert_close(tier.center[1], keys[1].mean(1))
    assert_close(tier.spread[1], (keys[1] - keys[1].mean(1, keepdim=True)).abs().amax(1))
    keys[0, :, :5] = 1e6
    tier, _ = _tier(keys, pad=(5, 0))
    assert float(tier.center[0].abs().max()) > 1e3  # 15 of the 35 that count


def test_a_channel_that_never_changes():
    keys = _keys()
    keys[..., 4] = 7.5
    tier, _ = _tier(keys)
    rows, _ = tier.slots(TOKENS)
    assert_close(tier.spread[..., 4], tier.spread.amax(-1) / 1000)
    assert_close(tier.fetch(rows)[0][..., 4], keys[..., 4], atol=0.01, rtol=0)


def test_what_was_learned_follows_the_rows():
    tier, _ = _tier(_keys())
    grown, twin = tier.grown(tier.allocated + 9), copy.deepcopy(tier)
    loaded = QuantizedTier(tier.coding, tier.allocated, *tier._likes())
    loaded.load(tier.tensors())
    for other in (grown, twin, loaded):
        assert torch.equal(other.fetch(other.slots(TOKENS)[0])[0], tier.fetch(tier.slots(TOKENS)[0])[0])
    before = tier.fetch(tier.slots(TOKENS)[0])[0].clone()
    swapped = tier.select_batch(torch.tensor([1, 0]))
    assert torch.equal(swapped.fetch(swapped.slots(TOKENS)[0])[0], before.flip(0))
