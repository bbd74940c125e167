"""Recall of what a step reads, with a model's own queries; used by selection.py.

For the last queries of a prompt, and each query head by itself: which share of its exact top 100 keys (sinks and recents
aside) does the step read, and which share of its attention? And how far is the output of the shared selection from dense?
"""

from pathlib import Path

import torch
from torch import Tensor

import kvsparse_hf as kv
from kvsparse_hf import ops
from kvsparse_hf.bench.timing import Results
from kvsparse_hf.layers.selectors.base import dense_view
from kvsparse_hf.policy.reading import key_logits, per_query_head

QUERIES, TOP, EVERY = 32, 100, 3  # queries, exact neighbours, and which layers (every third)
BUDGETS = [128, 192, 256, 384, 512, 1024]
ZONES = dict(sinks=4, recent=64)
# The shared selection, with the estimate of the next clusters and without it.
ESTIMATES = {
    f"ivf-{train_on}-{what}": dict(train_on=train_on, estimate=share)
    for train_on in ("keys", "queries")
    for what, share in (("dropped", 0.0), ("estimated", 0.232))
}


def backends(budget: int) -> dict:
    """Caches whose query heads choose for themselves, as in RetrievalAttention."""
    retrieval = dict(budget=budget, per_query_head=True, **ZONES)
    return {
        "flat": lambda model: kv.RetrievalAttentionCache(model, index="flat", **retrieval),
        "ivf-keys": lambda model: kv.RetrievalAttentionCache(model, **retrieval),
        "ivf-queries": lambda model: kv.RetrievalAttentionCache(model, train_on="queries", **retrieval),
        "hnsw-keys": lambda model: kv.RetrievalAttentionCache(model, index="hnsw", effort=TOP, **retrieval),
        "hnsw-queries": lambda model: kv.RetrievalAttentionCache(model, index="hnsw", effort=TOP, train_on="queries", **retrieval),
        "loki": lambda model: kv.LokiCache(model, budget=budget, per_query_head=True, **ZONES),
        "quest": lambda model: kv.QuestCache(model, budget=budget, dense_layers=0, per_query_head=True, **ZONES),
    }


