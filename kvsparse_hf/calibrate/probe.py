"""Looks at the queries, keys and values of a model's own attention calls, without a cache."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from transformers import PreTrainedModel

from ..hf import compat
from ..hf.attention import base_of
from ..hf.binding import unwrap

Observer = Callable[[int, Tensor, Tensor, Tensor, float, Tensor], None]

_observers: list[tuple[str, Observer]] = []


@contextmanager
def observed_attention(model: PreTrainedModel, observe: Observer) -> Iterator[None]:
    """Within the block, `observe` is called after every attention call of a full-attention layer.

    It gets the layer's index, queries `[B, Hq, T, D]`, keys and values `[B, H, T, D]` (rotated), the factor on the logits
    and the output `[B, T, Hq, D]`, all as the model computes with them. The attention runs as sdpa, or eager where the model
    uses that.
    """
    config = compat.text_config(unwrap(model).config)
    before = config._attn_implementation
    base = "eager" if base_of(config) == "eager" else "sdpa"
    name = f"observed_{base}"
    compat.register_attention(name, _observed_forward, compat.base_mask_function(base))
    _observers.append((base, observe))
    config._attn_implementation = name
    try:
        yield
    finally:
        _observers.pop()
        config._attn_implementation = before


def _observed_forward(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *args, **kwargs):
    base, observe = _observers[-1]
    out, weights = compat.base_attention_function(base, module)(module, query, key, value, mask, *args, **kwargs)
    if kwargs.get("sliding_window") is None:
        observe(module.layer_idx, query, key, value, kwargs.get("scaling") or query.shape[-1] ** -0.5, out)
    return out, weights
