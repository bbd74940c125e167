"""ExpectedAttention: the tokens that future queries are expected to attend to."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from pydantic import Field
from torch import Tensor

from ..hf.rotary import FutureRotation, layer_rotation
from ..policy.base import Candidates, Policy
from ..policy.budgets import Budget
from ..policy.expected import expected_attention, query_statistics
from ..registry import register_method
from .evicting import EvictingCache
from .periodic import PeriodicOptions

_QUERIES_AT_ONCE = 2048


@dataclass(frozen=True)
class ExpectedAttentionPolicy(Policy):
    """Scores a token by its expected attention and the length of its value.

    Attributes:
        rotation: of the layer's queries; None where it does not rotate them.
        future: positions after the newest token over which the rotation is averaged.
        covariance: use the spread of the queries, not their mean alone.
        value_norm: multiply by the length of the value.
        epsilon: added to the expected attention before that.
        observed: newest queries that are kept for a later compression.
    """

    rotation: FutureRotation | None = None
    future: int = 512
    covariance: bool = True
    value_norm: bool = True
    epsilon: float = 0.0
    observed: int = 256

    @property
    def newest_queries(self) -> int:
        return self.observed

    def scores(self, candidates: Candidates) -> Tensor:
        mean, covariance = query_statistics(lambda: self._queries(candidates))
        mean, covariance = self._ahead(mean, covariance, candidates.positions[:, 0, -1] + 1)
        # Sinks are kept in any case, and would take most of the softmax.
        allowed = candidates.valid & (candidates.positions >= self.sinks)
        spread = covariance if self.covariance else None
        worth = expected_attention(candidates.keys, allowed, mean, spread, candidates.scale)
        if self.value_norm:
            worth = (worth + self.epsilon) * torch.linalg.vector_norm(candidates.values.float(), dim=-1)
        return worth

    def _queries(self, candidates: Candidates) -> Iterator[tuple[Tensor, Tensor]]:
        """The queries as they were before their rotation, and which of them are real and behind the sinks."""
        query = candidates.query
        tokens = query.shape[2]
        newest = candidates.positions[:, 0, -1].unsqueeze(1)
        # A block takes a fraction of the memory of the keys.
        step = max(16, min(_QUERIES_AT_ONCE, tokens * candidates.keys.shape[1] // (8 * query.shape[1])))
        for first in range(0, tokens, step):
            block = query[:, :, first : first + step].float()
            width = block.shape[2]
            positions = newest - (tokens - 1 - first) + torch.arange(width, device=query.device)
            if self.rotation is not None:
                shift = -positions.unsqueeze(1).expand(-1, block.shape[1], -1)
                block = self.rotation(block.flatten(0, 1), shift.flatten(0, 1)).view_as(block)
            yield block, positions >= self.sinks

    def _ahead(self, mean: Tensor, covariance: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
        """Statistics of the rotated queries of the next `future` tokens; the first stands at `first` `[B]`."""
        if self.rotation is None:
            return mean, covariance
        first = first.repeat_interleave(mean.shape[1])

        def turn(rows: Tensor) -> Tensor:
            return self.rotation.average(rows.flatten(0, 1), first, self.future).view_as(rows)

        mean = turn(mean.unsqueeze(2)).squeeze(2)
        return mean, turn(turn(covariance).transpose(-1, -2))


class ExpectedAttentionOptions(PeriodicOptions):
    """Options of `ExpectedAttentionCache`. Defaults: the paper's."""

    sinks: int = Field(4, ge=0, description="first tokens that are always kept; their queries and keys do not enter the scores")
    future: int = Field(512, ge=1, description="positions after the newest token over which the rotation is averaged")
    covariance: bool = Field(True, description="use the spread of the queries, not their mean alone")
    value_norm: bool = Field(True, description="multiply by the length of the value")
    epsilon: float = Field(0.0, ge=0.0, description="added to the expected attention before the multiplication")
    observed: int = Field(256, ge=1, description="newest queries from which recompress_every takes its statistics")


@register_method("expected-attention")
class ExpectedAttentionCache(EvictingCache):
    """Expected Attention (Devoto et al., "KV Cache Compression by Estimating Attention from Future Queries Distribution",
    arXiv 2510.00636).

    Future queries are taken to be Gaussian, with the mean and covariance of the prompt's queries before their rotary
    embedding, turned to the average of the next 512 positions. The attention a key can then expect has a closed form; times
    the length of the value it is the score.

    Queries come from the attention call itself, so they are right for every model (with query norms, fused or quantised
    projections), and are turned back exactly by their true positions. The scores do not depend on which tokens came last,
    only on what the prompt's queries are like.

    Choices where paper and code leave room: the softmax runs over the tokens that can be evicted, as in the authors' code;
    in a group, attention is averaged over the query heads after the softmax; a cap on the logits (Gemma 2) is not modelled.
    The chunks of a chunked prefill are judged by their own queries. `recompress_every` uses the newest `observed` queries at
    their true positions (the published decoding wrapper takes its buffer's length for the position).

    Example:
        >>> cache = ExpectedAttentionCache(model, budget=1024)
        >>> model.generate(**inputs, past_key_values=cache)
    """

    paper = "arXiv 2510.00636"
    needs = "the distribution of the queries, keys and values"
    other_actions = True
    Options = ExpectedAttentionOptions

    def make_policy(self, layer_idx: int) -> Policy:
        options = self.options
        return ExpectedAttentionPolicy(
            Budget.parse(options.budget),
            sinks=options.sinks,
            recent=options.recent,
            rotation=layer_rotation(FutureRotation, self.binding.config, self.binding.decoder_class, layer_idx),
            future=options.future,
            covariance=options.covariance,
            value_norm=options.value_norm,
            epsilon=options.epsilon,
            observed=options.observed,
        )
