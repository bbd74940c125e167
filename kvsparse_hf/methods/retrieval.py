"""RetrievalAttention: sinks and recents are always read, the rest through an index."""

from typing import Literal

from pydantic import Field

from ..layers.selectors.base import Selector
from ..layers.selectors.clusters import ClusterSelector
from ..layers.selectors.graph import GraphSelector, require_faiss
from ..layers.selectors.tokens import TokenSelector
from ..registry import register_method
from .selecting import SelectingCache, SelectingOptions


class RetrievalOptions(SelectingOptions):
    """Options of `RetrievalAttentionCache`. Static part: RetrievalAttention; clusters: RetroInfer."""

    sinks: int = Field(128, ge=0, description="first tokens of each row that are always read")
    recent: int = Field(512, ge=1, description="newest tokens that are always read")
    index: Literal["flat", "ivf", "hnsw"] = Field(
        "ivf", description="exact top-k of the true logits ('flat'), clusters on the device ('ivf'), a graph on the host ('hnsw')"
    )
    train_on: Literal["keys", "queries"] = Field(
        "keys", description="build the index by the geometry of the keys, or by the logits that the prompt's own queries give them"
    )
    estimate: float = Field(
        0.232, ge=0, le=1, description="ivf: share of the clusters that stand in by their means, after those read exactly"
    )
    per_cluster: int = Field(16, ge=1, description="ivf: tokens of a cluster in the mean")
    segment: int = Field(8192, ge=64, description="ivf: tokens that are clustered together")
    update_every: int = Field(1024, ge=1, description="ivf, hnsw: new tokens that gather before the index takes them in")
    links: int = Field(32, ge=2, description="hnsw: neighbours of an entry")
    effort: int = Field(128, ge=1, description="hnsw: candidates that a search keeps, at least as many as it returns")


@register_method("retrieval")
class RetrievalAttentionCache(SelectingCache):
    """RetrievalAttention (Liu et al., NeurIPS 2025, arXiv 2409.10516), with the clustered index of RetroInfer (Chen et al.,
    arXiv 2505.02922) as its default.

    The first `sinks` and the last `recent` tokens are always read. Of the tokens between, an index per key/value head finds
    the rest of the `budget`:

    - "flat" scores every key: exact, and half of the dense traffic.
    - "ivf": k-means clusters of mean-centred keys, segment by segment. The clusters whose mean key scores best are read
      exactly, as many as the budget holds. The next `estimate` of the clusters contribute as weighted attention to their
      mean value, merged by log-sum-exp; the remaining ones nothing.
    - "hnsw": a graph on the host (faiss), one search per query head. It runs on the CPU, so `generate()` does not compile.

    Queries lie off the manifold of the keys, so an index built by key geometry finds fewer of their neighbours. With
    `train_on="queries"` the geometry is that of the logits which the prompt's own queries give: of M^(1/2) k with
    M = E[q q^T].

    Deviations from the published code: keys and values stay on the device; the query heads of a group share what they read,
    by the mean of the softmax over the heads (`per_query_head=True` as in RetrievalAttention); the graph is plain HNSW, as
    the paper's own query-to-key graph was never released; clusters of more than four times the mean size are cut, so that
    any of them fits the budget; decoded tokens are read exactly until `update_every` of them enter the index together,
    during which a step reads up to so many tokens more than the budget; prompts of any length are indexed.

    Example:
        >>> cache = RetrievalAttentionCache(model, budget=2048, index="ivf")
        >>> model.generate(**inputs, past_key_values=cache)
    """

    paper = "arXiv 2409.10516"
    Options = RetrievalOptions

    def prepare(self) -> None:
        if self.options.index == "hnsw":
            require_faiss()

    def make_selector(self, layer_idx: int) -> Selector:
        options = self.options
        common = (options.sinks, options.recent, options.reduction())
        by_queries = options.train_on == "queries"
        if options.index == "flat":
            return TokenSelector(*common, backend=options.backend)
        if options.index == "hnsw":
            return GraphSelector(
                *common, options.update_every, options.links, options.effort, by_queries, options.backend
            )
        return ClusterSelector(
            *common,
            options.update_every,
            options.per_cluster,
            options.segment,
            options.estimate,
            by_queries,
            options.backend,
        )
