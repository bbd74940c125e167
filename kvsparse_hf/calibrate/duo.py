"""DuoAttention's pattern without training: how far back each head's average query looks at its average key."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..errors import KVSparseError
from ..hf import compat
from ..hf.binding import Binding
from ..hf.rotary import KeyRotation, layer_rotation
from ..plans import Plan, fingerprint
from .probe import observed_attention
from .resume import RunningSums, by_layer, text_mark


def calibrate_duo(
    model: PreTrainedModel,
    windows: Sequence[Tensor],
    path: str | Path,
    reach: int = 500,
    progress: Callable[[int, int], None] | None = None,
) -> Plan:
    """Scores every key/value head and writes the pattern for `DuoAttentionCache(pattern=path)`. An interrupted run goes on.

    These are the cheap scores that kvpress computes, not the paper's trained gates: queries and keys are averaged before
    their rotation, over all tokens. The average query at position `reach - 1` then attends to the average key at positions
    0 to `reach - 1`; the score is the mean of the cumulated attention, near 1 for a head that looks far back and near 0 for
    one that looks at its neighbours. It sees what position does to a head, not what content does.

    Args:
        windows: `[T]` token ids each.
        progress: called with windows done and windows in all.

    Raises:
        KVSparseError: no windows.
        UnsupportedModelError: a rotary embedding that cannot be turned back exactly.
    """
    if not windows:
        raise KVSparseError("no text to calibrate on.")
    binding = Binding.of(model)
    config, layers = binding.config, compat.layer_template(binding.config)
    rotations = [
        layer_rotation(KeyRotation, config, binding.decoder_class, index)
        if compat.is_full_attention_layer(layer)
        else None
        for index, layer in enumerate(layers)
    ]
    settings = dict(windows=len(windows), reach=reach, tokens=sum(map(len, windows)))
    sums = RunningSums(path, {**settings, "model": fingerprint(model), "text": text_mark(windows)})
    for number in sums.remaining(len(windows)):
        sums.add(_means(model, windows[number], rotations))
        if progress is not None:
            progress(sums.done, len(windows))
    query, key, scale = (sums.sums[name].float() / len(windows) for name in ("query", "key", "scale"))
    by_layers = zip(query, key, scale, rotations, strict=True)
    pattern = torch.stack([look_back(q, k, float(s), reach, rotation) for q, k, s, rotation in by_layers])
    plan = Plan.of("duo", model, {"pattern": pattern}, **settings)
    plan.save(path)
    sums.finish()
    return plan


@torch.no_grad()
def _means(model: PreTrainedModel, window: Tensor, rotations: Sequence[KeyRotation | None]) -> dict[str, Tensor]:
    """Mean query `[L, Hq, D]` and key `[L, H, D]` of one window, without rotation."""
    queries: dict[int, Tensor] = {}
    keys: dict[int, Tensor] = {}
    scales: dict[int, Tensor] = {}

    def observe(layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, out: Tensor) -> None:
        back = -torch.arange(query.shape[2], device=query.device)
        for rotated, means in ((query[0], queries), (key[0], keys)):
            means[layer] = _turn(rotations[layer], rotated.float(), back.expand(rotated.shape[0], -1)).mean(1)
        scales[layer] = torch.tensor(scale)

    with observed_attention(model, observe):
        model(window.view(1, -1).to(model.device), use_cache=False, logits_to_keep=1)
    layers = len(rotations)
    return {"query": by_layer(queries, layers), "key": by_layer(keys, layers), "scale": by_layer(scales, layers)}


def _turn(rotation: KeyRotation | None, vectors: Tensor, shift: Tensor) -> Tensor:
    return vectors if rotation is None else rotation(vectors, shift)


def look_back(query: Tensor, key: Tensor, scale: float, reach: int, rotation: KeyRotation | None) -> Tensor:
    """`[H]` from mean queries `[Hq, D]` and keys `[H, D]` (`rotation` None: they are never rotated): the mean of the cumulated attention, averaged over each group."""
    heads, group = key.shape[0], query.shape[0] // key.shape[0]
    last = torch.full((query.shape[0], 1), reach - 1)
    at = torch.arange(reach).expand(heads, -1)
    queries = _turn(rotation, query.unsqueeze(1), last)  # [Hq, 1, D]
    keys = _turn(rotation, key.unsqueeze(1).expand(-1, reach, -1), at).repeat_interleave(group, dim=0)
    weights = (queries @ keys.transpose(-1, -2) * scale).softmax(-1).squeeze(1)
    return weights.cumsum(-1).mean(-1).view(heads, group).mean(-1)
