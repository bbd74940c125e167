"""TOVA: the tokens that the newest query attends to most, the same for all heads of a layer."""

from dataclasses import dataclass, replace

from pydantic import Field
from torch import Tensor

from ..policy.base import Candidates
from ..policy.budgets import Budget
from ..policy.received import received_attention
from ..policy.scored import Entries, FollowingPolicy
from ..registry import register_method
from .evicting import EvictingCache
from .observing import ObservingOptions


@dataclass(frozen=True)
class LastQueryPolicy(FollowingPolicy):
    """Scores an entry by the newest query's attention, averaged over all query heads of the layer."""

    backend: str = "auto"

    remembers = "last"
    queries_read = 1

    def observe(self, candidates: Candidates) -> dict[str, Tensor]:
        lse = candidates.lse
        last = replace(candidates, query=candidates.query[:, :, -1:], lse=None if lse is None else lse[:, :, -1:])
        # Equal groups: the mean over key/value heads of group means is the mean over all query heads.
        per_head = received_attention(last, 1.0, "mean", self.backend)
        return {"last": candidates.ranks.mean(per_head.mean(1, keepdim=True)).expand_as(per_head)}

    @property
    def couples_heads(self) -> bool:
        return True

    @property
    def rule(self) -> dict:
        return dict(accumulate=False, across_heads=True)

    def worth(self, entries: Entries) -> Tensor:
        return entries.memory["last"]


class TOVAOptions(ObservingOptions):
    """Options of `TOVACache`. Defaults: nothing is protected, as published."""

    recent: int = Field(
        0,
        ge=0,
        description="newest tokens that are always kept, the one being decoded included; 2 keeps a token for one step after its own",
    )


@register_method("tova")
class TOVACache(EvictingCache):
    """TOVA (Oren et al., "Transformers are Multi-State RNNs", EMNLP 2024, arXiv 2401.06104).

    A prompt keeps the tokens with the most attention from its last query, averaged over all query heads of the layer; all
    key/value heads keep the same ones. From then on each decoded token takes the place of the token its predecessor
    attended to least. Nothing is protected: even the newest token may be the one that goes.

    The budget counts the token being decoded, so `budget = C + 1` is the published multi-state size C: attend to C and the
    new token, then drop the lowest.

    Deviations from the published code: padding never counts, rows of a batch choose for themselves, ties keep the earlier
    token, attention is fp32 and only one row of it is computed per prompt. A prompt is compressed at its end, by its last
    query, as in the published code; feed it in chunks (`prefill_chunk_size` of `generate()`) to come closer to the paper's
    token-by-token reading.

    Example:
        >>> cache = TOVACache(model, budget=1024)
        >>> model.generate(**inputs, past_key_values=cache)
    """

    paper = "arXiv 2401.06104"
    needs = "the attention of the newest query"
    prefix_safe = False
    other_actions = True
    Options = TOVAOptions

    def make_policy(self, layer_idx: int) -> LastQueryPolicy:
        options = self.options
        budget = Budget.parse(options.budget)
        return LastQueryPolicy(budget, sinks=options.sinks, recent=options.recent, backend=options.backend)