def read_mask(layer, pages: Tensor, heads: int) -> Tensor:
    """`[B, heads, C]`: which slots the pages cover."""
    size = layer.selector.page_size
    mask = torch.zeros(*pages.shape[:2], layer.store.max_capacity // size + 1, dtype=torch.bool, device=pages.device)
    mask.scatter_(-1, torch.where(pages >= 0, pages, mask.shape[-1] - 1).long(), True)
    return per_query_head(mask[..., :-1].repeat_interleave(size, dim=-1), heads)


def judge(layer, queries: Tensor, call) -> tuple[float, float, float]:
    """Recall at `TOP`, share of the attention, and slots read, in the mean over queries and heads. `queries` `[B, Hq, T, D]`."""
    selector, store = layer.selector, layer.store
    slot, length = torch.arange(store.max_capacity, device=store.keys.device), int(store.length.max())
    between = (slot >= ZONES["sinks"]) & (slot < length - ZONES["recent"])
    recall, mass, read = [], [], []
    for at in range(queries.shape[2]):
        query = selector.enter(queries[:, :, at])
        logits = key_logits(query, dense_view(store, store.keys), call.scale, call.softcap).flatten(1, 2)
        logits = logits.masked_fill(slot >= length, float("-inf"))
        mask = read_mask(layer, selector.select(query, store, call).pages, logits.shape[1]) & (slot < length)
        best = logits.masked_fill(~between, float("-inf")).topk(TOP, dim=-1).indices
        recall.append(mask.gather(-1, best).float().mean())
        mass.append((logits.softmax(-1) * mask).sum(-1).mean())
        read.append(mask.sum(-1).float().mean())
    return tuple(float(torch.stack(values).mean()) for values in (recall, mass, read))


def output_error(layer, queries: Tensor, call) -> float:
    """Mean relative distance of the step's output from dense attention."""
    selector, store, errors = layer.selector, layer.store, []
    for at in range(queries.shape[2]):
        query = queries[:, :, at]
        dense, _, _ = ops.decode_attention(
            query, store.keys, store.values, store.start, store.length, max_len=store.max_capacity, scale=call.scale
        )
        selection = selector.select(query, store, call)
        out, lse = layer.read(query, selection.pages, call)
        out = selector.finish(out, lse, selection, store, call)
        errors.append(((out - dense).norm(dim=-1) / dense.norm(dim=-1)).mean())
    return float(torch.stack(errors).mean())


def measure_recall(model, recording, results: Results, only: list[str] | None = None) -> None:
    """Rows `recall@100`, `attention_read` and `read_tokens` by backend and budget, and `output_error` of the estimate."""
    context = recording.get_seq_length()
    cut = int(context) - QUERIES
    name = model.config._name_or_path.split("/")[-1]
    layers = range(0, len(recording.sparse_layers), EVERY)
    asked = {i: torch.cat([q for q, _, _ in recording.sparse_layers[i].given], dim=2)[:, :, cut:] for i in layers}
    samples = len(asked) * QUERIES * next(iter(asked.values())).shape[1]
    shape = {"model": name, "batch": 1, "context": cut, "layers": len(asked), "queries": QUERIES}

    def add(case: str, metric: str, values: list[float], unit: str, budget: int) -> None:
        results.add(case, metric, round(sum(values) / len(values), 4), unit, {**shape, "budget": budget}, samples)

    for backend, make in backends(BUDGETS[-1]).items():
        if only and backend not in only:
            continue
        cache = recording.replay(make(model), cut, layers)
        for budget in BUDGETS:
            judged = [judge(_at(cache, i, budget), asked[i], recording.sparse_layers[i].call) for i in layers]
            recall, mass, read = map(list, zip(*judged, strict=True))
            add(backend, f"recall@{TOP}", recall, "share", budget)
            add(backend, "attention_read", mass, "share", budget)
            add(backend, "read_tokens", read, "tokens", budget)
            print(f"{backend} at {budget}: recall {sum(recall) / len(recall):.3f}", flush=True)
    for case, options in ESTIMATES.items():
        if only and case not in only:
            continue
        cache = recording.replay(kv.RetrievalAttentionCache(model, budget=BUDGETS[-1], **options, **ZONES), cut, layers)
        for budget in BUDGETS:
            errors = [output_error(_at(cache, i, budget), asked[i], recording.sparse_layers[i].call) for i in layers]
            add(case, "output_error", errors, "relative", budget)


def _at(cache, index: int, budget: int):
    """A layer, told to read so much."""
    layer = cache.sparse_layers[index]
    layer.selector.set_budget(torch.tensor([budget]), layer.device)
    return layer


def draw_recall(rows: list[dict], path: Path) -> None:
    """Recall and attention against the tokens read; error of the output with and without the estimate."""
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 3, figsize=(15, 4.5))
    value = {(r["case"], r["metric"], r["shape"]["budget"]): r["value"] for r in rows}
    budgets = sorted({r["shape"]["budget"] for r in rows if r["metric"] == "output_error"})
    for panel, metric in zip(panels, (f"recall@{TOP}", "attention_read"), strict=False):
        for case in dict.fromkeys(r["case"] for r in rows if r["metric"] == metric):
            read = [value[case, "read_tokens", b] for b in budgets]
            style = "--" if case.endswith("queries") else "-"
            panel.plot(read, [value[case, metric, b] for b in budgets], style, marker="o", label=case)
        panel.set(xlabel="tokens that a query head reads", ylabel=metric.replace("_", " "), xscale="log")
        panel.legend(fontsize=8)
    for case in dict.fromkeys(r["case"] for r in rows if r["metric"] == "output_error"):
        style = "--" if case.endswith("dropped") else "-"
        panels[2].plot(budgets, [value[case, "output_error", b] for b in budgets], style, marker="o", label=case)
    panels[2].set(xlabel="budget", ylabel="relative error of the attention output", xscale="log")
    panels[2].legend(fontsize=8)
    shape = next(r["shape"] for r in rows if r["metric"] == "output_error")
    figure.suptitle(f"{shape['model']}, {shape['context']} tokens, {shape['queries']} real queries, {shape['layers']} layers")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
