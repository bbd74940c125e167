"""Quest: each step reads the pages whose keys could give its query the largest logits."""

from typing import Literal

from pydantic import Field, field_validator

from ..layers.selectors.pages import PageSelector, forced_pages
from ..registry import register_method
from .selecting import SelectingCache, SelectingOptions


class QuestOptions(SelectingOptions):
    """Options of `QuestCache`. Page size and dense layers are the paper's; its budgets are 512 to 4096 tokens."""

    page_size: int = Field(16, ge=1, description="tokens of a page, a power of two")
    dense_layers: int = Field(2, ge=0, description="so many first decoder layers read everything")
    reduce: Literal["softmax_mean", "max", "mean"] = Field(
        "softmax_mean", description="how the bounds of the query heads that share a key/value head become one page score"
    )

    @field_validator("page_size")
    @classmethod
    def _power_of_two(cls, value: int) -> int:
        if value & (value - 1):
            raise ValueError("must be a power of two (16, 32 or 64)")
        return value

    def protected(self) -> tuple[int, str]:
        pages = sum(forced_pages(self.sinks, self.recent, self.page_size)) + 1
        return pages * self.page_size, f"the pages of sinks and recent + one page of {self.page_size}"


@register_method("quest")
class QuestCache(SelectingCache):
    """Quest (Tang et al., "Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference", ICML 2024, arXiv 2406.10774).

    Every page keeps the elementwise maximum M and minimum m of its (rotated) keys, 1/16 of the cache at page 16. For a query
    q, sum_c max(q_c M_c, q_c m_c) bounds all its logits in the page from above; the step attends exactly to the
    `budget / page_size` pages with the highest bounds. The first two layers read everything.

    Deviations from the published code, which serves one query head per key/value head: the query heads of a group share
    their pages, ranked by the mean over the heads of the softmax of the bounds (`per_query_head=True` selects for each query
    head as published, and then reads up to the group size times as much); the pages of `sinks` and `recent` tokens are
    always read besides the newest page (`sinks=0, recent=1` as published); pages begin at the row's first real token.

    Example:
        >>> cache = QuestCache(model, budget=2048)
        >>> model.generate(**inputs, past_key_values=cache)
    """

    paper = "arXiv 2406.10774"
    Options = QuestOptions

    def make_selector(self, layer_idx: int) -> PageSelector:
        options = self.options
        return PageSelector(options.sinks, options.recent, options.reduction(), options.page_size, options.backend)
