"""Independent oracles for the ops, in fp64 and as plain as possible, and helpers that make inputs."""

from __future__ import annotations

import math

import torch
from torch import Tensor

# relative error in norm: fp32 arithmetic; half-precision operands and outputs with fp32 sums
TOLERANCE = {torch.float32: 2e-5, torch.float16: 1.5e-3, torch.bfloat16: 1e-2}


def assert_near(actual: Tensor, expected: Tensor, dtype: torch.dtype = torch.float32, factor: float = 1.0) -> None:
    """Same infinities, no NaN, and a small relative error in norm over the finite part."""
    actual, expected = actual.detach().double().cpu(), expected.detach().double().cpu()
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    assert not actual.isnan().any(), "NaN"
    infinite = expected.isinf()
    where_infinite = torch.where(infinite, expected, 0), torch.where(actual.isinf(), actual, 0)
    assert torch.equal(*where_infinite), "infinities differ"
    actual, expected = torch.where(infinite, 0, actual), torch.where(infinite, 0, expected)
    difference, limit = actual - expected, factor * TOLERANCE[dtype]
    sizes = difference.norm().item(), max(expected.norm().item(), 1e-3)
    assert sizes[0] <= limit * sizes[1], (*sizes, limit)
    if difference.numel():  # an error that is large in one place can hide in the norm
        assert difference.abs().max() <= 30 * limit * max(expected.abs().max().item(), 1e-3)


def ragged_store(lengths: Tensor, dim: int, dim_v: int, dtype: torch.dtype, device: str, slack: int = 5, gap: int = 3):
    """A store whose segments have slack at their end and gaps between, poisoned with NaN wherever nothing is valid.

    Returns k, v, start, length, capacity (the last three [B, H]).
    """
    capacity = lengths + slack
    starts, row = [], gap
    for size in capacity.flatten().tolist():
        starts.append(row)
        row += size + gap
    start = torch.tensor(starts).view(lengths.shape)
    k = torch.full((row, dim), float("nan"), dtype=dtype)
    v = torch.full((row, dim_v), float("nan"), dtype=dtype)
    for first, length in zip(starts, lengths.flatten().tolist(), strict=True):
        k[first : first + length] = torch.randn(length, dim).to(dtype)
        v[first : first + length] = torch.randn(length, dim_v).to(dtype)
    return k.to(device), v.to(device), start.to(device), lengths.int().to(device), capacity.int().to(device)


def _logit(q: Tensor, keys: Tensor, scale: float, softcap: float) -> Tensor:
    logits = (keys * q).sum(-1) * scale
    return torch.tanh(logits / softcap) * softcap if softcap else logits


def _attend(logits: Tensor, values: Tensor, sink: float | None) -> tuple[Tensor, Tensor]:
    everything = logits if sink is None else torch.cat([logits, torch.tensor([sink], dtype=torch.float64)])
    if everything.numel() == 0:
        return torch.zeros(values.shape[-1], dtype=torch.float64), torch.tensor(-math.inf, dtype=torch.float64)
    lse = everything.logsumexp(0)
    return (torch.exp(logits - lse)[:, None] * values).sum(0), lse


def decode_oracle(q, k, v, start, length, *, scale, width, softcap=0.0, sinks=None, pages=None, page_size=0):
    """out [B, Hq, Dv], lse [B, Hq], logits [B, Hq, width] in fp64, one head at a time."""
    q, k, v = (x.double().cpu() for x in (q, k, v))
    batch, heads_q, _ = q.shape
    group = heads_q // start.shape[1]
    out = torch.zeros(batch, heads_q, v.shape[-1], dtype=torch.float64)
    lse = torch.zeros(batch, heads_q, dtype=torch.float64)
    logits = torch.full((batch, heads_q, width), -math.inf, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads_q):
            first, count = int(start[b, h // group]), int(length[b, h // group])
            if pages is None:
                slots = {i: i for i in range(count)}
            else:
                slots = {}
                for i, page in enumerate(pages[b, h // group].tolist()):
                    for within in range(page_size if page >= 0 else 0):
                        if page * page_size + within < count:
                            slots[i * page_size + within] = page * page_size + within
            rows = torch.tensor([first + slot for slot in slots.values()], dtype=torch.long)
            row_logits = _logit(q[b, h], k[rows], scale, softcap)
            logits[b, h, torch.tensor(list(slots), dtype=torch.long)] = row_logits
            out[b, h], lse[b, h] = _attend(row_logits, v[rows], None if sinks is None else float(sinks[h]))
    return out, lse, logits


def chunk_oracle(q, k, v, start, length, k_new, v_new, *, scale, pad=None, softcap=0.0, sinks=None):
    """out [B, Hq, T, Dv] and lse [B, Hq, T] in fp64, one query at a time."""
    q, k, v, k_new, v_new = (x.double().cpu() for x in (q, k, v, k_new, v_new))
    batch, heads_q, tokens, _ = q.shape
    group = heads_q // start.shape[1]
    out = torch.zeros(batch, heads_q, tokens, v.shape[-1], dtype=torch.float64)
    lse = torch.full((batch, heads_q, tokens), -math.inf, dtype=torch.float64)
    for b in range(batch):
        first_real = 0 if pad is None else int(pad[b])
        for h in range(heads_q):
            kv = h // group
            rows = slice(int(start[b, kv]), int(start[b, kv]) + int(length[b, kv]))
            for t in range(first_real, tokens):
                keys = torch.cat([k[rows], k_new[b, kv, first_real : t + 1]])
                values = torch.cat([v[rows], v_new[b, kv, first_real : t + 1]])
                sink = None if sinks is None else float(sinks[h])
                out[b, h, t], lse[b, h, t] = _attend(_logit(q[b, h, t], keys, scale, softcap), values, sink)
    return out, lse


def columns_oracle(q, k, *, scale, pad=None, softcap=0.0, group_reduce="mean"):
    """Received attention [B, H, N] and lse [B, Hq, W] in fp64, one query at a time."""
    q, k = q.double().cpu(), k.double().cpu()
    batch, heads_q, window, _ = q.shape
    heads, total = k.shape[1:3]
    sums = torch.zeros(batch, heads_q, total, dtype=torch.float64)
    lse = torch.full((batch, heads_q, window), -math.inf, dtype=torch.float64)
    for b in range(batch):
        first = 0 if pad is None else int(pad[b])
        for h in range(heads_q):
            for w in range(window):
                at = total - window + w
                if at < first:
                    continue
                logits = _logit(q[b, h, w], k[b, h // (heads_q // heads), first : at + 1], scale, softcap)
                sums[b, h, first : at + 1] += logits.softmax(0)
                lse[b, h, w] = logits.logsumexp(0)
    grouped = sums.view(batch, heads, -1, total)
    reduced = {"mean": grouped.mean(2), "sum": grouped.sum(2), "max": grouped.amax(2)}[group_reduce]
    return reduced, lse
