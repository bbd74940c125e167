"""The basis of Loki: principal components of a model's keys, per layer and key/value head."""

import json
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel

from ..errors import KVSparseError, PresetError
from ..hf import compat
from ..hf.binding import Binding, unwrap
from ..policy.basis import components_of

_KIND = "kvsparse_hf loki basis"


def calibrate_loki(
    model: PreTrainedModel, windows: Iterable[Tensor], path: str | Path, max_tokens: int = 131072, progress=None
) -> dict:
    """Fits the basis on rotated keys and writes it to a safetensors file for `LokiCache(basis=path)`.

    Args:
        model: the model; used as it is (its attention is not switched).
        windows: `[T]` or `[1, T]` token ids, each run from position 0 as a text of its own. Lengths as at use are best.
        path: file to write.
        max_tokens: stop after so many tokens.
        progress: called with the number of tokens after each window.

    Returns:
        What was written beside the tensors: fingerprint, tokens, and the share of variance that a quarter of the
        components holds, averaged over layers and heads.

    Raises:
        KVSparseError: no tokens.
    """
    config = compat.text_config(model.config)
    sums: dict[int, list[Tensor]] = {}
    tokens = 0
    for window in windows:
        window = torch.as_tensor(window).view(1, -1)[:, : max_tokens - tokens].to(model.device)
        if window.shape[1] == 0:
            break
        _add_keys(model, config, window, sums)
        tokens += window.shape[1]
        if progress is not None:
            progress(tokens)
    if tokens == 0:
        raise KVSparseError("no tokens to calibrate on.")
    tensors, held = {}, []
    for layer, (total, square) in sums.items():
        mean = total / tokens
        basis, variance = components_of(square / tokens - mean.unsqueeze(-1) * mean.unsqueeze(-2))
        tensors[f"basis.{layer}"], tensors[f"variance.{layer}"] = basis.cpu(), variance.cpu()
        quarter = max(1, basis.shape[-1] // 4)
        held.append(float((variance[:, :quarter].sum(-1) / variance.sum(-1).clamp(min=1e-20)).mean()))
    meta = {
        "kind": _KIND,
        "model": fingerprint(model),
        "tokens": tokens,
        "variance_in_quarter": sum(held) / len(held),
    }
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, {"kvsparse": json.dumps(meta)})
    return meta


@torch.no_grad()
def _add_keys(model: PreTrainedModel, config: PretrainedConfig, window: Tensor, sums: dict[int, list[Tensor]]) -> None:
    cache = DynamicCache(config=config)
    model(window, **{compat.CACHE_ARGUMENT: cache}, use_cache=True)
    for index, layer in enumerate(cache.layers):
        if not compat.is_full_attention_layer(layer):
            continue
        keys = layer.keys[0].double()  # [H, T, D]
        total, square = keys.sum(1), keys.transpose(1, 2) @ keys
        if index in sums:
            sums[index][0] += total
            sums[index][1] += square
        else:
            sums[index] = [total, square]


def load_basis(path: str | Path, model: PreTrainedModel | PretrainedConfig, binding: Binding) -> dict[int, Tensor]:
    """Reads a basis file: `[H, D, D]` by layer.

    Raises:
        PresetError: no such file, not a basis, or that of another model (its shape, or its weights where `model` has them).
    """
    path = Path(path)
    try:
        with safe_open(path, "pt") as file:
            meta = json.loads((file.metadata() or {}).get("kvsparse", "{}"))
            tensors = {name: file.get_tensor(name) for name in file.keys() if name.startswith("basis.")}
    except (OSError, SafetensorError, json.JSONDecodeError) as error:
        raise PresetError(f"basis {str(path)!r} is not readable: {error}") from error
    if meta.get("kind") != _KIND:
        raise PresetError(f"{str(path)!r} is not a basis that `kvsparse calibrate loki` wrote.")
    _check_model(path, meta["model"], fingerprint(model))
    bases = {int(name.removeprefix("basis.")): tensor for name, tensor in tensors.items()}
    for layer, basis in bases.items():
        if basis.shape[1:] != (binding.head_dim, binding.head_dim) or basis.shape[0] != binding.kv_heads:
            raise PresetError(
                f"basis {str(path)!r}, layer {layer}: shape {tuple(basis.shape)}, the model has {binding.kv_heads} key/value heads "
                f"of size {binding.head_dim}."
            )
    return bases


def _check_model(path: Path, saved: dict, mine: dict) -> None:
    wrong = [f"{k}: calibrated on {v}, here {mine.get(k)}" for k, v in saved.items() if k != "probe" and mine.get(k) != v]
    if wrong:
        raise PresetError(f"basis {str(path)!r} belongs to another model ({', '.join(wrong)}).")
    if saved["probe"] is None or mine["probe"] is None:
        return
    theirs, ours = torch.tensor(saved["probe"]), torch.tensor(mine["probe"])
    # Loading in another precision, or quantized, moves the weights a little; another model's have nothing in common.
    if float((theirs - ours).norm()) > 0.3 * float(theirs.norm()):
        raise PresetError(
            f"basis {str(path)!r} was calibrated on other weights of the same shape; calibrate it on this model with "
            "`kvsparse calibrate loki`."
        )


def fingerprint(model: PreTrainedModel | PretrainedConfig) -> dict:
    """JSON facts that tell models apart: shape, rotary base, and a few weights of the token embedding."""
    model = unwrap(model)
    config = compat.text_config(getattr(model, "config", model))
    rope = getattr(config, "rope_parameters", None) or {}
    facts = {name: getattr(config, name, None) for name in ("model_type", "vocab_size", "hidden_size", "num_hidden_layers")}
    facts["num_key_value_heads"] = getattr(config, "num_key_value_heads", None)
    facts["rope_theta"] = rope.get("rope_theta") if isinstance(rope.get("rope_theta"), int | float) else None
    return {**facts, "probe": _probe(model) if isinstance(model, PreTrainedModel) else None}


def _probe(model: PreTrainedModel) -> list[float] | None:
    embedding = model.get_input_embeddings()
    weight = getattr(embedding, "weight", None)
    if weight is None or weight.is_meta or not weight.is_floating_point():
        return None
    flat = weight.detach().flatten()
    at = torch.linspace(0, flat.numel() - 1, 64, dtype=torch.float64).long()
    return [round(float(value), 6) for value in flat[at.to(flat.device)].float().cpu()]
