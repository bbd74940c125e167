"""YOCO: the lower half of the layers sees a window, the upper half one layer's keys and values."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from pydantic import Field
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..errors import OptionError, UnsupportedModelError, UnsupportedOperationError
from ..hf import compat
from ..hf.binding import unwrap
from ..hf.sharing import declared
from ..layers.base import SparseLayer
from ..layers.windowed import WindowLayer
from ..policy.budgets import Budget
from ..registry import register_method
from .sharing import SharingCache, SharingOptions
from .streaming_llm import StreamingPolicy

_WINDOW = 1024


class YOCOOptions(SharingOptions):
    """Options of `YOCOCache`, beside those of the method that keeps the one global layer."""

    window: int | None = Field(
        None,
        ge=1,
        description="tokens that a token of the lower half sees; default: the one in the model's config, else 1024",
    )


@register_method("yoco")
class YOCOCache(SharingCache):
    """YOCO (Sun et al., "You Only Cache Once: Decoder-Decoder Architectures for Language Models", NeurIPS 2024, arXiv
    2405.05254).

    The layers below the middle attend to a sliding window and hold `window` entries; the middle layer keeps the one global
    key/value store, which all layers above it read. For models trained that way; a checkpoint whose config carries the map
    (`mark`) needs no option. Lower layers that are sliding windows by the model's own config stay Transformers' own. The
    budget of `inner` is that of the global layer.

    Nothing above the middle layer is needed for a prompt's earlier tokens: inside `early_exit(model)` a prompt costs the lower
    half and one layer.

    Deviations from the paper: the self-decoder is sliding-window attention (not gated retention); the global keys and values
    are those of the middle layer's own attention, with its input norm, instead of a projection that belongs to no layer; the
    blocks are the model's own.

    Example:
        >>> cache = YOCOCache(model, window=1024)
        >>> with cache.early_exit(model):
        ...     model.generate(**inputs, past_key_values=cache)
    """

    paper = "arXiv 2405.05254"
    Options = YOCOOptions

    @property
    def middle(self) -> int:
        """The layer that keeps the global keys and values."""
        return self.binding.layers // 2

    def window(self) -> int:
        trained = declared(self.binding.config) or {}
        return self.options.window or trained.get("window") or _WINDOW

    def sources(self, full: list[int]) -> list[int]:
        config, middle = self.binding.config, self.middle
        missing = [layer for layer in range(middle, self.binding.layers) if layer not in full]
        if missing:
            raise UnsupportedModelError(
                f"yoco needs plain full attention in the upper half of the layers; layer {missing[0]} of {config.model_type} has none."
            )
        if getattr(config, "attn_logit_softcapping", None):
            raise UnsupportedModelError(f"yoco cannot put a window over the capped attention of {config.model_type}.")
        return [min(layer, middle) for layer in range(self.binding.layers)]

    def prepare(self) -> None:
        if self.options.window is not None and not any(index < self.middle for index in self._sparse):
            raise OptionError(
                "yoco: no layer of the lower half has plain full attention, so none takes this window; leave window out."
            )
        super().prepare()
        self.session.budgeted_layers = 1

    def make_layer(self, layer_idx: int) -> SparseLayer:
        if layer_idx >= self.middle:
            return super().make_layer(layer_idx)
        options, window = self.options, self.window()
        policy = StreamingPolicy(Budget(tokens=window), recent=1, bounded=True)
        return WindowLayer(layer_idx, self.session, policy, options.reserve, options.backend, window=window)

    @contextmanager
    def early_exit(self, model: PreTrainedModel) -> Iterator[None]:
        """Inside, multi-token forwards of `model` with this cache compute the upper layers, and the middle layer's attention,
        for the last token alone: their logits are those of the last token, `[B, 1, V]`, and exact.

        Realised with PyTorch's forward hooks on the model's decoder layers, which are removed at the end. Forwards with other
        caches pass through untouched.

        Raises:
            UnsupportedOperationError: `inner` chooses by the queries of the prompt, which would not all be computed.
            UnsupportedModelError: no list of decoder layers is found in the model.
        """
        if not self.prefix_safe:
            raise UnsupportedOperationError(
                f"inner={self.options.inner!r} chooses by the queries of the upper layers, which an early exit does not compute."
            )
        layers = getattr(unwrap(model).get_decoder(), "layers", None)
        if layers is None or len(layers) != self.binding.layers:
            raise UnsupportedModelError(f"{type(model).__name__} has no list of {self.binding.layers} decoder layers.")
        owner = self.layers[self.middle]
        with ExitStack() as stack:
            handle = layers[self.middle].register_forward_hook(self._last_output, with_kwargs=True)
            stack.callback(handle.remove)
            for layer in layers[self.middle + 1 :]:
                stack.callback(layer.register_forward_pre_hook(self._last_inputs, with_kwargs=True).remove)
            stack.callback(setattr, owner, "only_newest", False)
            owner.only_newest = True
            yield

    def _is_mine(self, kwargs: dict) -> bool:
        return kwargs.get(compat.CACHE_ARGUMENT) is self and not self.session.record_past

    def _last_output(self, module: nn.Module, args: tuple, kwargs: dict, output):
        if not self._is_mine(kwargs):
            return output
        return (output[0][:, -1:], *output[1:]) if isinstance(output, tuple) else output[:, -1:]

    def _last_inputs(self, module: nn.Module, args: tuple, kwargs: dict):
        if not self._is_mine(kwargs):
            return None
        kwargs = dict(kwargs)
        for name in ("position_ids", "attention_mask"):
            if isinstance(kwargs.get(name), Tensor):
                kwargs[name] = kwargs[name][..., -1:, :] if kwargs[name].dim() == 4 else kwargs[name][..., -1:]
        if kwargs.get("position_embeddings") is not None:
            kwargs["position_embeddings"] = tuple(part[..., -1:, :] for part in kwargs["position_embeddings"])
        return args, kwargs
