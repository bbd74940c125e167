"""What the layers of one cache share: the padding of each row, the tokens seen, and the phase of the conversation."""

import torch
from torch import Tensor

from ..errors import UnsupportedOperationError
from ..hf import compat
from ..hf.binding import Binding
from ..ops.custom import advance
from .store import static_zeros


class Clock:
    """Tokens seen, on one device. One in-place addition advances it for all layers of that device.

    Attributes:
        state: `[1 + B]` int32. `state[0]` is the number of tokens seen, padding included (what Transformers calls the
            sequence length); `state[1:]` is the position of each row's newest token, counted from its first real one.
        pad: `[B]` int32 leading padding of each row.
        leader: the layer that advances the clock, the first one on its device.
    """

    def __init__(self, batch: int, device: torch.device, leader: int):
        self.state = static_zeros(1 + batch, dtype=torch.int32, device=device)
        self.pad = static_zeros(batch, dtype=torch.int32, device=device)
        self.mask = static_zeros(batch, 1, 1, 1, dtype=torch.int32, device=device)
        self.leader = leader

    def set(self, seen: int, pad: Tensor) -> None:
        self.pad.copy_(pad)
        self.mask.copy_(pad.view(-1, 1, 1, 1))
        self.state[0] = seen
        self.state[1:] = seen - 1 - self.pad

    def advance(self, tokens: int) -> None:
        advance(self.state, tokens)

    @property
    def seen(self) -> Tensor:
        return self.state[0]

    @property
    def newest(self) -> Tensor:
        return self.state[1:]


