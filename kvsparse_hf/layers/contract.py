"""What every layer object of ours is to Transformers, whether it stores keys and values or reads another layer's."""

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from ..errors import UnsupportedOperationError
from ..hf import handoff
from .session import Session


class HandedLayer(CacheLayerMixin):
    """Hands itself from `update()` to the attention function.

    Attributes:
        native_readers: layers of ours that read this one's keys and values in a model that shares by itself: they have no
            `update()`, so this layer's announces them.
    """

    is_sliding = False
    is_compileable = True
    supports_early_init = False
    layer_idx: int
    session: Session
    native_readers: tuple = ()

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do ahead of time: buffers are sized by the prompt."""

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Hands this layer to the attention function and returns the new keys and values as they are.

        Args:
            key_states, value_states: `[B, Hkv, T, D]`, rotated.
        """
        session = self.session
        session.binding.check_attached()
        waiting = handoff.pending_attention()
        if session.unclaimed is not None or (waiting is not None and waiting.session is session):
            missed = session.unclaimed if session.unclaimed is not None else waiting.layer_idx
            handoff.drop_attention()
            raise UnsupportedOperationError(
                f"the keys and values of layer {missed} never reached the 'kvsparse' attention function: the model's attention was "
                "switched, it does not use Transformers' AttentionInterface, or a forward was interrupted (then reset() the cache)."
            )
        if not torch.compiler.is_compiling():
            session.check_batch(key_states.shape[0])
            session.binding.check_heads(key_states.shape[1], key_states.shape[3])
            self.check_ready()
        if not torch.compiler.is_compiling() or self.is_plain_step(key_states.shape[2]):
            handoff.offer_attention(self, key_states, value_states)
            if self.native_readers:
                handoff.offer_readers(self.native_readers, key_states)
        else:
            handoff.offer_outside(self, key_states, value_states, self.native_readers)
        return key_states, value_states

    def check_ready(self) -> None:
        """Refuses new tokens while something else must come first."""

    def is_plain_step(self, tokens: int) -> bool:
        """Whether a forward of so many tokens is a one-token step, which may be traced; all others run in plain Python."""
        raise TypeError(f"{type(self).__name__} must define this.")

    def get_max_length(self) -> int:
        """No maximum: -1."""
        return -1

    def get_max_cache_shape(self) -> int:
        """The name of `get_max_length` before Transformers 5.13."""
        return -1

    def offload(self) -> None:
        raise UnsupportedOperationError("layer-wise offloading is not supported; use a cache whose action is 'offload'.")

    def prefetch(self) -> None:
        raise UnsupportedOperationError("layer-wise offloading is not supported; use a cache whose action is 'offload'.")
