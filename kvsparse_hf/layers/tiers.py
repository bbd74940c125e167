"""Where a layer with several tiers keeps its tokens: on the device, in host memory, or on the device in few bits."""

import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import ops
from ..errors import OptionError
from ..ops.reference.quantized import code_bytes, range_ends
from .base import AttentionCall
from .host import HostMemory
from .store import RaggedStore, static_zeros

FORMATS = {8: "int8", 4: "int4", "fp8": "fp8"}  # what an option `bits` means
Partial = tuple[Tensor, Tensor | None, Tensor | None]  # out, lse and logits, as `ops.decode_attention` returns them


@dataclass(frozen=True)
class Coding:
    """How quantized keys and values are written (see `ops.quantize`).

    Attributes:
        format: "int8", "int4" or "fp8".
        group: neighbouring channels of a token that share a range.
    """

    format: str = "int8"
    group: int = 32

    def check(self, head_dim: int) -> None:
        """Refuses groups that do not divide a head of `head_dim` channels.

        Raises:
            OptionError: with the groups that would do.
        """
        if head_dim % self.group:
            fitting = [group for group in (16, 32, 64, 128) if head_dim % group == 0] or [head_dim]
            raise OptionError(
                f"group={self.group} does not divide the model's head size {head_dim}; use {' or '.join(map(str, fitting))}."
            )
        if self.format == "int4" and head_dim % 2:
            raise OptionError(f"bits=4 packs two channels in a byte and needs an even head size, the model's is {head_dim}.")


