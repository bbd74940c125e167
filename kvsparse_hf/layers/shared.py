"""A layer that stores nothing and reads the keys and values of an earlier one."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..hf.attention import first_mask, newest_mask
from .base import SparseLayer
from .contract import HandedLayer
from .owning import AttentionCall


class SharedLayer(HandedLayer):
    """The reader of an owner's keys and values, the current tokens included.

    In a first prompt it attends to the owner's dense keys and values through the model's own attention; later to what the
    owner has kept, and the new tokens. A selecting owner selects for this layer's query anew. The owner compresses after its
    last reader, and sees the queries of all of them. Everything is computed on the owner's device.

    Args:
        layer_idx: index of the decoder layer.
        owner: the layer it reads, an earlier one.
        native: the model shares by itself: it computes no keys and values in this layer, gives the owner's to the attention
            function, and never calls `update()`. Otherwise what the model computes here is dropped.
    """

    is_croppable = True
    can_rewind = True

    def __init__(self, layer_idx: int, owner: SparseLayer, native: bool = False):
        # Transformers' attributes, without its constructor: `is_initialized` is the owner's.
        self.keys = self.values = None
        self.layer_idx = layer_idx
        self.owner = owner
        self.session = owner.session
        self.native = native

    @property
    def is_initialized(self) -> bool:
        return self.owner.is_initialized

    @property
    def is_compileable(self) -> bool:
        """Whether `generate()` may compile the step."""
        return self.owner.is_compileable

    def is_plain_step(self, tokens: int) -> bool:
        return self.owner.forward is None and self.owner.is_plain_step(tokens)

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *args, **kwargs):
        """One attention call of this layer; `key` and `value` are not looked at. As `SparseLayer.attend`."""
        owner, home = self.owner, query.device
        there = owner.device if owner.forward is None else owner.forward.key.device
        if there != home:
            query, mask = query.to(there), None if mask is None else mask.to(there)
        if owner.forward is not None:
            out, weights = self._open_forward(module, query, mask, *args, **kwargs)
        else:
            call = AttentionCall.of(module, query.shape[-1], kwargs)
            out = owner.read_token(query[:, :, 0], self.session.clock(there), call).unsqueeze(1)
            weights = None
        return out if there == home else out.to(home), weights

    @torch.compiler.disable
    def _open_forward(self, module: nn.Module, query: Tensor, mask: Tensor | None, *args, **kwargs):
        """A multi-token forward: the owner's store is as it was, the new tokens are in its open forward."""
        owner, forward = self.owner, self.owner.forward
        call = AttentionCall.of(module, query.shape[-1], kwargs)
        if forward.is_first:
            if mask is not None and mask.shape[1:] == (1, 1, 1) and mask.dtype == torch.int32:
                mask = first_mask(module.config, query)  # ours, from before the cache started over
            if mask is None and 1 < query.shape[2] < forward.key.shape[2]:
                mask = newest_mask(module.config, query, forward.key.shape[2])
            (out, weights), lse = owner.heard_attention(module, query, forward.key, forward.value, mask, *args, **kwargs)
            owner.bring(query, lse, call)
            return out, weights
        with torch.no_grad():
            tokens, absent = query.shape[2], forward.key.shape[2] - query.shape[2]
            whole = F.pad(query, (0, 0, absent, 0)) if absent else query
            out, lse = owner.attend_turn(whole, forward.key, forward.value, forward.pad, call)
            owner.bring(query, None if lse is None else lse[:, :, -tokens:], call)
        return out[:, :, -tokens:].transpose(1, 2).contiguous(), None

    # --- Transformers' bookkeeping: the owner has done it -----------------------------------------------------------

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The owner's."""
        return self.owner.get_mask_sizes(query_length)

    def get_seq_length(self) -> int | Tensor:
        """Tokens the owner has seen."""
        return self.owner.get_seq_length()

    def reset(self) -> None:
        """Nothing is held."""

    def crop(self, tokens_to_remove: int) -> None:
        """Nothing is held."""

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Nothing is held."""

    def batch_select_indices(self, indices: Tensor) -> None:
        """Nothing is held."""

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Nothing is held."""
