"""KeyDiff: the tokens whose keys differ most from the mean key."""

from dataclasses import dataclass

from pydantic import Field
from torch import Tensor

from ..policy.base import Candidates, Policy
from ..policy.budgets import Budget
from ..policy.geometry import distinctness, keep_by_blocks
from ..policy.scored import Entries, ObservingPolicy
from ..registry import register_method
from .evicting import EvictingCache
from .periodic import KeyScoreOptions


@dataclass(frozen=True)
class DistinctKeysPolicy(Policy):
    """Keeps the most distinct keys, block by block.

    Attributes:
        block: tokens between two evictions while a prompt is compressed; None for all at once.
    """

    block: int | None = 128

    queries_read = 0

    def scores(self, candidates: Candidates) -> Tensor:
        block = max(candidates.length, 1) if self.block is None else self.block
        return keep_by_blocks(candidates, block, self.sinks, self.tail)


@dataclass(frozen=True)
class BoundedDistinctKeysPolicy(DistinctKeysPolicy, ObservingPolicy):
    """The same, and every decoded token replaces the least distinct one."""

    bounded: bool = True

    reads_weights = False
    reads_keys = True

    def worth(self, entries: Entries) -> Tensor:
        return distinctness(entries.keys, entries.valid)


class KeyDiffOptions(KeyScoreOptions):
    """Options of `KeyDiffCache`. Defaults: the paper's."""

    block: int | None = Field(
        128, ge=1, description="tokens between two evictions while a prompt is compressed; null: all at once, another result"
    )


@register_method("keydiff")
class KeyDiffCache(EvictingCache):
    """KeyDiff (Park et al., "Key Similarity-Based KV Cache Eviction for Long-Context LLM Inference in Resource-Constrained
    Environments", arXiv 2504.15364).

    A token is worth keeping when its key points away from the mean of the unit keys (lowest cosine). The prompt is taken in
    blocks of 128: after each block the `budget` most distinct of kept and new remain, as in the paper's block-wise
    processing (one choice over all keys gives another result: `block=None`). Queries are not used, so a compressed prefix
    serves any continuation. `decode="bounded"` goes on like that with blocks of one token.

    Deviations: the prompt itself is attended densely, in one pass; only the choice is made block by block (feed it with
    `prefill_chunk_size=128` in `generate()` for the paper's setting, where a block sees only what was kept). Keys are
    compared as the model rotated them, per key/value head, in fp32; padding never counts.

    Example:
        >>> cache = KeyDiffCache(model, budget=1024)
        >>> model.generate(**inputs, past_key_values=cache)
    """

    paper = "arXiv 2504.15364"
    needs = "keys"
    other_actions = True
    Options = KeyDiffOptions

    def make_policy(self, layer_idx: int) -> Policy:
        options = self.options
        kind = BoundedDistinctKeysPolicy if options.decode == "bounded" else DistinctKeysPolicy
        return kind(Budget.parse(options.budget), sinks=options.sinks, recent=options.recent, block=options.block)
