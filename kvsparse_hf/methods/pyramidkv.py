"""PyramidKV: SnapKV's choice of tokens, with more of them in the first layers than in the last."""

from dataclasses import dataclass

import torch
from pydantic import Field
from torch import Tensor

from ..policy.base import Candidates
from ..policy.budgets import Cost
from ..policy.depth import pyramid
from ..registry import register_method
from .snapkv import SnapKVCache, SnapKVOptions, WindowPolicy


@dataclass(frozen=True)
class PyramidPolicy(WindowPolicy):
    """`WindowPolicy` whose budget falls linearly with depth.

    Attributes:
        depth, depths: which of the budgeted layers this is, among how many.
        beta: the last layer gets the 1/beta part of the average (of what is not protected).
        exact: whether the layers' budgets sum to the total exactly.
    """

    depth: int = 0
    depths: int = 1
    beta: int = 20
    exact: bool = True

    def counts(self, candidates: Candidates, available: Tensor, seen: Tensor, cost: Cost) -> Tensor:
        protected = self.tail + self.sinks
        rows = []
        for average, length in zip(self.budget.per_head(seen, cost).tolist(), seen.tolist(), strict=True):
            own = average
            if protected < average < length:
                layers = pyramid(average - protected, length, protected, self.depths, self.beta, self.exact)
                own = protected + int(layers[self.depth])
            rows.append(own)
        return torch.tensor(rows).unsqueeze(1).expand_as(available)


class PyramidKVOptions(SnapKVOptions):
    """Options of `PyramidKVCache`. Defaults: the paper's runs."""

    window: int = Field(8, ge=1, description="last prompt queries that score the others; always kept")
    beta: int = Field(20, ge=1, description="steepness: the last layer gets 1/beta of the average, beside the window")
    exact: bool = Field(
        True, description="spread the rounding so that the layers' budgets average to `budget`; False: the published arithmetic"
    )


@register_method("pyramidkv")
class PyramidKVCache(SnapKVCache):
    """PyramidKV (Cai et al., "Dynamic KV Cache Compression based on Pyramidal Information Funneling", arXiv 2406.02069).

    Tokens are chosen as in SnapKV. With `b = budget - window`, the last layer keeps `b // beta` tokens beside the window, the
    first one `2 b` less that, and the layers between lie on a line. A prompt shorter than the first layer's share flattens
    the line; one shorter than `2 b` gets `budget` in every layer.

    The published step between layers is rounded down, which keeps up to 5 % more than asked for; `exact=True` spreads the
    rounding instead, so that the mean over the layers is the budget. The schedule follows each row's own length (the
    published code computes it once). Sinks, if any, are protected beside the window. Further deviations: as `SnapKVCache`.

    Example:
        >>> cache = PyramidKVCache(model, budget=1024)
        >>> model.generate(**inputs, past_key_values=cache)
    """

    paper = "arXiv 2406.02069"
    Options = PyramidKVOptions

    def make_policy(self, layer_idx: int) -> PyramidPolicy:
        options = self.options
        return PyramidPolicy(
            **self.window_settings(),
            depth=self._sparse.index(layer_idx),
            depths=len(self._sparse),
            beta=options.beta,
            exact=options.exact,
        )
