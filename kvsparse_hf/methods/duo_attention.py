"""DuoAttention: retrieval heads keep everything, streaming heads the first tokens and the newest ones."""

from pathlib import Path
from typing import Any

import torch
from pydantic import Field, field_validator
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from ..errors import OptionError, PresetError
from ..options import CommonOptions
from ..plans import Plan, head_table
from ..policy.base import Policy
from ..policy.heads import SpanPolicy
from ..registry import register_method
from .planned import PlannedCache, plain_table

_TIE_NOISE = 1e-6


class DuoAttentionOptions(CommonOptions):
    """Options of `DuoAttentionCache`. Defaults: the published deployment's."""

    pattern: Any = Field(
        None,
        description="how much each head retrieves: a file of `kvsparse calibrate duo`, a published .tsv, or numbers [layers, heads]",
    )
    sparsity: float = Field(0.5, ge=0.0, le=1.0, description="share of the key/value heads that stream (0.75 for models without GQA)")
    sinks: int = Field(64, ge=0, description="first tokens that a streaming head keeps")
    recent: int = Field(256, ge=1, description="newest tokens that a streaming head keeps")
    seed: int = Field(0, description="of the noise (1e-6) that breaks ties between heads")

    @field_validator("pattern")
    @classmethod
    def _plain(cls, value: Any) -> Any:
        return plain_table(value)


@register_method("duo-attention")
class DuoAttentionCache(PlannedCache):
    """DuoAttention (Xiao et al., "Efficient Long-Context LLM Inference with Retrieval and Streaming Heads", ICLR 2025, arXiv
    2410.10819).

    A pattern says of each key/value head how much it retrieves. The `sparsity` share of all heads with the lowest values
    streams: first `sinks` and newest `recent` tokens, at every decode step. The others keep everything, so memory still
    grows with the text, by `1 - sparsity` of what a dense cache needs.

    Deviations from the published code: exactly the stated share streams (the code compares with a quantile, which may differ
    by one head); tie-breaking noise has a seed; the prompt is attended densely in one pass (with `prefill_chunk_size` in
    `generate()` a streaming head sees its sinks, its recent tokens and the whole chunk, as in the published chunked
    prefill); weights are not reordered. Patterns are trained in the paper; those of `kvsparse calibrate duo` are estimated.

    Example:
        >>> cache = DuoAttentionCache(model, pattern="heads.safetensors", sparsity=0.5)
        >>> model.generate(**inputs, past_key_values=cache)
    """

    paper = "arXiv 2410.10819"
    needs = "a head pattern"
    Options = DuoAttentionOptions

    def read_plan(self, model: PreTrainedModel | PretrainedConfig) -> list[list[bool]]:
        """For every layer that is ours, which key/value heads stream."""
        options, binding = self.options, self.binding
        if options.pattern is None:
            raise OptionError(
                "duo-attention needs pattern=: how much each head of this model retrieves. Make one with `kvsparse calibrate duo`, "
                f"or pass numbers [{binding.layers}, {binding.kv_heads}]."
            )
        values, what = options.pattern, "the pattern"
        if isinstance(values, str):
            what = f"pattern {values!r}"
            values = read_pattern(values, model)
        scores = head_table(values, binding.layers, binding.kv_heads, binding.query_heads, what)[self._sparse]
        return streaming_heads(scores, options.sparsity, options.seed).tolist()

    def make_policy(self, layer_idx: int) -> Policy:
        options = self.options
        span = options.sinks + options.recent
        streams = self.plan[self._sparse.index(layer_idx)]
        return SpanPolicy(sinks=options.sinks, spans=tuple(span if stream else None for stream in streams))


def streaming_heads(scores: Tensor, sparsity: float, seed: int) -> Tensor:
    """`[L, H]` bool: the `sparsity` share of all heads with the lowest scores `[L, H]`."""
    noise = torch.rand(scores.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * _TIE_NOISE
    order = (scores + noise).flatten().argsort()
    streams = torch.zeros(scores.numel(), dtype=torch.bool)
    streams[order[: round(sparsity * scores.numel())]] = True
    return streams.view(scores.shape)


def read_pattern(path: str, model: PreTrainedModel | PretrainedConfig) -> Any:
    """`[layers, heads]` from a plan, or from lines of tab-separated numbers."""
    if not path.endswith(".tsv"):
        plan = Plan.load(path, "duo", model)
        if "pattern" not in plan.tensors:
            raise PresetError(f"plan {path!r} holds no pattern.")
        return plan.tensors["pattern"]
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
        return [[float(number) for number in line.split()] for line in lines if line.strip()]
    except (OSError, ValueError) as error:
        raise PresetError(f"pattern {path!r} is not readable as lines of numbers: {error}") from error
