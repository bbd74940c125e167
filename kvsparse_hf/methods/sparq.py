"""SparQ: each step ranks tokens by the few channels in which its query is largest."""

from typing import Any, Literal

from pydantic import Field

from ..layers.selectors.tokens import ChannelSelector
from ..registry import register_method
from .selecting import SelectingCache, SelectingOptions, leading


class SparQOptions(SelectingOptions):
    """Options of `SparQCache`. Defaults: k = 128 and l = k / 4 of the published code."""

    budget: Any = Field(128, description="entries that a decode step reads per key/value head: the paper's k")
    channels: int | float = Field(0.25, gt=0, description="channels that rank: the paper's r (int), or a share of the head size")
    sinks: int = Field(0, ge=0, description="first tokens of each row that are always read")
    recent: int = Field(32, ge=1, description="newest tokens that are always read: the paper's l")
    reduce: Literal["sum", "softmax_mean", "max", "mean"] = Field(
        "sum", description="how the approximate logits of the query heads of a group become one score ('sum' as published)"
    )
    per_query_head: Literal[False] = Field(False, description="the heads of a group share channels and tokens, as published")
    channel_major: bool = Field(
        False, description="hold keys also channel by channel: half as much memory again, and only `channels` of them are read"
    )


@register_method("sparq")
class SparQCache(SelectingCache):
    """SparQ attention (Ribar et al., "SparQ Attention: Bandwidth-Efficient LLM Inference", ICML 2024, arXiv 2312.04985).

    The r channels with the largest sum of |q| over the group give approximate logits, with the temperature
    sqrt(d |q_I| / |q|). The step attends to the `budget` best tokens; what their approximate attention weights leave of 1
    goes to the mean of all values.

    Deviations from the published code: `budget` counts the token being decoded (published: k and that token); padding is in
    neither the scores nor the mean. Without `channel_major` the whole key is fetched from memory to use a few of its
    channels, so that at best half of the dense traffic is saved.

    Example:
        >>> cache = SparQCache(model, budget=128, channels=32)
        >>> model.generate(**inputs, past_key_values=cache)
    """

    paper = "arXiv 2312.04985"
    Options = SparQOptions

    def make_selector(self, layer_idx: int) -> ChannelSelector:
        options, dim = self.options, self.binding.head_dim
        channels = leading(options.channels, dim, "channels")
        return ChannelSelector(
            options.sinks, options.recent, options.reduce, channels, options.channel_major, options.backend
        )
