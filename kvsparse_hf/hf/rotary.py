"""Moves keys that already carry their rotary position, for `positions="cache"`.

Rotary attention sees only position differences, so numbering the kept tokens by their place in the cache (as
StreamingLLM does) equals rotating every kept key forward by the number of evicted tokens that lie after it, with the
query left at its original position.
"""

import copy
import inspect
import sys
from collections.abc import Callable

import torch
from transformers import PretrainedConfig

from ..errors import UnsupportedModelError
from . import compat
from .rotated import rotates

# Types whose frequencies depend on the sequence length: a key rotated at another length cannot be moved exactly.
_LENGTH_DEPENDENT = ("dynamic", "longrope")


class KeyRotation:
    """Rotates post-RoPE keys by an integer number of positions, with the model's own layout and frequencies.

    The frequencies are the scaled ones the model uses (llama3, yarn, linear); the attention scaling that yarn puts on
    cos and sin is already in the keys and is not applied again. All arithmetic is fp32.
    """

    purpose = "positions='cache'"
    remedy = "use positions='original'"

    def __init__(self, config: PretrainedConfig, model_class: type | None, layer_type: str | None = None):
        """Reads the model's rotary module.

        Raises:
            UnsupportedModelError: no rotary embedding, a length-dependent one, or a layout we cannot reproduce.
        """
        if getattr(config, "qk_rope_head_dim", None):
            raise self._refusal(f"{config.model_type} rotates only a slice of its latent keys")
        module = sys.modules.get(model_class.__module__) if model_class is not None else None
        try:
            rotary = _rotary_module(module, config)
        except LookupError as error:
            raise self._refusal(f"{config.model_type} has no rotary embedding") from error
        if "mrope_section" in _rope_parameters(config, layer_type) or hasattr(rotary, "mrope_section"):
            raise self._refusal(f"{config.model_type} can give images positions in several dimensions")
        self._apply = _rotating_function(module)
        if self._apply is None:
            raise self._refusal(f"{config.model_type} has no rotary embedding we can use")
        kind = _rope_parameters(config, layer_type).get("rope_type", "default")
        if kind in _LENGTH_DEPENDENT:
            raise self._refusal(f"the frequencies of rope_type={kind!r} change with the length, so it cannot be exact")
        inv_freq = getattr(rotary, f"{layer_type}_inv_freq", None) if layer_type else None
        inv_freq = getattr(rotary, "inv_freq", None) if inv_freq is None else inv_freq
        if inv_freq is None:
            raise self._refusal(f"{config.model_type} has no rotary embedding we can use")
        self.inv_freq = inv_freq.float().clone()
        self._spread = self._check(rotary, layer_type)

    def _refusal(self, why: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"{self.purpose}: {why}; {self.remedy}.")

    def _check(self, rotary: torch.nn.Module, layer_type: str | None) -> Callable[[torch.Tensor], torch.Tensor]:
        """Compares our cos/sin with the model's; returns how they lay out the frequencies."""
        positions = torch.tensor([[0, 1, 7, 40]])
        args = (torch.zeros(1, 4, 1), positions)
        try:
            cos, sin = rotary(*args, layer_type) if layer_type and hasattr(rotary, f"{layer_type}_inv_freq") else rotary(*args)
        except Exception as error:
            raise self._refusal(f"cannot evaluate the model's rotary embedding ({error})") from error
        scale = getattr(rotary, f"{layer_type}_attention_scaling", None) or getattr(rotary, "attention_scaling", 1.0)
        for spread in (_once, _twice, _in_pairs):
            expected = self._angles(positions, spread)
            if all(
                mine.shape == theirs.shape and torch.allclose(theirs, mine * scale, atol=1e-5)
                for mine, theirs in zip(expected, (cos, sin), strict=True)
            ):
                return spread
        raise self._refusal("the model's rotary layout is unknown")

    def _angles(self, shift: torch.Tensor, spread: Callable | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        angles = (spread or self._spread)(shift.unsqueeze(-1).float() * self.inv_freq.to(shift.device))
        return angles.cos(), angles.sin()

    def on(self, device: torch.device) -> "KeyRotation":
        """The same rotation with its frequencies on `device`, where no step has to copy them: a graph could not."""
        if self.inv_freq.device == device:
            return self
        moved = copy.copy(self)
        moved.inv_freq = self.inv_freq.to(device)
        return moved

    def __call__(self, keys: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        """Rotates keys forward.

        Args:
            keys: `[N, M, D]` keys that carry their rotation.
            shift: `[N, M]` positions to move each key by.

        Returns:
            `[N, M, D]` in the dtype of `keys`.
        """
        return self._turn(keys, *self._angles(shift))

    def _turn(self, keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        width = 2 * self.inv_freq.shape[-1]  # partial rotary: only the first `width` dims of a head carry the position
        turning = keys[..., :width].float().unsqueeze(1)
        rotated = self._apply(turning, cos, sin).squeeze(1).to(keys.dtype)
        return torch.cat((rotated, keys[..., width:]), dim=-1) if width < keys.shape[-1] else rotated


class FutureRotation(KeyRotation):
    """Also turns vectors that carry no rotation to where a future token would stand, on average over several tokens."""

    purpose = "the average over future positions"
    remedy = "use another method"

    def average(self, vectors: torch.Tensor, first: torch.Tensor, count: int) -> torch.Tensor:
        """Mean of the rotations to positions `first … first + count - 1`; linear in the vectors.

        Args:
            vectors: `[N, M, D]` fp32 without rotation.
            first: `[N]` positions.
        """
        ahead = first.unsqueeze(-1) + torch.arange(count, device=first.device)
        shape = (-1, vectors.shape[1], -1)
        cos, sin = (angle.mean(1, keepdim=True).expand(shape) for angle in self._angles(ahead))
        return self._turn(vectors, cos, sin)


def layer_rotation(
    kind: type[KeyRotation], config: PretrainedConfig, model_class: type | None, layer: int
) -> KeyRotation | None:
    """The rotation of one full-attention layer; None where the layer does not rotate.

    Args:
        kind: `KeyRotation` or `FutureRotation`.

    Raises:
        UnsupportedModelError: a rotation that cannot be turned exactly, or a model of which that is not known.
    """
    try:
        if not rotates(config, model_class, layer):
            return None
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{kind.purpose}: {error}; {kind.remedy}.") from None
    types = getattr(config, "layer_types", None)
    return kind(config, model_class, types[layer] if types else None)


def _rotating_function(module) -> Callable | None:
    """The function of a model's file that rotates `(x, cos, sin)`; most take query and key together."""
    function = getattr(module, "apply_rotary_pos_emb", None)
    names = list(inspect.signature(function).parameters) if function is not None else []
    if names[1:3] == ["cos", "sin"]:
        return function
    if names[2:4] == ["cos", "sin"]:
        return lambda x, cos, sin: function(x, x, cos, sin)[0]
    return None


def restart_length(config: PretrainedConfig, model_class: type | None) -> int | None:
    """Tokens after which `generate()` computes all keys of the model again, with other rotary frequencies; None for never."""
    if not compat.drops_caches(model_class) or _rope_parameters(config, None).get("rope_type") != "longrope":
        return None
    return config.original_max_position_embeddings


def _once(angles: torch.Tensor) -> torch.Tensor:
    return angles


def _twice(angles: torch.Tensor) -> torch.Tensor:
    return torch.cat((angles, angles), dim=-1)


def _in_pairs(angles: torch.Tensor) -> torch.Tensor:
    return angles.repeat_interleave(2, dim=-1)


def _rope_parameters(config: PretrainedConfig, layer_type: str | None) -> dict:
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if layer_type and isinstance(parameters.get(layer_type), dict):
        parameters = parameters[layer_type]
    return parameters


def _rotary_module(module, config: PretrainedConfig) -> torch.nn.Module:
    names = [name for name in vars(module or object) if name.endswith("RotaryEmbedding") and "Vision" not in name]
    for name in names:
        try:
            return getattr(module, name)(config=config)
        except Exception:  # a class for another part of the model; the next one may fit
            continue
    raise LookupError(config.model_type)
