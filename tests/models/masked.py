"""An independent reference: the model with a plain fp64 attention of this file, Transformers' own cache, and a mask of what may be seen.

Nothing of the package is used. The reference keeps every token; what a cache under test has dropped is masked, per layer, row
and key/value head. It also remembers queries and attention weights, from which a test can tell what should have been kept.
"""

import copy
import math
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from helpers import CACHE, dense, positions
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import eager_mask

NAME = "plain_reference"
_running: list["Reference"] = []


@dataclass
class Call:
    """One attention call: `q [B, Hq, T, D]`, `k [B, H, S, D]`, `weights [B, Hq, T, S]`, all fp64, and the factor on the logits."""

    q: Tensor
    k: Tensor
    weights: Tensor
    scale: float


def _attention(module: nn.Module, query, key, value, attention_mask, *args, scaling=None, softcap=None, s_aux=None, **kwargs):
    run = _running[-1]
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    q, k, v = (part.double() for part in run.turned(module, query, key, value))
    group = q.shape[1] // k.shape[1]
    logits = q @ k.repeat_interleave(group, 1).transpose(-1, -2) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    seen = torch.ones_like(logits, dtype=torch.bool)
    if attention_mask is not None and attention_mask.shape[-1] == k.shape[2]:  # renumbered keys are all seen
        seen &= attention_mask > -1
    allowed = run.mask(module.layer_idx, q, k, scale) if run.mask is not None and q.shape[2] == 1 else None
    seen = seen if allowed is None else seen & allowed
    seen = seen | ~seen.any(-1, keepdim=True)  # padding that sees nothing; nobody reads it
    logits = logits.masked_fill(~seen, -math.inf)
    if s_aux is not None:
        logits = torch.cat((logits, s_aux.double().view(1, -1, 1, 1).expand(*logits.shape[:-1], 1)), dim=-1)
    weights = logits.softmax(-1)[..., : k.shape[2]]
    run.calls[module.layer_idx] = Call(q, k, weights, float(scale))
    out = (weights @ v.repeat_interleave(group, 1)).to(query.dtype)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, eager_mask)


@dataclass
class Reference:
    """A copy of `model` that attends as above.

    Attributes:
        calls: the last attention call of each layer.
        mask: `(layer, q, k, scale) -> [B, Hq, 1, S]` bool of what a one-token step may see, or None for all; set by a test.
    """

    model: PreTrainedModel
    calls: dict[int, Call] = field(default_factory=dict)
    mask: Callable | None = None

    def __post_init__(self):
        self.model = copy.deepcopy(self.model)
        self.model.config.get_text_config(decoder=True)._attn_implementation = NAME
        self.cache = dense(self.model)

    def turned(self, module, query, key, value):
        return query, key, value

    def forward(self, ids: Tensor, mask: Tensor, **kwargs) -> Tensor:
        """Logits of the tokens `ids` `[B, T]`, the newest of those of the padding mask `mask` `[B, S]`."""
        with _reference(self):
            at = positions(mask)[:, -ids.shape[1]:]
            options = {CACHE: self.cache, "attention_mask": mask, "position_ids": at, **kwargs}
            return self.model(input_ids=ids, **options).logits


@contextmanager
def _reference(run: Reference):
    _running.append(run)
    try:
        yield
    finally:
        _running.pop()


def only(kept: dict[int, list], mask: Tensor) -> Callable:
    """Lets one-token steps see the kept positions alone. `kept`: layer -> `[row][head]` positions; layers without see all."""
    pad = (mask == 0).sum(1).tolist()

    def allowed(layer, q, k, scale):
        if layer not in kept:
            return None
        out = torch.zeros(k.shape[0], k.shape[1], k.shape[2], dtype=torch.bool)
        for row, heads in enumerate(kept[layer]):
            for head, held in enumerate(heads):
                out[row, head, [pad[row] + position for position in held]] = True
        return out.repeat_interleave(q.shape[1] // k.shape[1], 1).unsqueeze(2)

    return allowed


class Renumbered(Reference):
    """Full-attention layers number the tokens they see by their place in the cache, with the model's own rotation.

    For each step, the attention module of a layer is run again over the hidden states of the kept tokens, at the positions that
    end with the newest token's: attention sees only differences.

    Attributes:
        kept: positions that the full layers hold in the coming step, the new one last; None for no renumbering. One row.
        full: the layers that are renumbered.
    """

    def __init__(self, model: PreTrainedModel, full: list[int]):
        super().__init__(model)
        self.full, self.kept = full, None
        self._hidden: dict[int, Tensor] = {}
        self._given: dict[int, dict] = {}
        self._angles_made: list = []
        self._keys: Tensor | None = None
        self._is_again = False
        for module in self.model.modules():
            if type(module).__name__.endswith("RotaryEmbedding"):
                module.register_forward_hook(self._remember_angles, with_kwargs=True)
            elif getattr(module, "layer_idx", None) in full and "Attention" in type(module).__name__:
                module.register_forward_pre_hook(self._remember_hidden, with_kwargs=True)

    def _remember_angles(self, module, args, kwargs, out):
        if not self._is_again:
            self._angles_made = [*self._angles_made[-7:], (module, args, kwargs, out)]

    def _remember_hidden(self, module, args, kwargs):
        if self._is_again:
            return
        kwargs = {**({"hidden_states": args[0]} if args else {}), **kwargs}
        old, new = self._hidden.get(module.layer_idx), kwargs["hidden_states"]
        self._hidden[module.layer_idx] = new if old is None else torch.cat((old, new), dim=1)
        self._given[module.layer_idx] = kwargs

    def turned(self, module, query, key, value):
        if self._is_again:
            self._keys = key, value
            return query, key, value
        if self.kept is None or module.layer_idx not in self.full:
            return query, key, value
        given, held = self._given[module.layer_idx], len(self.kept)
        at = torch.arange(self.kept[-1] + 1 - held, self.kept[-1] + 1).unsqueeze(0)
        again = {name: None if part is self.cache else part for name, part in given.items()}
        again["hidden_states"] = self._hidden[module.layer_idx][:, self.kept]
        again["attention_mask"] = torch.zeros(1, 1, held, held)
        if given.get("position_ids") is not None:
            again["position_ids"] = at
        if given.get("position_embeddings") is not None:
            again["position_embeddings"] = self._angles(given["position_embeddings"], at)
        self._is_again = True
        module(**again)
        self._is_again = False
        return query, *self._keys

    def _angles(self, wanted, at: Tensor):
        """What the rotary module that made `wanted` gives for the positions `at`."""
        for rotary, args, kwargs, out in reversed(self._angles_made):
            if _same_angles(out, wanted):
                if "position_ids" in kwargs:
                    return rotary(*args, **{**kwargs, "position_ids": at})
                return rotary(args[0], at, *args[2:], **kwargs)
        raise LookupError("no rotary module made these angles")


def _same_angles(left, right) -> bool:
    left, right = (part if isinstance(part, tuple) else (part,) for part in (left, right))
    return all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(left, right, strict=True))
