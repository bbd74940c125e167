"""What the layers of one cache share: the padding of each row, the tokens seen, and the phase of the conversation."""

import torch
from torch import Tensor

from ..errors import UnsupportedOperationError
from ..hf.binding import Binding
from .store import mark_static


class Clock:
    """Tokens seen, on one device. One in-place addition advances it for all layers of that device.

    Attributes:
        state: `[1 + B]` int32. `state[0]` is the number of tokens seen, padding included (what Transformers calls the
            sequence length); `state[1:]` is the position of each row's newest token, counted from its first real one.
        pad: `[B]` int32 leading padding of each row.
        leader: the layer that advances the clock, the first one on its device.
    """

    def __init__(self, batch: int, device: torch.device, leader: int):
        self.state = mark_static(torch.zeros(1 + batch, dtype=torch.int32, device=device))
        self.pad = mark_static(torch.zeros(batch, dtype=torch.int32, device=device))
        self.mask = mark_static(torch.zeros(batch, 1, 1, 1, dtype=torch.int32, device=device))
        self.leader = leader

    def set(self, seen: int, pad: Tensor) -> None:
        self.pad.copy_(pad)
        self.mask.copy_(pad.view(-1, 1, 1, 1))
        self.state[0] = seen
        self.state[1:] = seen - 1 - self.pad

    def advance(self, tokens: int) -> None:
        self.state.add_(tokens)

    @property
    def seen(self) -> Tensor:
        return self.state[0]

    @property
    def newest(self) -> Tensor:
        return self.state[1:]


