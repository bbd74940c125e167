"""What a layer does for those that read its keys and values."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..errors import KVSparseError, UnsupportedOperationError
from .contract import HandedLayer
from .reading import OpenForward, as_one_group
from .session import Clock
from .store import RaggedStore


@dataclass(frozen=True)
class AttentionCall:
    """What one attention call fixes besides the tensors.

    Attributes:
        scale: factor on the logits.
        softcap: cap on the logits (Gemma 2), 0 for none.
        sinks: `[Hq]` learned extra logits in the softmax denominator (gpt-oss), or None.
    """

    scale: float
    softcap: float = 0.0
    sinks: Tensor | None = None

    @classmethod
    def of(cls, module: nn.Module, head_dim: int, kwargs: dict) -> "AttentionCall":
        """Reads the keyword arguments of a Transformers attention call; refuses those we would have to ignore."""
        for name in ("position_bias", "sliding_window", "indices", "block_indices", "sinks"):
            if kwargs.get(name) is not None:
                raise UnsupportedOperationError(f"attention with {name} is not supported in a full-attention layer.")
        if kwargs.get("dropout"):
            raise UnsupportedOperationError("attention dropout is active; call model.eval() before generating.")
        scale = kwargs.get("scaling")
        if scale is None:
            scale = getattr(module, "scaling", None) or head_dim**-0.5
        return cls(float(scale), float(kwargs.get("softcap") or 0.0), kwargs.get("s_aux"))


class OwningLayer(HandedLayer):
    """Keys and values that other layers may read as well.

    A multi-token forward stays open until the last reader has attended: until then the store is as it was, and the new tokens
    are in `forward`. In a one-token step the readers come after the token was stored.

    Attributes:
        readers: further layers that read what this one stores (`SharedLayer`).
        forward: a multi-token forward that waits for them.
        is_spent: a training forward ran, of which nothing is kept.
    """

    store: RaggedStore | None

    def __init__(self):
        super().__init__()
        self.readers: list = []
        self.forward: OpenForward | None = None
        self.is_spent = False
        self._gathered: tuple = ()

    def check_ready(self) -> None:
        if self.is_spent:
            raise UnsupportedOperationError(
                "this cache saw a training forward, of which nothing is kept: pass a fresh one to each training step, or reset() it."
            )
        if self.forward is not None:
            raise UnsupportedOperationError(
                f"a forward was interrupted before every layer that reads the keys and values of layer {self.layer_idx} had run; "
                "reset() the cache."
            )

    @torch.no_grad()
    def bring(self, query: Tensor, lse: Tensor | None, call: AttentionCall) -> None:
        """This layer, or one that reads it, has attended in the open forward. After the last, the new tokens are taken."""
        forward = self.forward
        newest = 0 if forward.trains else self.queries_read if self.readers else None
        forward.bring(query, lse, call, newest)
        if len(forward.brought) <= len(self.readers):
            return
        self.forward = None
        if forward.trains:
            self.is_spent = True
            return
        query, lse, call = forward.together()
        if forward.is_first:
            try:
                self.absorb_prompt(query, forward.key, forward.value, forward.positions, forward.pad, call, lse)
            except KVSparseError:
                self.session.abandon()
                raise
            self.is_initialized = True
        else:
            self.take_turn(query, forward.key, forward.value, forward.positions, forward.pad, call, lse)

    @property
    def queries_read(self) -> int | None:
        """How many of a forward's newest queries `absorb_prompt` and `take_turn` look at; None for all."""
        return None

    @property
    def reads_lse(self) -> bool:
        """Whether it pays to hear the softmax denominators of a first prompt's queries (see `heard_attention`)."""
        return False

    def gather(self, *parts: Tensor) -> tuple[Tensor, ...] | None:
        """Collects in a one-token step what this layer and those that read it have to say, `[B, Hq, …]` each.

        Returns:
            Once the last has spoken, all of it as of further query heads; None before.
        """
        if not self.readers:
            return parts
        self._gathered = (*self._gathered, parts)
        if len(self._gathered) <= len(self.readers):
            return None
        gathered, self._gathered = self._gathered, ()
        return tuple(as_one_group(same, self.store.heads) for same in zip(*gathered, strict=True))

    # The parts of `absorb_turn` and `decode`, for a layer that others read.

    def open_turn(self, query, key, value, positions, pad) -> None:
        """Before anyone attends in a later multi-token forward. Shapes as in `absorb_turn`."""

    def attend_turn(self, query, key, value, pad, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        """Attention of new tokens over the kept ones and the new ones: `[B, Hq, T, Dv]`, and the logs of its denominators."""
        raise TypeError(f"{type(self).__name__} cannot be read by other layers.")

    def take_turn(self, query, key, value, positions, pad, call: AttentionCall, lse: Tensor | None) -> None:
        """Takes the new tokens after everyone has attended."""
        raise TypeError(f"{type(self).__name__} cannot be read by other layers.")

    def append_token(self, key: Tensor, value: Tensor, clock: Clock) -> None:
        """Stores one token, `[B, H, D]`. Static, as `decode`."""
        raise TypeError(f"{type(self).__name__} cannot be read by other layers.")

    def read_token(self, query: Tensor, clock: Clock, call: AttentionCall) -> Tensor:
        """Attention of one query `[B, Hq, D]` after the token was stored; returns `[B, Hq, Dv]`. Static, as `decode`."""
        raise TypeError(f"{type(self).__name__} cannot be read by other layers.")

    @classmethod
    def is_readable(cls) -> bool:
        """Whether `decode` and `absorb_turn` consist of the parts that readers use: a subclass that replaced the whole must
        have replaced the parts as well."""
        order = cls.__mro__

        def depth(name: str) -> int:
            return next(index for index, base in enumerate(order) if name in vars(base))

        pairs = (("read_token", "decode"), ("append_token", "decode"), ("attend_turn", "absorb_turn"), ("take_turn", "absorb_turn"))
        return all(depth(part) <= depth(whole) for part, whole in pairs)
