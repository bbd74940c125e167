"""Loki: each step ranks tokens by the leading principal components of their keys."""

from typing import Any

from pydantic import Field
from transformers import PretrainedConfig, PreTrainedModel

from ..calibrate.loki import load_basis
from ..errors import PresetError
from ..layers.selectors.tokens import LowRankSelector
from ..registry import register_method
from .selecting import SelectingCache, SelectingOptions, leading


class LokiOptions(SelectingOptions):
    """Options of `LokiCache`. A quarter of the dimensions and of the tokens are the paper's usual choice."""

    budget: Any = Field(
        0.25, description="entries that a decode step reads per key/value head: the paper's k_f (int, or share of the prompt)"
    )
    d_f: int | float = Field(0.25, gt=0, description="leading components that rank: an int, or a share of the head size")
    basis: str | None = Field(
        None, description="file that `kvsparse calibrate loki` wrote; without one, the basis of the prompt's own keys"
    )
    sinks: int = Field(0, ge=0, description="first tokens of each row that are always read")
    recent: int = Field(1, ge=1, description="newest tokens that are always read")


@register_method("loki")
class LokiCache(SelectingCache):
    """Loki (Singhania et al., "Loki: Low-rank Keys for Efficient Sparse Attention", NeurIPS 2024, arXiv 2406.02542).

    Keys lie near a low-dimensional space. They are stored in their principal components, per layer and key/value head, in
    place of the original ones: the rotation changes no logit and takes no memory. The first `d_f` components of query and
    keys rank the tokens, and the step attends exactly to the `budget` best.

    Deviations from the published code: the query heads of a group share their tokens, ranked by the mean of the softmax over
    the heads (`per_query_head=True` ranks for each as published); the newest token is always read; the basis may come from
    the prompt's own keys, each row's from its own, fixed from then on. As published, the transform applies to rotated keys
    and the mean is not subtracted, which shifts all logits of a query alike.

    Example:
        >>> cache = LokiCache(model, budget=1024, d_f=32, basis="loki-basis.safetensors")
        >>> model.generate(**inputs, past_key_values=cache)
    """

    paper = "arXiv 2406.02542"
    Options = LokiOptions

    def __init__(self, model: PreTrainedModel | PretrainedConfig, **options):
        self._model = model  # the basis file is checked against its weights
        super().__init__(model, **options)
        del self._model, self._bases

    def prepare(self) -> None:
        path = self.options.basis
        self._bases = None if path is None else load_basis(path, self._model, self.binding)

    def make_selector(self, layer_idx: int) -> LowRankSelector:
        options = self.options
        components = leading(options.d_f, self.binding.head_dim, "d_f")
        basis = None
        if self._bases is not None:
            if layer_idx not in self._bases:
                raise PresetError(f"basis {options.basis!r} has none for layer {layer_idx}.")
            basis = self._bases[layer_idx]
        return LowRankSelector(options.sinks, options.recent, options.reduction(), components, basis, options.backend)