class Session:
    """Shared by all layers of one cache; copied with it.

    Attributes:
        batch: rows, None before the first forward.
        pad: `[B]` int64 on the host, leading padding.
        decoding: a one-token step has run since the prompt; a later multi-token forward is a new turn, not a chunk of
            the prompt.
        record_past: Transformers asked to be able to take tokens back (assisted decoding).
        budgeted_layers: layers that share the budget.
        restart_pending: the coming forward re-sends the whole sequence, so the cache starts over.
    """

    def __init__(self, binding: Binding, budgeted_layers: int):
        self.binding = binding
        self.budgeted_layers = budgeted_layers
        self.clocks: dict[torch.device, Clock] = {}
        self.batch: int | None = None
        self.pad: Tensor | None = None
        self.decoding = False
        self.record_past = False
        self.restart_pending = False
        self._announced_pad: Tensor | None = None
        self._restarted = False

    def reset(self) -> None:
        """Forgets the conversation, keeps the clocks' buffers."""
        self.batch = self.pad = self._announced_pad = None
        self.decoding = self.record_past = self.restart_pending = self._restarted = False

    def restart(self, position_ids: Tensor | None) -> None:
        """Starts over for a forward that re-sends the whole sequence; the caller resets the layers."""
        self._restarted = True
        self.check_restart(position_ids)
        pad, record_past = self._announced_pad, self.record_past
        self.reset()
        self._announced_pad, self.record_past, self._restarted = pad, record_past, True

    def check_restart(self, position_ids: Tensor | None) -> None:
        """Tells a re-sent sequence (positions from 0) from new tokens under a mask that leaves out the seen ones."""
        if self._restarted and position_ids is not None and int(position_ids.min()) > 0:
            raise UnsupportedOperationError(
                "the attention mask covers only the new tokens, but this cache has seen others: pass a mask over all of them."
            )
        self._restarted = self._restarted and position_ids is None

    # --- before the forward: the mask function ---------------------------------------------------------------------

    def announce(self, mask: Tensor | None, batch: int, q_length: int, started: bool) -> bool:
        """Reads the 2-D padding mask of the coming forward. One-token steps are not checked: that would cost a sync.

        Returns:
            True when this forward re-sends the whole sequence (`generate()` does so for a prompt with no new token):
            it then counts as a first forward.

        Raises:
            UnsupportedOperationError: right padding or holes, another padding than before, or another batch size.
        """
        restart = started and mask is not None and mask.shape[1] == q_length
        if restart or not started:
            self._announced_pad, self.restart_pending = leading_padding(mask, batch), restart
            return restart
        self.check_batch(batch)
        self.decoding |= q_length == 1
        if mask is not None and q_length > 1:
            self._check_continuation(mask, q_length)
        return False

    def _check_continuation(self, mask: Tensor, q_length: int) -> None:
        seen = self.seen()
        if mask.shape[1] < seen + q_length:
            raise UnsupportedOperationError(
                f"the attention mask covers {mask.shape[1]} tokens, but {seen} were seen and {q_length} are new: pass a mask over "
                "all of them."
            )
        pad = leading_padding(mask, self.batch)
        # A row that so far was nothing but padding (chunked prefill) may still turn out longer.
        same = (pad == self.pad) | ((self.pad >= seen) & (pad >= seen))
        if not bool(same.all()):
            raise UnsupportedOperationError(
                f"the rows' leading padding changed from {self.pad.tolist()} to {pad.tolist()}; padding may only stand before "
                "the first token of a row."
            )
        if not torch.equal(pad, self.pad):
            self.pad = pad
            for clock in self.clocks.values():
                clock.set(seen, pad)

    def seen(self) -> int:
        """Tokens seen, padding included. Waits for the device."""
        return int(next(iter(self.clocks.values())).seen) if self.batch is not None else 0

    def check_batch(self, batch: int) -> None:
        if self.batch is not None and batch != self.batch:
            raise UnsupportedOperationError(
                f"this cache holds {self.batch} rows, the new tokens have {batch}: the batch size may not change between turns. "
                "Use a new cache, or reset() this one."
            )

    # --- in the forward --------------------------------------------------------------------------------------------

    def begin(self, layer_idx: int, keys: Tensor, has_mask: bool) -> None:
        """First forward of one layer: fixes the batch and its padding, and starts the clock of the layer's device."""
        batch, device = keys.shape[0], keys.device
        if self.batch is None:
            if self._announced_pad is None and has_mask:
                raise UnsupportedOperationError(
                    "this model (or caller) builds its own attention mask; only 2-D padding masks are supported."
                )
            self.batch = batch
            self.pad = torch.zeros(batch, dtype=torch.int64) if self._announced_pad is None else self._announced_pad
        self.check_batch(batch)
        clock = self.clocks.get(device)
        if clock is None or clock.pad.shape[0] != batch:
            clock = self.clocks[device] = Clock(batch, device, layer_idx)
        if clock.leader == layer_idx:
            clock.set(keys.shape[2], self.pad)

    def bytes_per_token(self, keys: Tensor, values: Tensor) -> int:
        """Bytes that one token kept everywhere costs per row: key, value and position in every budgeted layer and head."""
        entry = keys.shape[-1] * keys.element_size() + values.shape[-1] * values.element_size() + 4
        return entry * keys.shape[1] * self.budgeted_layers

    def clock(self, device: torch.device) -> Clock:
        return self.clocks[device]

    def restore_clock(self, device: torch.device, layer_idx: int, seen: int) -> None:
        """Starts the clock of a device for a loaded layer."""
        if device not in self.clocks:
            self.clocks[device] = Clock(self.batch, device, layer_idx)
            self.clocks[device].set(seen, self.pad)

    def select_batch(self, index: Tensor) -> None:
        """Permutes, repeats or drops rows."""
        index = index.cpu()
        self.pad = self.pad[index]
        self.batch = len(index)
        for device, clock in self.clocks.items():
            seen = int(clock.seen)
            if clock.pad.shape[0] != self.batch:
                clock = self.clocks[device] = Clock(self.batch, device, clock.leader)
            clock.set(seen, self.pad)


def leading_padding(mask: Tensor | None, batch: int) -> Tensor:
    """`[B]` int64 on the host: how many leading tokens of each row are padding.

    Raises:
        UnsupportedOperationError: when a padding token follows a real one.
    """
    if mask is None:
        return torch.zeros(batch, dtype=torch.int64)
    mask = mask.bool().cpu()
    pad = mask.shape[1] - mask.sum(1)
    if bool((mask[:, 1:] < mask[:, :-1]).any()):
        raise UnsupportedOperationError(
            "the attention mask has padding after a real token; use left padding (tokenizer.padding_side='left')."
        )
    return pad
