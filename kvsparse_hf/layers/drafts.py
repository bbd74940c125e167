"""What a layer that evicts does with tokens that may be taken back: it attends to them and does not take them yet."""

import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from .owning import AttentionCall, OwningLayer
from .session import Session


@dataclass
class Held:
    """Tokens that were fed and not taken, all of one forward.

    Attributes:
        query: `[B, Hq, T, D]`; key, value: `[B, H, T, D]`.
        call: of the forward that brought them.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    call: AttentionCall

    @property
    def states(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.query, self.key, self.value

    @property
    def no_padding(self) -> Tensor:
        """`[B]`, for calls that want to know how many of the leading tokens are padding."""
        return torch.zeros(self.key.shape[0], dtype=torch.int64, device=self.key.device)

    def step(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value of one token, `[B, Hq, D]` and `[B, H, D]`."""
        return self.query[:, :, index], self.key[:, :, index], self.value[:, :, index]


class DraftingLayer(OwningLayer):
    """Verification of drafts (assisted decoding, prompt lookup) in a layer where a token that was taken may cost another one its
    place.

    Drafts are attended to as if each had been decoded by itself. What is accepted of them is decoded once more, for good, when
    the rest was taken back (`SparseCache.crop`): so the layer ends where it would be without drafts.

    Attributes:
        drafts: tokens that wait for the verdict.
    """

    drafts: Held | None = None
    session: Session
    device: torch.device

    @torch.compiler.disable
    def drafted_forward(
        self, module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *args, **kwargs
    ) -> Tensor:
        """A prompt, a turn or a decoded token with drafts behind it, `session.drafts` in all: the drafts are held back. Shapes as
        in `kvsparse_attention_forward`; no weights."""
        call = AttentionCall.of(module, query.shape[-1], kwargs)
        known = key.shape[2] - self.session.drafts
        (query, key, value), drafts = zip(
            *(states.tensor_split([known], dim=2) for states in (query, key, value)), strict=True
        )
        if not self.is_initialized:
            if mask is not None:
                mask = mask[..., :known, :known] if mask.dim() == 4 and mask.shape[-1] > 1 else mask[..., :known]
            if kwargs.get("position_ids") is not None:
                kwargs["position_ids"] = kwargs["position_ids"][..., :known]
            out, _ = self.first_forward(module, query, key, value, mask, *args, **kwargs)
        elif self.is_plain_step(known):
            clock = self.session.advance(self.layer_idx, key.device, 1)
            out = self.decode(query[:, :, 0], key[:, :, 0].detach(), value[:, :, 0].detach(), clock, call).unsqueeze(1)
        else:
            out = self.later_forward(query, key, value, call)
        with torch.no_grad():
            more = self.hold_drafts(*drafts, call)
        self.session.held = more.shape[2]
        return torch.cat((out, more.transpose(1, 2)), dim=1)

    def hold_drafts(self, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall) -> Tensor:
        """Attends `T` drafts, which follow what the layer has taken, and keeps them for later. Shapes as in `Held`.

        Returns:
            `[B, Hq, T, Dv]`.
        """
        # Copies: views would keep the whole forward's keys and values alive, the prompt's included.
        self.drafts = Held(*(states.detach().clone() for states in (query, key, value)), call)
        return self.try_drafts(self.drafts)

    def try_drafts(self, drafts: Held) -> Tensor:
        """Attention of the drafts, `[B, Hq, T, Dv]`; this layer stays as it is.

        In general one step after the other on a copy. Layers whose steps leave the others' entries alone do it in one pass.
        """
        twin, tokens = self._twin(), drafts.key.shape[2]
        clock = twin.session.clock(self.device)
        out = []
        for index in range(tokens):
            if twin.due_in() == 0:
                twin.maintain()
            room = twin.open_room()
            if room is not None and room < 1:
                twin.grow(tokens - index)
            clock.advance(1)
            out.append(twin.decode(*drafts.step(index), clock, drafts.call))
        return torch.stack(out, dim=2)

    def _twin(self) -> "DraftingLayer":
        """A copy of this layer with clocks of its own."""
        session = copy.copy(self.session)
        session.clocks = {device: copy.deepcopy(clock) for device, clock in self.session.clocks.items()}
        shared = [getattr(self, "policy", None), self.drafts]
        return copy.deepcopy(self, {id(self.session): session, **{id(thing): thing for thing in shared}})

    def take_draft(self, index: int) -> None:
        """Decodes one of the drafts for good; the room for it was made."""
        clock = self.session.advance(self.layer_idx, self.device, 1)
        self.decode(*self.drafts.step(index), clock, self.drafts.call)
