"""Saving a cache to a folder and reading it back: safetensors for tensors, JSON for the rest. Never pickle."""

import json
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from .errors import KVSparseError, UnsupportedOperationError
from .hf import compat
from .layers.base import SparseLayer

_FORMAT = 1
_TENSORS, _META = "cache.safetensors", "cache.json"


def save_cache(cache, folder: Path) -> None:
    """Writes `cache` (a `SparseCache`) to `folder`. Bytes written are those of the kept entries and their tables."""
    tensors, layers = {}, []
    for index, layer in enumerate(cache.layers):
        state, meta = _layer_state(layer, index)
        layers.append(meta)
        tensors.update({f"{index}.{name}": value.detach().cpu().contiguous().clone() for name, value in state.items()})
    session = cache.session
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
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / _TENSORS)
    (folder / _META).write_text(json.dumps(meta, indent=1))


def _layer_state(layer, index: int) -> tuple[dict, dict]:
    if isinstance(layer, SparseLayer):
        if not layer.is_initialized:
            return {}, {"kind": "sparse", "empty": True}
        return layer.tensors(), {"kind": "sparse", "empty": False, **layer.saved_state()}
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

    meta, tensors = _read(folder)
    cls = get_method(meta["method"])
    cache = cls(model, **meta["options"])
    mine = cache.binding.fingerprint()
    if mine != meta["model"]:
        wrong = ", ".join(f"{k}: saved {meta['model'].get(k)}, here {v}" for k, v in mine.items() if meta["model"].get(k) != v)
        raise UnsupportedOperationError(f"{folder} holds a cache of another model ({wrong}).")
    if len(meta["layers"]) != len(cache.layers):
        raise KVSparseError(f"{folder} holds {len(meta['layers'])} layers, the model has {len(cache.layers)}.")
    if device is None:
        parameters = getattr(model, "parameters", None)
        device = next(parameters()).device if callable(parameters) else torch.device("cpu")
    try:
        _restore(cache, meta, tensors, torch.device(device))
    except (KeyError, RuntimeError, IndexError, TypeError) as error:
        raise KVSparseError(f"{folder} is damaged: {error}") from error
    return cache


def _read(folder: Path) -> tuple[dict, dict[str, torch.Tensor]]:
    try:
        meta = json.loads((folder / _META).read_text())
        tensors = load_file(folder / _TENSORS)
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, SafetensorError) as error:
        raise KVSparseError(f"{folder} is no readable saved cache: {error}") from error
    needed = {"format", "method", "options", "model", "seen", "pad", "decoding", "layers", "tensors"}
    if not isinstance(meta, dict) or needed - meta.keys():
        raise KVSparseError(f"{folder / _META} lacks {', '.join(sorted(needed - set(meta)))}.")
    if meta["format"] != _FORMAT:
        raise KVSparseError(f"{folder} has format {meta['format']}, this version reads {_FORMAT}.")
    if sorted(tensors) != meta["tensors"]:
        raise KVSparseError(f"{folder}: {_TENSORS} does not hold the tensors that {_META} lists.")
    return meta, tensors


def _restore(cache, meta: dict, tensors: dict[str, torch.Tensor], device: torch.device) -> None:
    session = cache.session
    if meta["pad"] is not None:
        session.batch, session.pad = len(meta["pad"]), torch.tensor(meta["pad"], dtype=torch.int64)
        session.decoding = meta["decoding"]
    for index, (layer, saved) in enumerate(zip(cache.layers, meta["layers"], strict=True)):
        if saved["empty"]:
            continue
        prefix = f"{index}."
        state = {name.removeprefix(prefix): t.to(device) for name, t in tensors.items() if name.startswith(prefix)}
        if isinstance(layer, SparseLayer):
            session.restore_clock(device, index, meta["seen"])
            layer.restore(state, saved, device)
        else:
            layer.update(state["keys"], state["values"])
            layer.cumulative_length = saved["cumulative_length"]
