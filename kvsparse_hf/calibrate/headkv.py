"""HeadKV's head table: how much each query head takes part in copying a needle out of a text."""

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..errors import KVSparseError
from ..hf.binding import Binding
from ..plans import Plan, fingerprint
from .probe import observed_attention
from .resume import RunningSums, by_layer, text_mark


def calibrate_headkv(
    model: PreTrainedModel,
    text: Tensor,
    path: str | Path,
    samples: int = 32,
    length: int = 1024,
    needle: int = 24,
    cue: int = 4,
    score: Literal["mass", "copy"] = "mass",
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Plan:
    """Scores every query head and writes the table for `HeadKVCache(table=path)`. An interrupted run goes on where it stopped.

    A sample is a stretch of the text with a needle (a stretch from elsewhere) at some depth, followed by the needle's first
    `cue` tokens; the model is fed the rest of the needle. Of each token that the model itself predicts, a head scores
    - "copy": 1 where the position it attends to most is that token in the needle (Retrieval Heads);
    - "mass": the attention on the needle within the head's `needle` strongest positions (HeadKV-R2's score).
    The published needles are questions about passages with a reasoning step, judged by the model's answers; these need no
    tokenizer, template or judge, and measure copying alone.

    Args:
        text: `[n]` token ids, at least `length + needle` of them.
        progress: called with samples done and samples in all.

    Raises:
        KVSparseError: the text is too short, or the model copied nothing at all.
    """
    if not 0 < cue < needle or length < 2 * needle or len(text) < length + needle:
        raise KVSparseError(
            f"a needle of {needle} tokens with a cue of {cue} needs samples of at least {2 * needle} tokens, and a text of "
            f"{length + needle}; it has {len(text)}."
        )
    layers = Binding.of(model).layers
    settings = dict(samples=samples, length=length, needle=needle, cue=cue, score=score, seed=seed)
    sums = RunningSums(path, {**settings, "model": fingerprint(model), "text": text_mark([text])})
    for number in sums.remaining(samples):
        sums.add(_one_sample(model, text, layers, number / max(samples - 1, 1), seed + number, length, needle, cue, score))
        if progress is not None:
            progress(sums.done, samples)
    table, copied = sums.sums["table"], float(sums.sums["copied"])
    if not bool(table.any()):
        raise KVSparseError("the model copied no needle: no head can be told from another. Use longer cues, or another text.")
    plan = Plan.of("headkv", model, {"table": (table / samples).float()}, **settings, copied=copied / samples)
    plan.save(path)
    sums.finish()
    return plan


@torch.no_grad()
def _one_sample(model, text, layers, depth, seed, length, needle, cue, score) -> dict[str, Tensor]:
    ids, at = needle_sample(text, depth, seed, length, needle, cue)
    answered = needle - cue  # the last `answered` tokens of `ids`, each predicted by the one before
    found: dict[int, Tensor] = {}

    def observe(layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, out: Tensor) -> None:
        found[layer] = _needle_attention(query[0], key[0], scale, at, needle, answered, score)

    with observed_attention(model, observe):
        logits = model(ids[None].to(model.device), use_cache=False).logits[0, -answered - 1 : -1]
    right = (logits.argmax(-1).cpu() == ids[-answered:]).double()
    scores = by_layer({layer: value.cpu().double() for layer, value in found.items()}, layers)
    return {"table": (scores * right).mean(-1), "copied": right.mean()}


def needle_sample(text: Tensor, depth: float, seed: int, length: int, needle: int, cue: int) -> tuple[Tensor, int]:
    """`[length]` token ids that end with the needle, and where the needle stands in them before."""
    generator = torch.Generator().manual_seed(seed)
    hay = length - 2 * needle
    first = int(torch.randint(len(text) - hay - needle + 1, (1,), generator=generator))
    rest = torch.cat((text[:first], text[first + hay :]))  # the needle does not occur around it
    start = int(torch.randint(len(rest) - needle + 1, (1,), generator=generator))
    stretch, at = text[first : first + hay], round(depth * hay)
    hidden = rest[start : start + needle]
    return torch.cat((stretch[:at], hidden, stretch[at:], hidden)).long().cpu(), at


def _needle_attention(query: Tensor, key: Tensor, scale: float, at: int, needle: int, answered: int, score: str) -> Tensor:
    """`[Hq, answered]`: each head's score for each token of the answer, seen from the token before."""
    length = query.shape[1]
    asking = torch.arange(length - answered - 1, length - 1, device=query.device)
    keys = key.repeat_interleave(query.shape[0] // key.shape[0], dim=0).float()
    logits = query[:, asking].float() @ keys.transpose(-1, -2) * scale
    weights = logits.masked_fill(torch.arange(length, device=query.device) > asking.unsqueeze(-1), float("-inf")).softmax(-1)
    if score == "copy":
        wanted = at + needle - answered + torch.arange(answered, device=query.device)
        return (weights.argmax(-1) == wanted).float()
    top = weights.topk(min(needle, length), dim=-1)
    inside = (top.indices >= at) & (top.indices < at + needle)
    return (top.values * inside).sum(-1)
