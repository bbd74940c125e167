"""A Llama in fp64 that remembers everything and is told what to see: the reference of the state machine.

No kernel, store or policy of the package is used. Rows are kept one by one, without padding, with plain keys (before any
rotation) and values of every token ever seen. What each query may see is given from outside, by position.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from oracle import rope_parameters, rotate
from torch import Tensor
from transformers import LlamaForCausalLM

# Turns a head's own result into what the method makes of it: (row's layer, softmaxed output [Hq, D], its lse [Hq]) -> [Hq, D].
Finish = Callable[["Layer", Tensor, Tensor], Tensor]


@dataclass
class Layer:
    """Keys before rotation and values of all tokens of a row, `[H, N, D]` each."""

    keys: Tensor | None = None
    values: Tensor | None = None

    def add(self, keys: Tensor, values: Tensor) -> None:
        self.keys = keys if self.keys is None else torch.cat((self.keys, keys), dim=1)
        self.values = values if self.values is None else torch.cat((self.values, values), dim=1)


@dataclass
class Row:
    """One row of a batch: how many tokens it has seen, and every layer's keys and values of them."""

    layers: list[Layer]
    seen: int = 0

    def crop(self, removed: int) -> None:
        self.seen = max(self.seen - removed, 0)
        for layer in self.layers:
            if layer.keys is None:
                continue  # it reads another one
            layer.keys, layer.values = layer.keys[:, : self.seen], layer.values[:, : self.seen]

    def copy(self) -> "Row":
        return copy.deepcopy(self)


@dataclass
class Seen:
    """What the queries of one layer see.

    Attributes:
        visible: `[Hq, T, N]` bool, over all tokens up to the newest.
        finish: what the method does with the result, where it does not leave it alone.
    """

    visible: Tensor
    finish: Finish | None = None


@dataclass
class ReplayLlama:
    """The model.

    Args:
        model: its weights are copied to fp64.
        sources: the layer whose keys and values each layer reads.
        cache_positions: visible tokens are numbered by their place among them, not by their place in the text.
    """

    model: LlamaForCausalLM
    sources: list[int]
    cache_positions: bool = False
    weights: dict[str, Tensor] = field(init=False)

    def __post_init__(self):
        self.weights = {name: weight.detach().double() for name, weight in self.model.state_dict().items()}
        self.inv_freq, self.scaling = rope_parameters(self.model.config)
        self.eps = self.model.config.rms_norm_eps

    def row(self) -> Row:
        return Row([Layer() for _ in self.sources])

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.weights[f"{name}.weight"].T

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + self.eps).rsqrt() * self.weights[f"{name}.weight"]

    def forward(self, row: Row, ids: Tensor, seen: list[Seen]) -> Tensor:
        """Logits `[T, vocab]` of the next tokens `ids [T]` of a row, which takes them in."""
        row.seen += len(ids)
        x = self.weights["model.embed_tokens.weight"][ids]
        for index, what in enumerate(seen):
            name = f"model.layers.{index}"
            x = x + self._attention(row, index, self._norm(x, f"{name}.input_layernorm"), what)
            h = self._norm(x, f"{name}.post_attention_layernorm")
            gate = torch.nn.functional.silu(self._linear(h, f"{name}.mlp.gate_proj"))
            x = x + self._linear(gate * self._linear(h, f"{name}.mlp.up_proj"), f"{name}.mlp.down_proj")
        return self._linear(self._norm(x, "model.norm"), "lm_head")

    def _attention(self, row: Row, index: int, x: Tensor, what: Seen) -> Tensor:
        dim = self.model.config.hidden_size // self.model.config.num_attention_heads
        q, k, v = (
            self._linear(x, f"model.layers.{index}.self_attn.{part}_proj").unflatten(-1, (-1, dim)).transpose(0, 1)
            for part in "qkv"
        )
        layer = row.layers[self.sources[index]]
        if self.sources[index] == index:
            layer.add(k, v)
        group = len(q) // len(layer.keys)
        keys, values = layer.keys.repeat_interleave(group, dim=0), layer.values.repeat_interleave(group, dim=0)
        logits = self._rotated_products(q, keys, what.visible) / math.sqrt(dim)
        logits = logits.masked_fill(~what.visible, -math.inf)
        out = logits.softmax(-1) @ values
        if what.finish is not None:
            out = what.finish(layer, out[:, 0], logits[:, 0].logsumexp(-1)).unsqueeze(1)
        return self._linear(out.transpose(0, 1).flatten(1), f"model.layers.{index}.self_attn.o_proj")

    def _rotated_products(self, q: Tensor, keys: Tensor, visible: Tensor) -> Tensor:
        """`[Hq, T, N]` products of rotated queries and keys. Queries are of the newest tokens."""
        count, total = q.shape[1], keys.shape[1]
        place = torch.arange(total).expand(len(q), -1)
        if self.cache_positions:  # among what the newest query sees
            place = (visible[:, -1].cumsum(-1) - 1).clamp(min=0)
        at = place[:, total - count :]
        rotated_q = torch.stack([rotate(q[h : h + 1], at[h], self.inv_freq, self.scaling)[0] for h in range(len(q))])
        rotated_k = torch.stack(
            [rotate(keys[h : h + 1], place[h], self.inv_freq, self.scaling)[0] for h in range(len(q))]
        )
        return rotated_q @ rotated_k.transpose(1, 2)
