"""Moves keys that already carry their rotary position, for `positions="cache"`.

Rotary attention sees only position differences, so numbering the kept tokens by their place in the cache (as
StreamingLLM does) equals rotating every kept key forward by the number of evicted tokens that lie after it, with the
query left at its original position.
"""

import copy
import sys

import torch
from transformers import PretrainedConfig

from ..errors import UnsupportedModelError

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
        module = sys.modules.get(model_class.__module__) if model_class is not None else None
        self._apply = getattr(module, "apply_rotary_pos_emb", None)
        if self._apply is None:
            raise self._refusal(f"{config.model_type} has no rotary embedding we can use")
        try:
            rotary = _rotary_module(module, config)
        except LookupError as error:
            raise self._refusal(f"{config.model_type} has no rotary embedding") from error
        if getattr(config, "qk_rope_head_dim", None):
            raise self._refusal(f"{config.model_type} rotates only a slice of its latent keys")
        kind = _rope_type(config, layer_type)
        if kind in _LENGTH_DEPENDENT:
            raise self._refusal(f"the frequencies of rope_type={kind!r} change with the length, so it cannot be exact")
        inv_freq = getattr(rotary, f"{layer_type}_inv_freq", None) if layer_type else None
        self.inv_freq = (getattr(rotary, "inv_freq", None) if inv_freq is None else inv_freq).float().clone()
        self._half_width = self._check(rotary, layer_type)

    def _refusal(self, why: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"{self.purpose}: {why}; {self.remedy}.")

    def _check(self, rotary: torch.nn.Module, layer_type: str | None) -> bool:
        """Compares our cos/sin with the model's; returns whether they hold each frequency once (not twice)."""
        positions = torch.tensor([[0, 1, 7, 40]])
        args = (torch.zeros(1, 4, 1), positions)
        try:
            cos, sin = rotary(*args, layer_type) if layer_type and hasattr(rotary, f"{layer_type}_inv_freq") else rotary(*args)
        except Exception as error:
            raise self._refusal(f"cannot evaluate the model's rotary embedding ({error})") from error
        scale = getattr(rotary, f"{layer_type}_attention_scaling", None) or getattr(rotary, "attention_scaling", 1.0)
        half_width = cos.shape[-1] == self.inv_freq.shape[-1]
        mine_cos, mine_sin = self._angles(positions, half_width)
        if cos.shape != mine_cos.shape or not torch.allclose(cos, mine_cos * scale, atol=1e-5):
            raise self._refusal("the model's rotary layout is unknown")
        assert sin.shape == mine_sin.shape
        return half_width

    def _angles(self, shift: torch.Tensor, half_width: bool) -> tuple[torch.Tensor, torch.Tensor]:
        angles = shift.unsqueeze(-1).float() * self.inv_freq.to(shift.device)
        if not half_width:
            angles = torch.cat((angles, angles), dim=-1)
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
        return self._turn(keys, *self._angles(shift, self._half_width))

    def _turn(self, keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        width = 2 * self.inv_freq.shape[-1]  # partial rotary: only the first `width` dims of a head carry the position
        turning = keys[..., :width].float().unsqueeze(1)
        rotated = self._apply(turning, turning, cos, sin)[0].squeeze(1).to(keys.dtype)
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
        cos, sin = (angle.mean(1, keepdim=True).expand(shape) for angle in self._angles(ahead, self._half_width))
        return self._turn(vectors, cos, sin)


def _rope_type(config: PretrainedConfig, layer_type: str | None) -> str:
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if layer_type and isinstance(parameters.get(layer_type), dict):
        parameters = parameters[layer_type]
    return parameters.get("rope_type", "default")


def _rotary_module(module, config: PretrainedConfig) -> torch.nn.Module:
    names = [name for name in vars(module) if name.endswith("RotaryEmbedding") and "Vision" not in name]
    for name in names:
        try:
            return getattr(module, name)(config=config)
        except Exception:  # a class for another part of the model; the next one may fit
            continue
    raise LookupError(config.model_type)