class DeviceTier(RaggedStore):
    """Full precision on the device. The other tiers differ in how they hold keys and values."""

    def __init__(self, allocated: Tensor, keys_like: Tensor, values_like: Tensor, grid: int = 1):
        self.dims = keys_like.shape[-1], values_like.shape[-1]
        self.dtype, self.device = keys_like.dtype, keys_like.device
        super().__init__(allocated, keys_like, values_like, grid)

    def _likes(self) -> list[Tensor]:
        """Empty tensors of the head sizes, dtype and device of what is put here."""
        return [torch.empty(0, dim, dtype=self.dtype, device=self.device) for dim in self.dims]

    def _empty(self, allocated: Tensor) -> "DeviceTier":
        return type(self)(allocated, *self._likes(), self.grid)

    def fits(self, needed: Tensor, keys_like: Tensor, values_like: Tensor) -> bool:
        return (
            self.allocated.shape == needed.shape
            and bool((self.allocated >= needed).all())
            and self.dims == (keys_like.shape[-1], values_like.shape[-1])
            and (self.dtype, self.device) == (keys_like.dtype, keys_like.device)
        )

    def fetch(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of rows of any shape, in full precision on the device: `[…, D]`, `[…, Dv]`."""
        return self.keys[rows], self.values[rows]

    def put(self, rows: Tensor, keys: Tensor, values: Tensor) -> None:
        """Writes `[n, D]` keys and `[n, Dv]` values to the rows `[n]`."""
        self.keys[rows] = keys.to(self.keys.dtype)
        self.values[rows] = values.to(self.values.dtype)

    def remember(self, name: str) -> None:
        """Makes room for one number per entry, fp32, where there is none yet."""
        if name not in self.extra:
            self.extra[name] = static_zeros(len(self.positions), dtype=torch.float32, device=self.device)

    def open_all(self) -> None:
        """Lets every segment fill up to what is allocated, and never overwrite."""
        self.capacity.copy_(self.allocated)
        self.pinned.copy_(self.allocated)

    def attend(self, query: Tensor, call: AttentionCall, sinks: Tensor | None, lse: bool, logits: bool, backend: str) -> Partial:
        """Attention of one token `[B, Hq, D]` over this tier alone. Static."""
        options = dict(max_len=self.max_capacity, scale=call.scale, softcap=call.softcap, sinks=sinks)
        options |= dict(return_lse=lse, return_logits=logits, backend=backend)
        return self._attend(query, options)

    def _attend(self, query: Tensor, options: dict) -> Partial:
        return ops.decode_attention(query, self.keys, self.values, self.start, self.length, **options)

    @property
    def entry_bytes(self) -> int:
        """Bytes of one key and value as held here."""
        return sum(dim * self.dtype.itemsize for dim in self.dims)

    def payload(self) -> list[Tensor]:
        """The tensors that hold keys and values."""
        return [self.keys, self.values]


class HostTier(DeviceTier):
    """Full precision in host memory; positions and scores stay on the device.

    A decode step reads the keys and values through the link, in place. Where host memory could not be registered with
    CUDA, they are copied to the device for each step.
    """

    def __init__(self, memory: HostMemory, allocated: Tensor, keys_like: Tensor, values_like: Tensor, grid: int = 1):
        self.memory = memory
        super().__init__(allocated, keys_like, values_like, grid)

    def __deepcopy__(self, memo: dict) -> "HostTier":
        memory = copy.deepcopy(self.memory, memo)
        twin = memo[id(self)] = HostTier(memory, self.allocated.clone(), *self._likes(), self.grid)
        twin.load(self.tensors())
        return twin

    def _payload(self, rows: int, like: Tensor) -> Tensor:
        return self.memory.zeros(rows, like.shape[-1], dtype=like.dtype, device=like.device)

    def _empty(self, allocated: Tensor) -> "HostTier":
        return HostTier(self.memory, allocated, *self._likes(), self.grid)

    def fetch(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = super().fetch(rows.to(self.keys.device))
        return keys.to(self.device), values.to(self.device)

    def put(self, rows: Tensor, keys: Tensor, values: Tensor) -> None:
        where = self.keys.device
        super().put(rows.to(where), keys.to(where), values.to(where))

    def _attend(self, query: Tensor, options: dict) -> Partial:
        keys, values = self.keys.to(self.device), self.values.to(self.device)  # no copy where the device reads them in place
        return ops.decode_attention(query, keys, values, self.start, self.length, **options)


class QuantizedTier(DeviceTier):
    """Codes of few bits on the device, dequantized inside the attention kernel.

    `keys` and `values` hold the codes; the ranges of their groups lie in `extra`. Every token is coded by itself, so tokens
    come and go one by one, and one that leaves and returns is not rounded again.

    In some models (Qwen2.5) a few channels of the keys are a hundred times as large as the others, which would lose their bits
    to them. So every channel of a head is centred on, and divided by, what the prompt shows of it; a decode step multiplies its
    query instead. (KIVI, arXiv 2402.02750, lets 32 tokens of one channel share a range; those could not come and go.)

    Attributes:
        center, spread: `[B, H, Dk]` fp32: mean of a channel over the prompt, and largest distance from it.
    """

    RANGES = ("key_ranges", "value_ranges")
    ENOUGH = 32  # tokens of a prompt that show what channels are like; after fewer, keys are coded as they are
    _PER_HEAD = (*DeviceTier._PER_HEAD, "center", "spread")

    def __init__(self, coding: Coding, allocated: Tensor, keys_like: Tensor, values_like: Tensor, grid: int = 1):
        self.coding = coding
        super().__init__(allocated, keys_like, values_like, grid)
        for name, dim in zip(self.RANGES, self.dims, strict=True):
            shape = self.keys.shape[0], dim // coding.group, range_ends(coding.format)
            self.extra[name] = static_zeros(*shape, dtype=self.dtype, device=self.device)

    def _payload(self, rows: int, like: Tensor) -> Tensor:
        width = code_bytes(like.shape[-1], self.coding.format)
        return static_zeros(rows, width, dtype=torch.uint8, device=like.device)

    def _table(self, name: str, allocated: Tensor, device: torch.device) -> Tensor:
        if name not in ("center", "spread"):
            return super()._table(name, allocated, device)
        table = static_zeros(*allocated.shape, self.dims[0], dtype=torch.float32, device=device)
        return table.fill_(float(name == "spread"))

    def _empty(self, allocated: Tensor) -> "QuantizedTier":
        return QuantizedTier(self.coding, allocated, *self._likes(), self.grid)

    def fit(self, keys: Tensor, pad: Tensor) -> None:
        """Learns what the channels of the keys are like. Nothing may be held.

        Args:
            keys: `[B, H, N, Dk]` of a prompt; pad: `[B, H]` leading ones that are padding.
        """
        real = (torch.arange(keys.shape[2], device=keys.device) >= pad.unsqueeze(-1)).unsqueeze(-1)
        count = real.sum(2)
        enough = count >= self.ENOUGH
        center = torch.where(real, keys, 0).sum(2, dtype=torch.float32) / count.clamp(min=1)
        spread = torch.where(real, keys - center.to(keys.dtype).unsqueeze(2), 0).abs().amax(2).float()
        self.center.copy_(torch.where(enough, center, 0))
        # A channel that hardly moved may do so later: it keeps a thousandth of the widest one.
        spread = spread.clamp(min=spread.amax(-1, keepdim=True) / 1000)
        self.spread.copy_(torch.where(enough & (spread > 0), spread, 1))

    def _segment(self, rows: Tensor) -> Tensor:
        """The number of the segment that each row lies in."""
        return torch.searchsorted(self.start.flatten(), rows.contiguous(), right=True) - 1

    def fetch(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        coding, segment = self.coding, self._segment(rows)
        codes = zip((self.keys, self.values), self.RANGES, strict=True)
        keys, values = (ops.dequantize(held[rows], self.extra[name][rows], coding.format, coding.group) for held, name in codes)
        keys = torch.addcmul(self.center.flatten(0, 1)[segment], keys.float(), self.spread.flatten(0, 1)[segment])
        return keys.to(self.dtype), values

    def put(self, rows: Tensor, keys: Tensor, values: Tensor) -> None:
        segment = self._segment(rows)
        keys = (keys.float() - self.center.flatten(0, 1)[segment]) / self.spread.flatten(0, 1)[segment]
        given = zip((self.keys, self.values), self.RANGES, (keys, values), strict=True)
        for held, name, new in given:
            held[rows], self.extra[name][rows] = ops.quantize(new.to(self.dtype), self.coding.format, self.coding.group)

    def _attend(self, query: Tensor, options: dict) -> Partial:
        if options["softcap"]:  # what the centres add would belong inside the cap
            keys, values = self.fetch(torch.arange(len(self.positions), device=self.device))
            return ops.decode_attention(query, keys, values, self.start, self.length, **options)
        key_ranges, value_ranges = (self.extra[name] for name in self.RANGES)
        grouped = query.float().unflatten(1, (self.heads, -1))
        scaled = (grouped * self.spread.unsqueeze(2)).flatten(1, 2).to(query.dtype)
        args = (scaled, self.keys, key_ranges, self.values, value_ranges, self.start, self.length)
        out, lse, logits = ops.decode_attention_quantized(*args, format=self.coding.format, group=self.coding.group, **options)
        # The centres add the same to all logits of a query: the part weighs more or less, and is itself as it was.
        shift = options["scale"] * (grouped * self.center.unsqueeze(2)).sum(-1).flatten(1)
        return out, None if lse is None else lse + shift, None if logits is None else logits + shift.unsqueeze(-1)

    @property
    def entry_bytes(self) -> int:
        return sum(tensor[0].numel() * tensor.element_size() for tensor in self.payload())

    def payload(self) -> list[Tensor]:
        return [self.keys, self.values, *(self.extra[name] for name in self.RANGES)]
