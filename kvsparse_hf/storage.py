"""Saving a cache to a folder and reading it back: safetensors for tensors, JSON for the rest. Never pickle."""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load, save

from .errors import KVSparseError, UnsupportedOperationError
from .hf import compat
from .hf.binding import Binding
from .layers.base import SparseLayer
from .layers.shared import SharedLayer
from .layers.store import RaggedStore
from .ranks import Ranks
from .texts import brief, brief_error, read_json

_FORMAT = 1
_TENSORS, _META = "cache.safetensors", "cache.json"


class _SavedLayer(BaseModel):
    """One layer: what it is, and the facts its `restore` asks for."""

    model_config = ConfigDict(extra="allow", strict=True)

    kind: str = Field(pattern="^(sparse|sliding|shared|dummy)$")
    empty: bool


class _Saved(BaseModel):
    """The contents of `cache.json`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    format: int
    method: str
    options: dict[str, Any]
    model: dict[str, Any]
    seen: int = Field(ge=0, lt=2**31)
    pad: list[int] | None
    decoding: bool
    layers: list[_SavedLayer]
    tensors: list[str]
    sha256: str


def save_cache(cache, folder: Path) -> None:
    """Writes `cache` (a `SparseCache`) to `folder`. Bytes written are those of the kept entries and their tables.

    Under tensor parallelism every rank writes its own heads, to a folder in `folder`. Where each has all heads, the first writes
    what a single process would, and the others wait for it.
    """
    tensors, layers = {}, []
    for index, layer in enumerate(cache.layers):
        state, meta = _layer_state(layer, index)
        layers.append(meta)
        tensors.update({f"{index}.{name}": value.detach().cpu().contiguous().clone() for name, value in state.items()})
    session = cache.session
    blob = save(tensors)
    meta = {
        "format": _FORMAT,
        "method": cache.method,
        "options": cache.option_dict(),
        "model": cache.binding.fingerprint(),
        "seen": session.seen(),
        "pad": None if session.pad is None else session.pad.tolist(),
        "decoding": session.decoding,
        "layers": layers,
        "tensors": sorted(tensors),
        "sha256": hashlib.sha256(blob).hexdigest(),
    }
    ranks, processes = cache.binding.ranks, cache.binding.processes
    if ranks.size == processes.size:
        _write(folder, ranks, blob, meta)
    else:
        processes.only_first(lambda: _write(folder, ranks, blob, meta))


def _write(folder: Path, ranks: Ranks, blob: bytes, meta: dict[str, Any]) -> None:
    own = _of_rank(folder, ranks)
    _remove_other_ranks(folder, ranks)
    own.mkdir(parents=True, exist_ok=True)
    (own / _TENSORS).write_bytes(blob)
    (own / _META).write_text(json.dumps(meta, indent=1), encoding="utf-8")


def _layer_state(layer, index: int) -> tuple[dict, dict]:
    if isinstance(layer, SparseLayer):
        if not layer.is_initialized:
            return {}, {"kind": "sparse", "empty": True}
        return layer.tensors(), {"kind": "sparse", "empty": False, **layer.saved_state()}
    if isinstance(layer, SharedLayer):
        return {}, {"kind": "shared", "empty": True}
    if compat.is_sliding_layer(layer):
        if not layer.is_initialized:
            return {}, {"kind": "sliding", "empty": True}
        return {"keys": layer.keys, "values": layer.values}, {
            "kind": "sliding",
            "empty": False,
            "cumulative_length": int(layer.cumulative_length),
        }
    if getattr(layer, "keys", None) is None and not hasattr(layer, "conv_states"):
        return {}, {"kind": "dummy", "empty": True}
    raise UnsupportedOperationError(f"layer {index} ({type(layer).__name__}) keeps state that cannot be saved yet.")


def load_cache(folder: Path, model, device: torch.device | str | None):
    """Reads a folder that `save_cache` wrote. Nothing of the model is touched before the files were checked."""
    from .registry import get_method

    binding = Binding.of(model)
    _check_ranks(folder, binding.ranks)
    folder = _of_rank(folder, binding.ranks)
    saved, tensors = _read(folder)
    mine = binding.fingerprint()
    if mine != saved.model:
        wrong = ", ".join(f"{k}: saved {saved.model.get(k)}, here {v}" for k, v in mine.items() if saved.model.get(k) != v)
        raise UnsupportedOperationError(f"{folder} holds a cache of another model ({wrong or 'other facts'}).")
    layers = len(compat.layer_template(compat.text_config(getattr(model, "config", model))))
    if len(saved.layers) != layers:
        raise KVSparseError(f"{folder} is damaged: {len(saved.layers)} layers for a model with {layers}.")
    cls = get_method(saved.method)
    if device is None:
        parameters = getattr(model, "parameters", None)
        device = next(parameters()).device if callable(parameters) else torch.device("cpu")
    before = compat.text_config(getattr(model, "config", model))._attn_implementation
    try:
        cache = cls(model, **saved.options)
        _restore(cache, saved, tensors, torch.device(device))
    except (KeyError, RuntimeError, IndexError, TypeError, ValueError, AttributeError, OverflowError, MemoryError) as error:
        compat.text_config(getattr(model, "config", model))._attn_implementation = before
        raise KVSparseError(f"{folder} is damaged: {brief_error(error)}") from error
    return cache


def _of_rank(folder: Path, ranks: Ranks) -> Path:
    return folder if ranks.size == 1 else folder / f"rank-{ranks.rank}-of-{ranks.size}"


def _remove_other_ranks(folder: Path, ranks: Ranks) -> None:
    """Removes what another number of processes saved there before, which would be taken for a part of this cache."""
    if ranks.rank:
        return
    for old in (folder, *folder.glob("rank-*-of-*")):
        if old != _of_rank(folder, ranks) and not (ranks.size > 1 and old.name.endswith(f"-of-{ranks.size}")):
            for name in (_META, _TENSORS):
                (old / name).unlink(missing_ok=True)
            if old != folder and not any(old.iterdir()):
                old.rmdir()


def _check_ranks(folder: Path, ranks: Ranks) -> None:
    """Refuses a cache that another number of processes saved: its heads are cut in another way."""
    try:
        others = sorted(folder.glob("rank-*-of-*"))
    except (OSError, ValueError):  # no name that a folder can have; reading it will say so
        return
    saved_by = others[0].name.rpartition("-")[2] if others else "1"
    if saved_by != str(ranks.size) and (others or (folder / _META).is_file()):
        raise UnsupportedOperationError(
            f"{folder} was saved by {saved_by} tensor-parallel rank(s), this model runs on {ranks.size}; load it on as many ranks."
        )


def _read(folder: Path) -> tuple[_Saved, dict[str, torch.Tensor]]:
    try:
        saved = _Saved(**read_json((folder / _META).read_text(encoding="utf-8")))
        blob = (folder / _TENSORS).read_bytes()
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise KVSparseError(f"{folder / _META} is damaged: {where}: {first['msg']}.") from error
    except (OSError, TypeError, ValueError) as error:
        raise KVSparseError(f"{brief(str(folder))} is no readable saved cache: {brief_error(error)}") from error
    if saved.format != _FORMAT:
        raise KVSparseError(f"{folder} has format {saved.format}, this version reads {_FORMAT}.")
    if hashlib.sha256(blob).hexdigest() != saved.sha256:
        raise KVSparseError(f"{folder / _TENSORS} is damaged: its contents are not what was saved.")
    try:
        tensors = load(blob)
    except SafetensorError as error:
        raise KVSparseError(f"{folder / _TENSORS} is damaged: {error}") from error
    if sorted(tensors) != saved.tensors:
        raise KVSparseError(f"{folder}: {_TENSORS} does not hold the tensors that {_META} lists.")
    if saved.pad is not None and not (saved.pad and all(0 <= pad <= saved.seen for pad in saved.pad)):
        raise KVSparseError(f"{folder / _META} is damaged: pad {saved.pad} does not fit {saved.seen} tokens.")
    return saved, tensors


def _restore(cache, saved: _Saved, tensors: dict[str, torch.Tensor], device: torch.device) -> None:
    session = cache.session
    if saved.pad is not None:
        session.batch, session.pad = len(saved.pad), torch.tensor(saved.pad, dtype=torch.int64)
        session.decoding = saved.decoding
    for index, (layer, facts) in enumerate(zip(cache.layers, saved.layers, strict=True)):
        if facts.empty:
            continue
        prefix = f"{index}."
        state = {name.removeprefix(prefix): t.to(device) for name, t in tensors.items() if name.startswith(prefix)}
        if facts.kind == "sparse":
            if len(state["start"]) != session.batch:
                raise KVSparseError(f"layer {index} holds {len(state['start'])} rows, the cache {session.batch}.")
            session.restore_clock(device, index, saved.seen)
            layer.restore(state, facts.model_extra, device)
            for store in layer.stores:
                if isinstance(store, RaggedStore):  # the others know positions by the place
                    _check_positions(store, saved.seen)
        else:
            layer.update(state["keys"], state["values"])
            layer.cumulative_length = facts.model_extra["cumulative_length"]


def _check_positions(store: RaggedStore, seen: int) -> None:
    """Refuses entries that stand where no token was seen."""
    rows, valid = store.slots()
    positions = store.positions[rows][valid]
    if positions.numel() and (int(positions.min()) < 0 or int(positions.max()) >= seen):
        raise KVSparseError(f"entries stand at positions that {seen} tokens do not have.")
