"""Teacher-forcing: the log-probabilities of given tokens after given contexts, through a cache."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..cache import SparseCache
from ..hf.compat import CACHE_ARGUMENT


@dataclass(frozen=True)
class Forced:
    """Of one row: the log-probability of each continuation token, and whether it was the likeliest."""

    logprobs: list[float]
    greedy: list[bool]


def left_pad(rows: Sequence[Sequence[int]], pad: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows of token ids as `(input_ids, attention_mask)`, both `[B, S]` int64, padded in front."""
    width = max(map(len, rows))
    ids = torch.full((len(rows), width), pad, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for index, row in enumerate(rows):
        ids[index, width - len(row) :] = torch.as_tensor(row)
        mask[index, width - len(row) :] = 1
    return ids.to(device), mask.to(device)


@torch.no_grad()
def forced(
    model: PreTrainedModel,
    contexts: Sequence[Sequence[int]],
    continuations: Sequence[Sequence[int]],
    cache: SparseCache,
    chunk: int = 1,
) -> list[Forced]:
    """Reads the contexts as one left-padded prompt, which the cache compresses, and feeds the continuations after it.

    The first continuation token is predicted by the prompt's own forward, in which attention is dense; the cache answers
    for all tokens after it.

    Args:
        contexts, continuations: token ids of each row, none empty.
        cache: a fresh one.
        chunk: continuation tokens fed at a time. One is a decode step; more are read as a further chunk of the prompt.
    """
    device = model.get_input_embeddings().weight.device
    ids, mask = left_pad(contexts, 0, device)
    length = max(map(len, continuations))
    targets = torch.zeros(len(contexts), length, dtype=torch.int64)
    for index, row in enumerate(continuations):
        targets[index, : len(row)] = torch.as_tensor(row)
    targets = targets.to(device)
    # What follows a row's end is fed too, and ignored: it comes after everything that is scored.
    last_only = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    found = [_score(_forward(model, ids, mask, cache, **last_only)[:, -1:], targets[:, :1])]
    for at in range(0, length - 1, chunk):
        fed = targets[:, at : min(at + chunk, length - 1)]
        mask = torch.cat((mask, mask.new_ones(fed.shape)), dim=1)
        found.append(_score(_forward(model, fed, mask, cache), targets[:, at + 1 : at + 1 + fed.shape[1]]))
    scores, best = (torch.cat(parts, dim=1).tolist() for parts in zip(*found, strict=True))
    return [Forced(s[: len(row)], b[: len(row)]) for s, b, row in zip(scores, best, continuations, strict=True)]


def _score(logits: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the tokens `wanted` `[B, T]` under `logits` `[B, T, V]`, and whether each is the likeliest."""
    logprobs = logits.float().log_softmax(-1)
    return logprobs.gather(-1, wanted.unsqueeze(-1)).squeeze(-1), logprobs.argmax(-1) == wanted


def _forward(model: PreTrainedModel, ids: Tensor, mask: Tensor, cache: SparseCache, **more) -> Tensor:
    """Logits `[B, T, V]` of tokens that end where the mask `[B, S]` ends."""
    positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions, CACHE_ARGUMENT: cache}
    return model(**inputs, use_cache=True, **more).logits
