"""The contract between Transformers and one full-attention decoder layer of ours."""

from abc import abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import UnsupportedOperationError
from ..hf import compat, listening
from ..hf.attention import WINDOWED, base_attention, first_mask
from ..policy.base import Candidates
from .drafts import DraftingLayer
from .owning import AttentionCall
from .reading import OpenForward
from .session import Clock, Session
from .store import RaggedStore, check_payload, storage_bytes


def _may_wait(tensor: Tensor) -> bool:
    """Whether the host may ask the device something now: not while a graph is traced or captured."""
    if torch.compiler.is_compiling():
        return False
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


class SparseLayer(DraftingLayer):
    """Base of our layers: counters, padding, the three kinds of forward, and Transformers' bookkeeping calls.

    Subclasses implement `absorb_prompt` and `absorb_turn` (what to do with a multi-token forward) and `decode` (a one-token
    step), and the parts of them (see `OwningLayer`) where other layers may read this one's keys and values.

    Attributes:
        is_croppable: tokens can be taken back without a trace; otherwise drafts are held back until they are verified.
        can_rewind: at least the tokens decoded one by one since the last compression can be taken back.
        only_newest: of a first prompt, nobody wants the attention of any but the newest token: the others get zeros.
    """

    is_croppable = True
    can_rewind = True
    only_newest = False

    def __init__(self, layer_idx: int, session: Session):
        super().__init__()
        self.layer_idx = layer_idx
        self.session = session
        self.device: torch.device | None = None
        self.store: RaggedStore | None = None

    # --- the forward -----------------------------------------------------------------------------------------------

    def is_plain_step(self, tokens: int) -> bool:
        return self.is_initialized and tokens == 1 and not self.session.padding_open

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *args, **kwargs):
        """One attention call of this layer. Shapes as in `kvsparse_attention_forward`; returns `([B, T, Hq, Dv], weights)`."""
        session, tokens = self.session, query.shape[2]
        if mask is not None and mask.dtype == WINDOWED:
            raise UnsupportedOperationError(
                f"this model limits layer {self.layer_idx} to a sliding window, and its config says that the layer sees everything."
            )
        if _may_wait(key) and self is session.first_sparse:
            session.check_positions(kwargs.get("position_ids"), tokens)
        if tokens > 1 and session.drafts:
            return self.drafted_forward(module, query, key, value, mask, *args, **kwargs), None
        if not self.is_initialized:
            return self.first_forward(module, query, key, value, mask, *args, **kwargs)
        call = AttentionCall.of(module, query.shape[-1], kwargs)
        if self.is_plain_step(tokens):
            clock = session.advance(self.layer_idx, key.device, 1)
            out = self.decode(query[:, :, 0], key[:, :, 0].detach(), value[:, :, 0].detach(), clock, call)
            return out.unsqueeze(1), None
        return self.later_forward(query, key, value, call), None

    @torch.compiler.disable
    def first_forward(self, module, query, key, value, mask, *args, **kwargs):
        """The model's own attention over the prompt, bit for bit; then this layer takes what it keeps."""
        call = AttentionCall.of(module, query.shape[-1], kwargs)
        session = self.session
        if mask is not None and mask.shape[1:] == (1, 1, 1) and mask.dtype == torch.int32:
            mask = first_mask(module.config, query)  # ours, from before the cache started over
        session.begin(self.layer_idx, key, has_mask=mask is not None)
        out, lse = self.heard_attention(module, query, key, value, mask, *args, **kwargs)
        self.device = key.device
        clock = session.clock(key.device)
        positions = torch.arange(key.shape[2], device=key.device) - clock.pad.unsqueeze(1)
        pad = clock.pad.long().unsqueeze(1).expand(-1, key.shape[1])
        positions = positions.unsqueeze(1).expand(-1, key.shape[1], -1)
        trains = module.training and torch.is_grad_enabled()
        self.forward = OpenForward(key, value, positions, pad, is_first=True, trains=trains)
        self.bring(query, lse, call)
        return out

    def heard_attention(self, module: nn.Module, query: Tensor, *args, **kwargs):
        """`prompt_attention`, and the logs `[B, Hq, T]` of its softmax denominators where this layer reads them and the kernel
        that ran tells."""
        # learned sinks are not in what the kernels tell
        if not self.reads_lse or query.device.type not in listening.DEVICES or kwargs.get("s_aux") is not None:
            return self.prompt_attention(module, query, *args, **kwargs), None
        with listening.LseListener() as listener:
            out = self.prompt_attention(module, query, *args, **kwargs)
        return out, listener.lse(query)

    def prompt_attention(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *args, **kwargs):
        """Attention over a first prompt, of this layer or of one that reads it: what the model would have run without us."""
        if not (self.only_newest and query.shape[2] > 1):
            return base_attention(module, query, key, value, mask, *args, **kwargs)
        mask = mask[:, :, -1:] if mask is not None and mask.dim() == 4 else mask
        newest, weights = base_attention(module, query[:, :, -1:], key, value, mask, *args, **kwargs)
        return F.pad(newest, (0, 0, 0, 0, query.shape[2] - 1, 0)), weights

    @torch.compiler.disable
    def later_forward(self, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall) -> Tensor:
        """Chunked prefill, a next turn, or a draft: attention over kept + new, then this layer takes the new tokens."""
        tokens = key.shape[2]
        clock = self.session.advance(self.layer_idx, key.device, tokens)
        positions = clock.newest.long().unsqueeze(1) + torch.arange(1 - tokens, 1, device=key.device)
        pad = (-positions[:, 0]).clamp(0, tokens)  # leading new tokens that are still padding
        with torch.no_grad():
            if self.readers:
                self.open_turn(query, key, value, positions, pad)
                out, lse = self.attend_turn(query, key, value, pad, call)
                self.forward = OpenForward(key, value, positions, pad, is_first=False)
                self.bring(query, lse, call)
            else:
                out = self.absorb_turn(query, key, value, positions, pad, call)
        return out.transpose(1, 2).contiguous()

    def _candidates(self, query, keys, values, positions, pad, call: AttentionCall, **more) -> Candidates:
        """The tokens of a multi-token forward as a policy sees them. Shapes as in `Candidates`."""
        binding = self.session.binding
        facts = (call.scale, call.softcap, call.sinks, self.layer_idx, binding.layers)
        return Candidates(query, keys, values, positions, pad, *facts, ranks=binding.ranks, **more)

    @abstractmethod
    def absorb_prompt(self, query, key, value, positions, pad, call: AttentionCall, lse: Tensor | None = None) -> None:
        """Takes the first forward's tokens. `positions`, `pad`: `[B, H, N]` and `[B, H]` leading padding; `lse`: see
        `heard_attention`."""

    @abstractmethod
    def absorb_turn(self, query, key, value, positions, pad, call: AttentionCall) -> Tensor:
        """Attends `T` new tokens and takes them. `positions` `[B, T]`, `pad` `[B]`; returns `[B, Hq, T, Dv]`."""

    @abstractmethod
    def decode(self, query: Tensor, key: Tensor, value: Tensor, clock: Clock, call: AttentionCall) -> Tensor:
        """One token: `query [B, Hq, D]`, `key`/`value [B, H, D]`; returns `[B, Hq, Dv]`. Static: no sync, no allocation
        that outlives the step, nothing that depends on data."""

    # --- Transformers' bookkeeping ---------------------------------------------------------------------------------

    def prepare_mask(self, config, batch: int, q_length: int, mask_function, attention_mask: Tensor | None) -> Tensor | None:
        """Called by the mask function before the forward.

        Returns:
            None when the base attention's own mask is wanted (first forward); else the fixed `[B, 1, 1, 1]` tensor.
        """
        session = self.session
        session.binding.check_config(config)
        if session.announce(attention_mask, batch, q_length):
            return None
        if q_length > 1 and not compat.is_plain_causal(mask_function):
            raise UnsupportedOperationError(
                "this model overlays its own pattern on the causal mask (image blocks, prefix-LM); only its first prompt can hold "
                "such tokens."
            )
        return session.clock(self.device).mask

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """`(length, offset)` of the keys a forward attends to. Only the first forward's mask is built from them."""
        if not self.is_initialized:
            return query_length, 0
        return self.store.max_capacity + query_length, 0

    def get_seq_length(self) -> int | Tensor:
        """Tokens *seen*, padding included: 0, or a 0-d device tensor once a prompt was seen (an int would recompile)."""
        if not self.is_initialized:
            return 0
        seen = self.session.clock(self.device).seen
        return seen if torch.compiler.is_compiling() else seen + self.session.held

    def reset(self) -> None:
        """Forgets the tokens and keeps the buffers, so that compiled graphs stay valid."""
        self.is_initialized = False
        self.forward, self.is_spent, self._gathered, self.drafts = None, False, (), None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row `i` becomes what row `beam_idx[i]` was, with all its state."""
        if self.is_initialized:
            self.store = self.store.select_batch(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps only the given rows."""
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats every row `repeats` times."""
        if self.is_initialized:
            self.reorder_cache(torch.arange(self.store.batch).repeat_interleave(repeats))

    def check_crop(self, first_removed: Tensor) -> None:
        """Raises `UnsupportedOperationError` where tokens from positions `first_removed` `[B]` on cannot be taken back."""

    def crop(self, first_removed: Tensor) -> None:
        """Forgets the tokens at positions `first_removed` `[B]` and later (`SparseCache.crop` works this out)."""
        if self.is_initialized:
            self.store.truncate(first_removed.to(self.device))

    # --- what it holds ---------------------------------------------------------------------------------------------

    @property
    def stores(self) -> list[RaggedStore]:
        """Every store that holds tokens of this layer."""
        return [] if self.store is None else [self.store]

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor this layer holds, by name."""
        return self.store.tensors() if self.store is not None else {}

    @property
    def grid(self) -> int:
        """Of the store (see `RaggedStore`)."""
        return 1

    def saved_state(self) -> dict:
        """JSON facts that `restore` needs besides `tensors()`."""
        return {"allocated": self.store.allocated.tolist()}

    def restore(self, tensors: dict[str, Tensor], saved: dict, device: torch.device) -> None:
        """Takes over a saved layer: `tensors` as `tensors()` named them, on `device`."""
        self.device = device
        allocated = torch.tensor(saved["allocated"])
        self.check_saved(allocated, tensors["keys"], tensors["values"])
        self.store = RaggedStore(allocated, tensors["keys"], tensors["values"], self.grid)
        self.store.load(tensors)
        self.is_initialized = True

    def check_saved(self, allocated: Tensor, keys: Tensor, values: Tensor) -> None:
        """Raises `KVSparseError` unless saved keys and values `[R, D]` fill segments `allocated` `[B, H]` of this model."""
        check_payload(allocated, keys, values)
        for states in (keys, values):
            self.session.binding.check_heads(allocated.shape[1], states.shape[1])

    def device_bytes(self) -> int:
        """Bytes of this layer's storages."""
        return storage_bytes(self.tensors().values())

    def host_bytes(self) -> int:
        """Bytes this layer holds in host memory for offloaded tokens."""
        return 0

    def traffic(self) -> tuple[int, int, int]:
        """Hits, misses and bytes moved to the device of a layer that offloads. Waits for the device."""
        return 0, 0, 0

    def reserve_bytes(self) -> int:
        """The part of `device_bytes` that is allocated and empty."""
        empty = int((self.store.allocated - self.store.length.cpu()).sum())
        return empty * self._entry_bytes()

    def dense_bytes(self, tokens: int) -> int:
        """What a dense cache of so many tokens (summed over the rows) holds in this layer: keys and values only."""
        return tokens * self.store.heads * (self._entry_bytes() - self.store.positions.element_size())

    def _entry_bytes(self) -> int:
        store = self.store
        return sum(t.shape[-1] * t.element_size() for t in (store.keys, store.values)) + store.positions.element_size()

    def bytes_read_per_step(self) -> int:
        """Bytes of keys, values and metadata that the next one-token step reads. Waits for the device."""
        return int(self.store.length.sum()) * (self._entry_bytes() - self.store.positions.element_size())

    def kept_entries(self) -> Tensor:
        """`[B, H]` entries held: on the device, or in all tiers of a layer that has several."""
        return self.store.length

    def token_places(self, row: int, seen: int) -> dict[str, Tensor]:
        """Where the tokens of a row are, by place ("device", "host", "quantized"): `[H, seen]` bool each. Waits for the device."""
        return {"device": self.store.tokens_held(row, seen)}

    def reachable_entries(self) -> Tensor:
        """`[B, H]` entries that a later step can still read, wherever they are."""
        return self.kept_entries()

    def tier_entries(self) -> dict[str, int]:
        """Entries by the place where they are, for a layer that has several. Waits for the device."""
        return {}

    def open_room(self) -> int | None:
        """One-token steps that surely fit before `grow` is needed; None for a layer that never grows. Waits for the device."""
        return None

    def check_turn(self, tokens: int) -> None:
        """Raises `BudgetError` before a later forward of so many tokens where the layer could not hold them."""

    def grow(self, room: int) -> None:
        """Makes room for `room` further tokens per head (outside any compiled step)."""

    def due_in(self) -> int | None:
        """One-token steps that may run before `maintain` must; None for a layer without periodic work. Waits for the device."""
        return None

    def maintain(self) -> bool:
        """Periodic work between two steps (outside any compiled step). True when buffers moved."""
        return False
