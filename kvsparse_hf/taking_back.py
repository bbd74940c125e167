"""Tokens that may be taken back: `crop`, and the drafts of assisted decoding."""

import torch
from torch import Tensor

from .errors import UnsupportedOperationError
from .hf import compat
from .layers.base import SparseLayer
from .layers.session import Session


class TakingBack:
    """The part of a cache that forgets its newest tokens.

    Where nothing is ever evicted, drafts are taken as they come and dropped again. Elsewhere the layers hold them back (see
    `DraftingLayer`) until the next `crop`, which says how many were accepted; a forward without a `crop` before accepts all.
    """

    layers: list
    session: Session
    sparse_layers: list[SparseLayer]

    @property
    def is_croppable(self) -> bool:
        """Whether `crop` can put the whole cache back as it was before the newest forward."""
        return (self.session.record_past or self._keeps_all) and self._others_are_croppable

    @property
    def can_rewind(self) -> bool:
        """Whether `crop` can take back tokens that were decoded one by one since the last compression."""
        return all(getattr(layer, "can_rewind", False) for layer in self.layers)

    @property
    def _others_are_croppable(self) -> bool:
        """Of the layers that Transformers keeps."""
        return all(getattr(layer, "is_croppable", True) for layer in self.layers if not isinstance(layer, SparseLayer))

    @property
    def _keeps_all(self) -> bool:
        return all(layer.is_croppable for layer in self.sparse_layers)

    # --- drafts ----------------------------------------------------------------------------------------------------

    def activate_past_recording(self) -> None:
        """Transformers (or another loop) is about to feed drafts that it may take back.

        In `generate()` the running loop says how many tokens of a forward are drafts. In a loop of the caller's own the first
        token of a later forward is no draft, the others are, and a first prompt holds none; `crop(-n)` must follow each forward.

        Raises:
            UnsupportedOperationError: layers that evict are read by others, or the model has linear-attention layers.
        """
        if compat.only_stops_late():
            self._record_others()
        else:
            self._record_past(of_generate=compat.drafted_tokens(self) is not None)

    def _record_past(self, of_generate: bool) -> None:
        if not self._others_are_croppable:
            raise UnsupportedOperationError("this model has linear-attention layers, whose state cannot take drafts back.")
        if not self._keeps_all and any(layer.readers for layer in self.sparse_layers):
            raise UnsupportedOperationError(
                f"{type(self).__name__} evicts, and has layers that others read as well: drafts cannot be tried out in one layer before "
                "the others have seen them. Generate without drafts (assisted decoding, prompt lookup), or use a method that evicts "
                "nothing."
            )
        self.session.record_past, self.session.generate_records = True, of_generate
        self._record_others()

    def _record_others(self) -> None:
        for layer in self.layers:
            if hasattr(layer, "activate_past_recording"):
                layer.activate_past_recording()

    def _forget_past(self) -> None:
        self.session.record_past = self.session.generate_records = False
        for layer in self.layers:
            if getattr(layer, "record_past", False):  # Transformers' own
                layer.record_past = False

    def _expect(self, tokens: int) -> int:
        """Before a forward of so many tokens: finds out how many of them are drafts.

        Returns:
            How many are none.
        """
        session = self.session
        if session.held:
            self._take_drafts(session.held)
        session.drafts = 0
        if tokens == 1 and not session.record_past:
            return tokens
        drafts = compat.drafted_tokens(self)
        if drafts is not None:
            if not session.record_past:  # versions before 5.16 do not announce drafts
                self._record_past(of_generate=True)
        elif session.record_past and session.generate_records:
            self._forget_past()  # that run is over
        elif session.record_past:
            drafts = tokens - 1 if session.batch is not None else 0
        if drafts and not self._keeps_all:
            session.drafts = min(drafts, tokens - 1)
        return tokens - session.drafts

    def _take_drafts(self, count: int) -> None:
        """Decodes the first `count` of the tokens held back, for good, and drops the others."""
        if not self.session.held:
            return  # as at every step of a beam search, which is not to ask for room again
        self.session.held = 0
        for index in range(count):
            self._step_prepared = False
            self._prepare_step(1)
            for layer in self.sparse_layers:
                layer.take_draft(index)
        for layer in self.sparse_layers:
            layer.drafts = None
        self.forget_room()

    # --- crop ------------------------------------------------------------------------------------------------------

    def crop(self, tokens_to_remove: int) -> None:
        """Takes back the newest tokens. As in the running version of Transformers, a negative number counts the tokens to
        remove (and, before 5.16, a positive one is the length to keep).

        Raises:
            UnsupportedOperationError: where older tokens were overwritten or evicted and cannot come back.
        """
        seen = int(self.get_seq_length())
        removed = self._tokens_to_remove(int(tokens_to_remove), seen)
        if seen == 0:
            return
        if removed >= seen:
            self.reset()
            return
        pad, held = self.session.pad, self.session.held
        first_removed = seen - removed - (torch.zeros(1, dtype=torch.int64) if pad is None else pad)
        taken_back = max(removed - held, 0)  # of what our layers have taken
        self._check_crop(removed, taken_back, first_removed)
        if held:
            self._take_drafts(max(held - removed, 0))
        for layer in self.layers:
            if isinstance(layer, SparseLayer):
                if taken_back:
                    layer.crop(first_removed)
            elif removed or getattr(layer, "record_past", False):
                layer.crop(-removed if compat.CROP_IS_RELATIVE else seen - removed)
        if pad is not None:
            self.session.rewind(seen - removed)
        self.forget_room()

    def _check_crop(self, removed: int, taken_back: int, first_removed: Tensor) -> None:
        """Raises before anything was changed."""
        if removed == 0:
            return
        for index, layer in enumerate(self.layers):
            if isinstance(layer, SparseLayer):
                if taken_back:
                    layer.check_crop(first_removed)
            elif compat.is_sliding_layer(layer) and not compat.can_crop_sliding(layer):
                raise UnsupportedOperationError(
                    f"layer {index} is a sliding window of {layer.sliding_window} tokens that has moved on; it cannot take tokens "
                    "back unless it recorded its past (assisted decoding does so)."
                )
            elif compat.is_linear_layer(layer) and not compat.can_crop_linear(layer):
                raise UnsupportedOperationError(f"layer {index} is linear attention, whose state cannot take tokens back.")

    @staticmethod
    def _tokens_to_remove(argument: int, seen: int) -> int:
        if argument <= 0:
            return -argument
        if compat.CROP_IS_RELATIVE:
            raise UnsupportedOperationError(f"crop({argument}): pass a negative number of tokens to remove.")
        return max(seen - argument, 0)
