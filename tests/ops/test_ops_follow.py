"""follow_token and record_token against plain Python models: what is remembered, and nothing written elsewhere."""

from __future__ import annotations

import math

import pytest
import torch
from ops_oracle import ragged_store

from kvsparse_hf import ops


def _inputs(lengths, spare, group, device, seed=0):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor(lengths)
    k, v, start, length, _ = ragged_store(lengths, 8, 8, torch.float32, "cpu")
    batch, heads = lengths.shape
    rows, width = k.shape[0], int(lengths.max()) + spare
    scores = torch.full((rows,), 7.0)
    pos = torch.full((rows,), -5, dtype=torch.int32)
    newest = torch.tensor([int(lengths[b].max()) * 2 + b for b in range(batch)], dtype=torch.int32)
    for b in range(batch):
        for h in range(heads):
            n, first = int(lengths[b, h]), int(start[b, h])
            others = torch.randperm(int(newest[b]), generator=generator)[: n - 1]
            at = torch.cat((others, newest[b : b + 1]))[torch.randperm(n, generator=generator)]
            pos[first : first + n] = at.int()
            scores[first : first + n] = torch.rand(n, generator=generator)
    slot = torch.arange(width)
    q = torch.randn(batch, heads * group, width, generator=generator) * 2
    logits = q.masked_fill(slot >= lengths.repeat_interleave(group, 1).unsqueeze(-1), -math.inf)
    lse = torch.logsumexp(logits, -1)
    cursor = torch.full((batch, heads), -9, dtype=torch.int32)
    return [t.to(device) for t in (scores, cursor, pos, logits, lse, start, length.int(), length.int(), newest)]


def _expected(inputs, decay=1.0, accumulate=True, per_query=False, across_heads=False, sinks=0, recent=0):
    scores, cursor, pos, logits, lse, start, length, capacity, newest = (t.cpu() for t in inputs)
    scores, cursor = scores.double().clone(), cursor.clone()
    heads = start.shape[1]
    group = logits.shape[1] // heads
    for b in range(start.shape[0]):
        for h in range(heads):
            n, first = int(length[b, h]), int(start[b, h])
            mine = slice(None) if across_heads else slice(h * group, (h + 1) * group)
            weights = torch.exp(logits[b, mine, :n].double() - lse[b, mine, None].double()).mean(0)
            now, cap, worth = int(newest[b]), int(capacity[b, h]), {}
            tail = cap // 2 if recent < 0 else min(cap, recent)
            tail = min(tail, max(cap - sinks, 1))
            sink = min(cap - tail, sinks)
            for i in range(n):
                at = int(pos[first + i])
                old = 0.0 if at == now or not accumulate else float(scores[first + i])
                scores[first + i] = old * decay + weights[i]
                if at >= sink and at <= now - (tail - 1):
                    seen = sum(decay**age for age in range(now - at + 1)) if per_query else 1.0
                    worth[i] = (float(scores[first + i]) / seen, -at)
            cursor[b, h] = min(worth, key=worth.get)
    return scores, cursor


@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("lengths", [[[9, 9]], [[5, 17, 1], [8, 2, 33]], [[40]]], ids=str)
@pytest.mark.parametrize(
    "rule",
    [
        dict(recent=-1),
        dict(recent=3, sinks=2),
        dict(decay=0.9, recent=1),
        dict(per_query=True, recent=2),
        dict(per_query=True, decay=0.8, recent=2),
        dict(accumulate=False, across_heads=True),
        dict(recent=100, sinks=100),
    ],
    ids=str,
)
def test_against_the_model(target, lengths, group, rule):
    if rule.get("across_heads") and len(set(lengths[0])) > 1:
        pytest.skip("one set for all heads: the segments are alike")
    inputs = _inputs(lengths, 3, group, target.device)
    scores, cursor = _expected(inputs, **rule)
    ops.follow_token(*inputs, **rule, backend=target.backend)
    assert torch.equal(inputs[1].cpu(), cursor)
    assert torch.allclose(inputs[0].cpu().double(), scores, atol=1e-6)


def test_long_segments_take_several_blocks(target):
    inputs = _inputs([[2300, 1025]], 0, 2, target.device)
    scores, cursor = _expected(inputs, recent=-1)
    ops.follow_token(*inputs, recent=-1, backend=target.backend)
    assert torch.equal(inputs[1].cpu(), cursor) and torch.allclose(inputs[0].cpu().double(), scores, atol=1e-6)


@pytest.mark.parametrize("rule", [dict(recent=-1), dict(accumulate=False, across_heads=True)], ids=str)
def test_many_query_heads_take_several_turns(target, rule):
    inputs = _inputs([[1300, 1300]], 0, 11, target.device)
    scores, cursor = _expected(inputs, **rule)
    ops.follow_token(*inputs, **rule, backend=target.backend)
    assert torch.equal(inputs[1].cpu(), cursor) and torch.allclose(inputs[0].cpu().double(), scores, atol=1e-6)


