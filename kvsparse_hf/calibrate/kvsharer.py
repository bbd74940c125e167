"""KVSharer's plan: which layers of a model can read the keys and values of earlier ones."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from ..errors import KVSparseError
from ..hf import compat
from ..hf.binding import Binding, unwrap
from ..methods.kvsharer import KVSharerCache
from ..plans import Plan, fingerprint
from .resume import RunningRecords, text_mark

Order = Literal["dissimilar", "similar", "random"]
_ROWS = 4  # windows of a forward


def calibrate_kvsharer(
    model: PreTrainedModel,
    windows: Sequence[Tensor],
    path: str | Path,
    shared: int | float = 0.25,
    cosine: float = 0.5,
    divergence: float | None = None,
    order: Order = "dissimilar",
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Plan:
    """Finds pairs of layers one after the other and writes the plan for `KVSharerCache(plan=path)`. An interrupted run goes on.

    Layers are compared by the distance of their keys and values, each averaged over the windows: half the mean Euclidean
    distance of the keys plus half that of the values. The pairs are tried from the most dissimilar on; the deeper layer then
    reads the other one, on top of all pairs accepted before. A pair stays when the model's last hidden states keep a mean
    cosine above `cosine` to those without sharing, and the logits a mean divergence up to `divergence`.

    Args:
        windows: `[T]` token ids each, of one length. The paper's calibration: 30 of 64 tokens.
        shared: layers to give up, or their share of all.
        cosine: the paper's 0.5.
        divergence: KL(unshared || shared) of the next-token distributions, in nats per token; None: not asked.
        order: "dissimilar" as published; "similar" and "random" are controls.
        seed: of the random order.
        progress: called with layers given up and layers wanted.

    Raises:
        KVSparseError: no windows, windows of unequal length, or no pair at all was accepted.
    """
    model = unwrap(model)
    if not windows or len({len(window) for window in windows}) > 1:
        raise KVSparseError("kvsharer needs stretches of text of one length.")
    layers = Binding.of(model).layers
    wanted = shared if isinstance(shared, int) else round(shared * layers)
    settings = dict(windows=len(windows), tokens=len(windows[0]), cosine=cosine, divergence=divergence, order=order, seed=seed)
    marks = {**settings, "shared": wanted, "model": fingerprint(model), "text": text_mark(windows)}
    records = RunningRecords(path, marks)
    ids = torch.stack(list(windows)).to(model.device)
    ranked = rank_pairs(layer_distances(model, ids), order, seed)
    reference = [_outputs(model, rows, None) for rows in ids.split(_ROWS)]
    for reader, source in ranked[len(records.items) :]:
        accepted = [(item["reader"], item["source"]) for item in records.items if item["accepted"]]
        if len(accepted) >= wanted:
            break
        found = {"cosine": 0.0, "divergence": 0.0, "accepted": False}
        if reader not in {pair[0] for pair in accepted}:
            found = _judge(model, ids, reference, [*accepted, (reader, source)])
            harmless = divergence is None or found["divergence"] <= divergence
            found["accepted"] = found["cosine"] > cosine and harmless
        records.add({"reader": reader, "source": source, **found})
        if progress is not None:
            progress(len(accepted) + found["accepted"], wanted)
    taken = [item for item in records.items if item["accepted"]]
    if wanted and not taken:
        raise KVSparseError(f"no two layers of this model can share: no pair keeps a cosine above {cosine} and the logits near.")
    pairs = torch.tensor([[item["reader"], item["source"]] for item in taken], dtype=torch.int64).view(-1, 2)
    reached = {f"{name}_reached": [item[name] for item in taken] for name in ("cosine", "divergence")}
    plan = Plan.of("kvsharer", model, {"pairs": pairs}, **settings, **reached)
    plan.save(path)
    records.finish()
    return plan


@torch.no_grad()
def layer_distances(model: PreTrainedModel, ids: Tensor) -> dict[tuple[int, int], float]:
    """Distance of every pair `(deeper, shallower)` of full-attention layers that have keys and values of one shape."""
    config = compat.text_config(model.config)
    sums: dict[int, list[Tensor]] = {}
    for rows in ids.split(_ROWS):
        cache = DynamicCache(config=config)
        model(rows, **{compat.CACHE_ARGUMENT: cache}, use_cache=True, logits_to_keep=1)
        for index, layer in enumerate(cache.layers):
            if compat.is_full_attention_layer(layer):
                found = [layer.keys.float().sum(0), layer.values.float().sum(0)]
                sums[index] = found if index not in sums else [old + new for old, new in zip(sums[index], found, strict=True)]
    means = {index: [total / len(ids) for total in found] for index, found in sums.items()}
    distances = {}
    for reader in means:
        for source in means:
            if source < reader and means[source][0].shape == means[reader][0].shape:
                parts = (torch.linalg.vector_norm(a - b, dim=-1).mean() for a, b in zip(means[reader], means[source], strict=True))
                distances[reader, source] = float(sum(parts)) / 2
    return distances


def rank_pairs(distances: dict[tuple[int, int], float], order: Order, seed: int) -> list[tuple[int, int]]:
    """The pairs `(reader, source)` in the order in which they are tried."""
    pairs = sorted(distances)
    if order == "random":
        shuffled = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(seed)).tolist()
        return [pairs[index] for index in shuffled]
    return sorted(pairs, key=distances.get, reverse=order == "dissimilar")


@torch.no_grad()
def _outputs(model: PreTrainedModel, rows: Tensor, pairs: Sequence[tuple[int, int]] | None) -> tuple[Tensor, Tensor]:
    """Last hidden states `[B, T, d]` and log-probabilities `[B, T, V]`, with the layers sharing by `pairs` or without."""
    cache = {} if pairs is None else {compat.CACHE_ARGUMENT: KVSharerCache(model, plan=pairs)}
    out = model(rows, output_hidden_states=True, use_cache=pairs is not None, **cache)
    return out.hidden_states[-1].float(), out.logits.float().log_softmax(-1)


def _judge(model: PreTrainedModel, ids: Tensor, reference: Iterable, pairs: Sequence[tuple[int, int]]) -> dict[str, float]:
    cosine, divergence = 0.0, 0.0
    for rows, (hidden, logs) in zip(ids.split(_ROWS), reference, strict=True):
        mine, shared = _outputs(model, rows, pairs)
        cosine += float(torch.cosine_similarity(hidden, mine, dim=-1).mean()) * len(rows)
        divergence += float((logs.exp() * (logs - shared)).sum(-1).mean()) * len(rows)
    return {"cosine": cosine / len(ids), "divergence": divergence / len(ids)}
