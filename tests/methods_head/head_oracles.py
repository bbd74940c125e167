"""The rules of the head-level methods by brute force in fp64, for one row without padding; no code shared with the library."""

import math

import torch


def window_scores(row, head, scale, read, queries, kernel):
    """SnapKV with max pooling: `{position: score}` of the tokens before the window."""
    size = row.q.shape[0] // row.k.shape[0]
    total = torch.zeros(len(read), dtype=torch.float64)
    for t in queries:
        seen = [i for i, j in enumerate(read) if j <= t]
        logits = row.q[head * size : (head + 1) * size, t].double() @ row.k[head, [read[i] for i in seen]].double().T * scale
        total[seen] += torch.softmax(logits, -1).mean(0)
    before = len(read) - len(queries)
    pooled = {}
    for i in range(before):
        pooled[read[i]] = max(float(total[x]) for x in range(max(0, i - kernel // 2), min(before, i + kernel // 2 + 1)))
    return pooled


def by_hand(weights, total, caps):
    """Largest remainder with caps, one head after the other."""
    given = [0] * len(weights)
    closed = [cap == 0 for cap in caps]
    total = min(total, sum(caps))
    while sum(given) < total:
        left = total - sum(g for g, c in zip(given, closed, strict=True) if c)
        weight = sum(w for w, c in zip(weights, closed, strict=True) if not c)
        even = weight == 0
        weight = weight or sum(not c for c in closed)
        exact = {h: left * (1 if even else weights[h]) / weight for h in range(len(weights)) if not closed[h]}
        share = {h: math.floor(x) for h, x in exact.items()}
        for h in sorted(exact, key=lambda h: (-(exact[h] - share[h]), h))[: left - sum(share.values())]:
            share[h] += 1
        for h, s in share.items():
            given[h] = min(s, caps[h])
            closed[h] = given[h] == caps[h]
    return given


def adaptive_choice(scores, safe, budget, alpha, official=False):
    """Ada-KV for one layer.

    Args:
        scores: one `{position: score}` per head of what may go; safe: one list per head of what may not.
    """
    heads = range(len(scores))
    total = sum(budget - len(safe[h]) for h in heads)
    ranked = sorted((-s, h, j) for h in heads for j, s in scores[h].items())
    number = [sum(h == head for _, h, _ in ranked[:total]) for head in heads]
    average = total / len(scores)
    if official:
        count = [min(round((1 - alpha) * n + math.floor(alpha * average)), len(scores[h])) for h, n in enumerate(number)]
    else:
        count = by_hand([(1 - alpha) * n + alpha * average for n in number], total, [len(s) for s in scores])
    return [sorted(safe[h] + sorted(scores[h], key=lambda j: (-scores[h][j], j))[: count[h]]) for h in heads]


def table_choice(table, budget, window, length, beta):
    """HeadKV: entries per layer and head, window included."""
    free = budget - window
    pool = int(free / beta)
    flat = [x for layer in table for x in layer]
    wanted = [x / sum(flat) * pool * len(flat) + free - pool for x in flat]
    count = by_hand(wanted, free * len(flat), [length - window] * len(flat))
    heads = len(table[0])
    return [[window + n for n in count[first : first + heads]] for first in range(0, len(flat), heads)]


def spanned(length, span, sinks):
    """First and newest tokens, `span` in all."""
    return list(range(length)) if length <= span else [*range(sinks), *range(length - (span - sinks), length)]
