"""`SparseCache`: a Transformers cache whose full-attention layers are ours."""

import copy
import json
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from .errors import UnsupportedOperationError
from .hf import compat, handoff
from .hf.binding import Binding
from .hf.rotary import restart_length
from .hf.sharing import LayerMap, check_undeclared
from .layers.base import SparseLayer
from .layers.session import Session
from .layers.shared import SharedLayer
from .options import CommonOptions, parse_options
from .report import CacheReport, make_report
from .room import StepRoom
from .storage import load_cache, save_cache
from .taking_back import TakingBack


class SparseCache(TakingBack, StepRoom, Cache):
    """Base of all caches of this library. Pass one to an unmodified `model.generate(past_key_values=cache)`.

    Constructing a cache on a model switches that model's attention to `kvsparse` (`kvsparse_hf.detach` restores it);
    other caches on the same model give exactly what they gave before.

    Args:
        model: a causal language model, or its config.
        options: the method's options and the common ones (see `Options` of the class).

    Attributes:
        method: the name under which the method is registered.
        paper: where it was published.
        action: what happens to the tokens that do not stay: "evict", "offload", "quantize", "skip" or "none".
        needs: what the scorer needs to see.
        prefix_safe: whether a compressed prompt may be reused for another continuation, because the decision did not
            depend on what came last.
    """

    method: ClassVar[str]
    paper: ClassVar[str] = ""
    action: ClassVar[str] = "none"
    needs: ClassVar[str] = "nothing"
    prefix_safe: ClassVar[bool] = True
    Options: ClassVar[type[CommonOptions]] = CommonOptions

    def __init__(self, model: PreTrainedModel | PretrainedConfig, **options: Any):
        self.options = parse_options(self.Options, self.method, options)
        self.binding = Binding.of(model)
        layers = compat.layer_template(self.binding.config)
        full = [index for index, layer in enumerate(layers) if compat.is_full_attention_layer(layer)]
        self.check_layers(layers)
        self.layer_map = self.make_map(full)
        # Readers come last in a model that shares by itself, and may have no cache layer at all.
        ours = [index for index in full if self.layer_map.sources[index] == index]
        self.session = Session(self.binding, len(ours))
        self._sparse = ours
        self.prepare()
        for index in ours:
            layers[index] = self.make_layer(index)
        self._connect_readers(layers)
        super().__init__(layers=layers)
        self.session.layers = self.layers
        self._first_sparse = ours[0] if ours else -1
        self._first_attention = next(index for index, layer in enumerate(layers) if isinstance(layer, CacheLayerMixin))
        model_class = self.binding.model_class
        self.begin_with_room(self.options.reserve, restart_length(self.binding.config, model_class))
        self._is_dropped_if_true = compat.drops_caches(model_class)
        self.binding.attach()

    @classmethod
    def options_for(cls, given: dict[str, Any]) -> type[CommonOptions]:
        """The schema of the options that `given` belong to."""
        return cls.Options

    # --- what a method fills in ------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Runs once before the layers are made: reads plans, checks options against the model."""

    def make_map(self, full: list[int]) -> LayerMap:
        """Whose keys and values each layer reads: as the model does it, unless a subclass imposes a map.

        Args:
            full: the layers with plain full attention.
        """
        check_undeclared(self.binding.config, self.method)
        return LayerMap.of_model(self.binding.config)

    def make_layer(self, layer_idx: int) -> SparseLayer:
        """The layer object of one full-attention decoder layer."""
        raise TypeError(f"{type(self).__name__} is abstract; construct one of kvsparse_hf.list_methods().")

    def check_layers(self, layers: list) -> None:
        """Refuses cache layers whose further state this library would ignore."""
        compat.check_layer_kinds(layers, self.binding.config.model_type)

    def _connect_readers(self, layers: list) -> None:
        """Puts a `SharedLayer` in the place of every layer that reads another one's keys and values."""
        native = self.layer_map.native
        for index in self._sparse:
            owner, readers = layers[index], self.layer_map.readers_of(index)
            if readers and not owner.is_readable():
                raise UnsupportedOperationError(
                    f"{self.method} cannot serve layers that share keys and values yet ({type(owner).__name__})."
                )
            owner.readers = [SharedLayer(reader, owner, native) for reader in readers]
            if native:
                owner.native_readers = tuple(owner.readers)
            else:
                for reader in owner.readers:
                    layers[reader.layer_idx] = reader

    # --- Transformers' contract ------------------------------------------------------------------------------------

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Takes the new keys and values of one layer, `[B, Hkv, T, D]`, and hands the layer to the attention function."""
        if layer_idx >= len(self.layers):
            raise UnsupportedOperationError(
                f"layer {layer_idx} does not exist in this cache: it was made for a model with {len(self.layers)} layers."
            )
        if layer_idx == 0 < self._first_sparse and not torch.compiler.is_compiling():
            # Layers that are not ours take the tokens before ours could refuse them.
            self.session.check_positions((kwargs.get("kwargs") or {}).get("position_ids"), key_states.shape[2])
        if layer_idx == self._first_sparse and not torch.compiler.is_compiling():
            if not self._step_prepared:
                self._prepare_step(self._expect(key_states.shape[2]))
            self._step_prepared = False
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """`(length, offset)` for the mask of a layer; also tells our mask function whose mask is being built."""
        if layer_idx == 0:
            layer_idx = self._first_attention  # masks ask for layer 0, also where that one is linear
        layer = self.layers[layer_idx] if layer_idx < len(self.layers) else None
        length, offset = super().get_mask_sizes(query_length, layer_idx)
        if not isinstance(layer, SparseLayer):
            return length, offset
        if not torch.compiler.is_compiling():
            # `generate()` builds the masks outside the compiled step, which makes this the place to grow buffers.
            self._step_prepared = False
            self._prepare_step(self._expect(query_length))
        return handoff.offer_mask(layer, length), offset

    def __bool__(self) -> bool:
        """True, but where that would take the cache away (see `compat.drops_caches`)."""
        return not self._is_dropped_if_true

    def reset(self) -> None:
        """Forgets everything seen; buffers stay, so compiled graphs stay valid."""
        for layer in self.layers:
            layer.reset() if isinstance(layer, SparseLayer) else compat.reset_layer(layer)
        self.session.reset()
        self.forget_room()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row `i` becomes what row `beam_idx[i]` was, in every layer."""
        self._take_drafts(self.session.held)
        super().reorder_cache(beam_idx)
        self._select_session(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps only the given rows."""
        self._take_drafts(self.session.held)
        super().batch_select_indices(indices)
        self._select_session(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats every row `repeats` times."""
        self._take_drafts(self.session.held)
        super().batch_repeat_interleave(repeats)
        if self.session.batch is not None:
            self._select_session(torch.arange(self.session.batch).repeat_interleave(repeats))

    def _select_session(self, index: Tensor) -> None:
        if self.session.batch is not None:
            self.session.select_batch(index)

    @property
    def is_compileable(self) -> bool:
        """Whether `generate()` may compile the steps, for which it builds their masks ahead."""
        return super().is_compileable and compat.builds_every_mask(self.binding.config)

    @property
    def is_initialized(self) -> bool:
        """Whether a prompt was read."""
        return int(self.get_seq_length()) > 0

    @property
    def batch_size(self) -> int:
        """Rows held, -1 before the first forward."""
        return -1 if self.session.batch is None else self.session.batch

    # --- what a user touches ---------------------------------------------------------------------------------------

    @property
    def sparse_layers(self) -> list[SparseLayer]:
        """The layers that are ours, in order."""
        return [self.layers[index] for index in self._sparse]

    def report(self) -> CacheReport:
        """What the cache holds now. Waits for the device."""
        session = self.session
        seen = [] if session.batch is None else (session.seen() - session.pad).clamp(min=0).tolist()
        return make_report(self.method, self.layers, seen)

    def plot(self, path: str | Path | None = None, row: int = 0, tokens: list[str] | None = None):
        """A picture of which tokens of one row are kept, moved and evicted, by layer. Waits for the device.

        Args:
            path: also write it there: .png, .svg, .pdf, or one self-contained .html page with the text below the map.
            row: the row of the batch.
            tokens: the text of the row's tokens.

        Returns:
            The matplotlib figure (None for .html).

        Raises:
            KVSparseError: matplotlib is not installed.
        """
        from .pictures import Decisions, page, plot

        decisions = Decisions.of(self, row, tokens)
        if path is not None and Path(path).suffix == ".html":
            return page.save(decisions, path)
        figure = plot.draw(decisions)
        if path is not None:
            figure.savefig(path, dpi=plot.DPI)
        return figure

    def save(self, path: str | Path) -> None:
        """Writes the cache to a folder (`cache.safetensors` and `cache.json`). Under tensor parallelism, call it on every rank."""
        self._take_drafts(self.session.held)
        save_cache(self, Path(path))

    @classmethod
    def load(cls, path: str | Path, model: PreTrainedModel | PretrainedConfig, device: torch.device | str | None = None):
        """Reads a saved cache back for the same model.

        Args:
            path: the folder `save` wrote.
            model: the model, or its config.
            device: where the tensors go; default: the device of the model's parameters, else the CPU.

        Raises:
            KVSparseError: a damaged file, or a cache of another model.
        """
        return load_cache(Path(path), model, device)

    def fork(self) -> "SparseCache":
        """An independent copy, to continue one prefix in several ways."""
        return copy.deepcopy(self)

    def option_dict(self) -> dict:
        """The options as plain JSON values."""
        return json.loads(self.options.model_dump_json())

    def __del__(self):
        # The layers and what they share know each other. Cut loose, their memory is free at once instead of whenever
        # Python looks for circles, which may be after the next cache did not fit.
        if "session" in vars(self):
            self.session.layers = []
        for layer in vars(self).get("layers", ()):
            if isinstance(layer, SparseLayer):
                layer.readers, layer.native_readers = [], ()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in self.option_dict().items())})"