def test_ties_give_up_the_newest(target):
    inputs = _inputs([[12, 12]], 0, 1, target.device)
    scores, cursor, pos, logits, lse, start = inputs[:6]
    scores.zero_()
    logits.zero_()
    lse.fill_(math.log(12))
    ops.follow_token(*inputs, recent=3, backend=target.backend)
    for h in range(2):
        at = pos[int(start[0, h]) : int(start[0, h]) + 12]
        free = at[at <= int(inputs[8][0]) - 2]
        assert int(at[int(cursor[0, h])]) == int(free.max())


def test_heads_that_share_a_set_agree_to_the_bit(target):
    inputs = _inputs([[30, 30, 30]], 0, 2, target.device)
    ops.follow_token(*inputs, accumulate=False, across_heads=True, backend=target.backend)
    first = [inputs[0][int(s) : int(s) + 30] for s in inputs[5][0]]
    assert torch.equal(first[0], first[1]) and torch.equal(first[0], first[2])


def test_compiles_and_writes_in_place(target):
    backend = "aot_eager" if target.device == "cpu" else "inductor"
    inputs = _inputs([[9, 6]], 2, 2, target.device)
    other = [t.clone() for t in inputs]
    step = torch.compile(
        lambda *t: ops.follow_token(*t, recent=2, decay=0.9, backend=target.backend), fullgraph=True, backend=backend
    )
    for _ in range(3):
        ops.follow_token(*inputs, recent=2, decay=0.9, backend=target.backend)
        step(*other)
    assert all(torch.equal(a, b) for a, b in zip(inputs, other, strict=True))


# --- record_token ------------------------------------------------------------------------------------------------------


def _bit(history, row: int, place: int) -> int:
    return int(history[row, place // 31]) >> (place % 31) & 1


@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("lengths", [[[9, 9]], [[5, 17, 1], [8, 2, 33]], [[1300]]], ids=str)
@pytest.mark.parametrize(("window", "use_max"), [(2, False), (31, True), (63, False), (400, True)])
def test_record_against_the_model(target, lengths, group, window, use_max):
    scores, _, pos, logits, lse, start, length, _, newest = _inputs(lengths, 3, group, target.device)
    words = -(-window // 31)
    before = torch.randint(0, 2**31, (scores.shape[0], words), dtype=torch.int32)
    history, received = before.clone().to(target.device), scores.clone()
    old = scores.cpu().clone()
    options = dict(window=window, use_max=use_max)
    ops.record_token(history, received, pos, logits, lse, start, length, newest, **options, backend=target.backend)
    history, received = history.cpu(), received.cpu()
    touched = torch.zeros(len(old), dtype=torch.bool)
    for b in range(start.shape[0]):
        place = int(newest[b]) % window
        for h in range(start.shape[1]):
            n, first = int(length[b, h]), int(start[b, h])
            mine = slice(h * group, (h + 1) * group)
            weights = torch.exp(logits[b, mine, :n].cpu().double() - lse[b, mine, None].cpu().double())
            used = weights.amax(0) if use_max else weights.mean(0)
            for i in range(n):
                row = first + i
                touched[row] = True
                is_new = int(pos[row]) == int(newest[b])
                assert _bit(history, row, place) == int(used[i] < (1 - 1e-5) / n)
                for other in set(range(words * 31)) - {place}:
                    assert _bit(history, row, other) == (0 if is_new else _bit(before, row, other))
                want = (0.0 if is_new else float(old[row])) * (1 - 1 / window) + float(weights[:, i].mean())
                assert float(received[row]) == pytest.approx(want, abs=1e-6)
    assert torch.equal(history[~touched], before[~touched]) and torch.equal(received[~touched], old[~touched])


def test_record_compiles_and_writes_in_place(target):
    backend = "aot_eager" if target.device == "cpu" else "inductor"
    scores, _, pos, logits, lse, start, length, _, newest = _inputs([[9, 6]], 2, 2, target.device)
    runs = []
    for compiled in (False, True):
        history = torch.zeros(scores.shape[0], 2, dtype=torch.int32, device=target.device)
        received = scores.clone()

        def step(*t):
            ops.record_token(*t, window=40, backend=target.backend)

        call = torch.compile(step, fullgraph=True, backend=backend) if compiled else step
        for moved in range(3):
            call(history, received, pos, logits, lse, start, length, newest + moved)
        runs.append((history, received))
    assert torch.equal(runs[0][0], runs[1][0]) and torch.equal(runs[0][1], runs[1][1])


def test_opcheck(target):
    if target.backend == "torch":
        pytest.skip("the reference is no registered op")
    checks = dict(test_utils=("test_schema", "test_autograd_registration", "test_faketensor"))
    inputs = _inputs([[9, 6]], 2, 2, target.device)
    rule = (0.9, math.log2(0.9), True, True, False, 1, 2)
    torch.library.opcheck(torch.ops.kvsparse.follow_token, (*inputs, *rule), {}, **checks)
    scores, _, pos, logits, lse, start, length, _, newest = inputs
    history = torch.zeros(scores.shape[0], 2, dtype=torch.int32, device=target.device)
    torch.library.opcheck(
        torch.ops.kvsparse.record_token, (history, scores, pos, logits, lse, start, length, newest, 40, True), {}, **checks
    )
