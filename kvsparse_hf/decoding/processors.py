"""Transformers' logits processors on fixed-size device buffers, so that they can be part of a CUDA graph."""

from collections.abc import Callable

import torch
from torch import Tensor
from transformers.generation import logits_process as hf

# These read only the scores, and never wait for the device.
_STATELESS = tuple(
    getattr(hf, name)
    for name in (
        "TemperatureLogitsWarper",
        "TopKLogitsWarper",
        "TopPLogitsWarper",
        "MinPLogitsWarper",
        "TypicalLogitsWarper",
        "EpsilonLogitsWarper",
        "EtaLogitsWarper",
        "SuppressTokensLogitsProcessor",
        "InfNanRemoveLogitsProcessor",
        "LogitNormalization",
    )
)


def refusal(processors: list, prompt_length: int) -> str | None:
    """Why these processors cannot run inside a graph; None when they can."""
    for processor in processors:
        kind = type(processor)
        if kind is hf.RepetitionPenaltyLogitsProcessor:
            ignored = getattr(processor, "prompt_ignore_length", None)
            if prompt_length == 0 or (isinstance(ignored, int) and ignored >= prompt_length):
                return "a repetition penalty that leaves out the whole prompt"
        elif kind not in (*_STATELESS, hf.MinLengthLogitsProcessor, hf.MinNewTokensLengthLogitsProcessor):
            return f"the logits processor {kind.__name__} needs the host"
    return None


def pipeline(processors: list, ids: Tensor, length: Tensor) -> Callable[[Tensor], Tensor]:
    """One function of the scores.

    Args:
        processors: accepted by `refusal`.
        ids: `[B, width]` the sequence so far; unfilled columns repeat the last prompt token of their row, which changes
            no set of seen tokens.
        length: `[1]` int64 number of filled columns, on the device.
    """
    steps = [_step(processor, ids, length) for processor in processors]

    def run(scores: Tensor) -> Tensor:
        for step in steps:
            scores = step(scores)
        return scores

    return run


def _step(processor, ids: Tensor, length: Tensor) -> Callable[[Tensor], Tensor]:
    if isinstance(processor, hf.MinLengthLogitsProcessor):
        return _minimum_length(processor.eos_token_id, length, processor.min_length)
    if isinstance(processor, hf.MinNewTokensLengthLogitsProcessor):
        minimum = processor.prompt_length_to_skip + processor.min_new_tokens
        return _minimum_length(processor.eos_token_id, length, minimum)
    return lambda scores: processor(ids, scores)


def _minimum_length(eos: Tensor, length: Tensor, minimum: int) -> Callable[[Tensor], Tensor]:
    eos = eos.to(length.device)

    def step(scores: Tensor) -> Tensor:
        is_eos = torch.isin(torch.arange(scores.shape[-1], device=scores.device), eos)
        return torch.where(is_eos & (length < minimum), float("-inf"), scores)

    return step