class Session:
    """Shared by all layers of one cache; copied with it.

    Attributes:
        binding: the model.
        budgeted_layers: layers that share the budget.
        layers: all layer objects of the cache, ours and Transformers' own.
        batch: rows, None before the first forward.
        pad: `[B]` int64 on the host, leading padding.
        host_seen: tokens that the host knows were seen, padding included. Steps inside a compiled or replayed graph are
            not counted, so this is a lower bound of `seen()`.
        decoding: a one-token step has run since the prompt; a later multi-token forward is a new turn, not a chunk of
            the prompt.
        padding_open: some row has seen nothing but padding, so its next token may be padding too.
        record_past: Transformers asked to be able to take tokens back (assisted decoding).
        generate_records: it was `generate()` that asked, so this ends with its run.
        drafts: newest tokens of the coming forward that the layers shall hold back.
        held: tokens that they hold back; `seen()` does not count them.
        restart_pending: the coming forward re-sends the whole sequence, so the cache starts over.
        unclaimed: layer whose keys never reached our attention function.
    """

    def __init__(self, binding: Binding, budgeted_layers: int):
        self.binding = binding
        self.budgeted_layers = budgeted_layers
        self.layers: list = []
        self.clocks: dict[torch.device, Clock] = {}
        self.reset()

    @property
    def first_sparse(self):
        """The first layer that is ours; it checks each forward on behalf of the others."""
        return next((layer for layer in self.layers if hasattr(layer, "session")), None)

    def reset(self) -> None:
        """Forgets the conversation, keeps the clocks' buffers."""
        self.batch: int | None = None
        self.pad: Tensor | None = None
        self.host_seen = 0
        self.decoding = self.padding_open = self.record_past = self.restart_pending = self.generate_records = False
        self.drafts = self.held = 0
        self.unclaimed: int | None = None
        self._announced_pad: Tensor | None = None
        self._origin = 0  # position of the first token, where the caller counts from another number than 0

    # --- before the forward: the mask function ---------------------------------------------------------------------

    def announce(self, mask: Tensor | None, batch: int, q_length: int) -> bool:
        """Reads the 2-D padding mask of the coming forward.

        Returns:
            True when it is a first forward: the cache is empty, or the whole sequence is sent again (`generate()` does so
            for a prompt with no new token).

        Raises:
            UnsupportedOperationError: right padding or holes, another padding than before, another batch size, or a mask
                that leaves out tokens this cache has seen.
        """
        self.restart_pending = False
        if self.batch is None:
            self._announced_pad = leading_padding(mask, batch)
            return True
        self.check_batch(batch)
        if self.padding_open:  # settled here, so that all layers of a forward agree
            self.padding_open = self._has_empty_row()
        if mask is not None and mask.shape[1] < self.host_seen + q_length:
            if mask.shape[1] != q_length:
                raise _already_seen(self.host_seen, mask.shape[1] - q_length)
            self._announced_pad = leading_padding(mask, batch)
            self.restart_pending = True
            return True
        self.decoding |= q_length == 1
        if mask is not None and (q_length > 1 or self.padding_open):
            self._check_continuation(mask, q_length)
        return False

    def _check_continuation(self, mask: Tensor, q_length: int) -> None:
        seen = self.seen()
        if mask.shape[1] < seen + q_length:
            raise _already_seen(seen, mask.shape[1] - q_length)
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

    # --- in the forward --------------------------------------------------------------------------------------------

    def check_positions(self, position_ids: Tensor | None, tokens: int) -> None:
        """Compares the positions of `tokens` new tokens with what was seen; starts over where the sequence is sent again.

        Raises:
            UnsupportedOperationError: tokens that were already seen are fed again.
            BudgetError: a layer could not hold so many more.
        """
        self._compare_positions(position_ids, tokens)
        if tokens > 1:
            for layer in self.layers:
                if hasattr(layer, "check_turn") and layer.is_initialized:
                    layer.check_turn(tokens)

    def _compare_positions(self, position_ids: Tensor | None, tokens: int) -> None:
        if self.batch is None or position_ids is None or position_ids.dim() != 2:
            self._start_over_if(self.restart_pending)
            if self.batch is None and position_ids is not None and position_ids.dim() == 2:
                self._origin = int(position_ids[:, -1].max()) + 1 - tokens
            return
        first = position_ids[:, 0].cpu()
        seen = self.seen()
        expected = (seen - self.pad).clamp(min=0)
        again = not bool(first.any())
        if self.restart_pending and not again:
            self.restart_pending = False
            raise _already_seen(seen, int(first.min()))
        if self.restart_pending or (again and tokens > 1 and bool((expected > 0).all())):
            self._start_over_if(True)
            self._origin = 0
        elif bool(((first < expected) & (self.pad < seen)).any()):
            raise _already_seen(seen, int(first.min()))
        elif int(first.max()) > seen + max(self._origin, 0):
            raise UnsupportedOperationError(
                f"positions jump from {seen + max(self._origin, 0)} to {int(first.max())}: this cache numbers tokens in the order "
                "in which it sees them."
            )

    def _start_over_if(self, again: bool) -> None:
        if not again:
            return
        self.restart_pending = False
        if not all(hasattr(layer, "session") for layer in self.layers):
            raise UnsupportedOperationError(
                "this sequence was already seen, and a model with sliding-window layers cannot start over in the middle of a "
                "forward: call reset() on the cache first, or pass only new tokens."
            )
        kept = {name: getattr(self, name) for name in ("_announced_pad", "record_past", "generate_records", "drafts")}
        self.reset()
        vars(self).update(kept)
        for layer in self.layers:
            layer.reset()

    def abandon(self) -> None:
        """A first prompt was refused when some layers had taken it already: as if it had never come."""
        self.reset()
        for layer in self.layers:
            layer.reset() if hasattr(layer, "session") else compat.reset_layer(layer)

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
            self._count(keys.shape[2])
        self.check_batch(batch)
        clock = self.clocks.get(device)
        if clock is None or clock.pad.shape[0] != batch:
            clock = self.clocks[device] = Clock(batch, device, layer_idx)
        if clock.leader == layer_idx:
            clock.set(keys.shape[2], self.pad)

    def advance(self, layer_idx: int, device: torch.device, tokens: int) -> Clock:
        """The clock of `device`, moved on by `tokens` if this layer leads it."""
        clock = self.clocks[device]
        if clock.leader == layer_idx:
            clock.advance(tokens)
            if not torch.compiler.is_compiling() and clock is next(iter(self.clocks.values())):
                self.host_seen += tokens
                self.decoding |= tokens == 1
        return clock

    def _count(self, seen: int) -> None:
        self.host_seen = seen
        self.padding_open = self._has_empty_row()

    def _has_empty_row(self) -> bool:
        return bool((self.pad >= self.host_seen).any())

    def resync(self) -> None:
        """Asks the device how many tokens were seen, after steps the host did not follow."""
        if self.batch is not None:
            self._count(self.seen())

    def clock(self, device: torch.device) -> Clock:
        return self.clocks[device]

    def seen(self) -> int:
        """Tokens seen, padding included. Waits for the device."""
        return int(next(iter(self.clocks.values())).seen) if self.batch is not None else 0

    def check_batch(self, batch: int) -> None:
        if self.batch is not None and batch != self.batch:
            raise UnsupportedOperationError(
                f"this cache holds {self.batch} rows, the new tokens have {batch}: the batch size may not change between turns. "
                "Use a new cache, or reset() this one."
            )

    def restore_clock(self, device: torch.device, layer_idx: int, seen: int) -> None:
        """Starts the clock of a device for a loaded layer."""
        if device not in self.clocks:
            self.clocks[device] = Clock(self.batch, device, layer_idx)
            self.clocks[device].set(seen, self.pad)
            self._count(seen)

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

    def rewind(self, seen: int) -> None:
        """Sets every clock back to `seen` tokens. Of a row that began later only padding is left."""
        if bool((self.pad > seen).any()):
            self.pad = self.pad.clamp(max=seen)
        for clock in self.clocks.values():
            clock.set(seen, self.pad)
        self._count(seen)


def _already_seen(seen: int, position: int) -> UnsupportedOperationError:
    return UnsupportedOperationError(
        f"this cache has seen {seen} tokens, but the new ones start at position {max(position, 0)}: tokens it has seen are fed "
        "again, or the attention mask leaves them out. Pass the whole conversation, or only its new tokens with a mask over all "
        "of it; or call reset() on the cache to start over."
    )


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
