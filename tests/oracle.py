"""Reference implementations in fp64, written from the papers: no kernel, no store and no policy of the package is used.

`OracleLlama` is a Llama decoder that keeps the *unrotated* keys of one row in Python lists and rotates them at every step, as the
StreamingLLM paper does. What to drop is a function of positions (and of queries and keys) given by the test.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import LlamaForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


def rope_parameters(config) -> tuple[Tensor, float]:
    """Inverse frequencies and the scaling of cos and sin, from Transformers' own formulae."""
    kind = config.rope_parameters["rope_type"]
    dim = config.hidden_size // config.num_attention_heads
    if kind == "default":
        theta = config.rope_parameters["rope_theta"]
        return 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float64) / dim), 1.0
    inv_freq, scaling = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    return inv_freq.double(), float(scaling)


def rotate(x: Tensor, positions: Tensor, inv_freq: Tensor, scaling: float = 1.0) -> Tensor:
    """`x [H, T, D]` at `positions [T]`, half-split layout."""
    angles = positions.double().unsqueeze(-1) * inv_freq
    cos, sin = torch.cat((angles, angles), -1).cos() * scaling, torch.cat((angles, angles), -1).sin() * scaling
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


@dataclass
class Held:
    """One layer's kept tokens, in order: unrotated keys `[H, M, D]`, values `[H, M, D]`, positions `[H, M]`."""

    keys: Tensor
    values: Tensor
    positions: Tensor
    pinned: int = 0
    heads: list = field(default_factory=list)


Keep = Callable[[Tensor, Tensor, Tensor], Tensor]


class OracleLlama:
    """One row, one layer list, explicit everything.

    Args:
        model: its weights are copied to fp64.
        keep_prompt: `(q [Hq, N, D] and k [H, N, D] rotated to their positions, positions [N]) -> [H, M]` indices kept of the prompt.
        keep_turn: the same for a later multi-token forward, over kept and new tokens; None keeps all.
        evict: `positions [M], pinned -> index` of the entry that a decoded token replaces when it must; None for never.
        budget: entries at which decode evicts.
        cache_positions: number kept tokens by their place in the cache.
    """

    def __init__(
        self,
        model: LlamaForCausalLM,
        keep_prompt: Keep,
        keep_turn: Keep | None = None,
        evict: Callable[[Tensor], int] | None = None,
        budget: int = 0,
        cache_positions: bool = False,
    ):
        self.config = model.config
        self.weights = {name: weight.detach().double() for name, weight in model.state_dict().items()}
        self.inv_freq, self.scaling = rope_parameters(model.config)
        self.keep_prompt, self.keep_turn, self.evict = keep_prompt, keep_turn, evict
        self.budget, self.cache_positions = budget, cache_positions
        self.layers: list[Held] = []
        self.seen = 0

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.weights[f"{name}.weight"].T

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + self.config.rms_norm_eps).rsqrt() * self.weights[f"{name}.weight"]

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        return rotate(x, positions, self.inv_freq, self.scaling)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits `[T, vocab]` of the next tokens `ids [T]`."""
        positions = torch.arange(self.seen, self.seen + len(ids))
        x = self.weights["model.embed_tokens.weight"][ids]
        for index in range(self.config.num_hidden_layers):
            name = f"model.layers.{index}"
            x = x + self._attention(index, self._norm(x, f"{name}.input_layernorm"), positions)
            h = self._norm(x, f"{name}.post_attention_layernorm")
            gate = torch.nn.functional.silu(self._linear(h, f"{name}.mlp.gate_proj"))
            x = x + self._linear(gate * self._linear(h, f"{name}.mlp.up_proj"), f"{name}.mlp.down_proj")
        self.seen += len(ids)
        return self._linear(self._norm(x, "model.norm"), "lm_head")

    def _project(self, x: Tensor, index: int, which: str) -> Tensor:
        dim = self.config.hidden_size // self.config.num_attention_heads
        return self._linear(x, f"model.layers.{index}.self_attn.{which}_proj").unflatten(-1, (-1, dim)).transpose(0, 1)

    def _attention(self, index: int, x: Tensor, positions: Tensor) -> Tensor:
        q, k, v = (self._project(x, index, which) for which in "qkv")
        count, heads = len(positions), k.shape[0]
        first = index >= len(self.layers)
        if first:
            held = Held(k, v, positions.expand(heads, -1))
            self.layers.append(held)
        else:
            held = self.layers[index]
            if count == 1 and self.evict is not None and held.positions.shape[1] >= self.budget:
                self._drop(held)
            held.keys, held.values = torch.cat((held.keys, k), dim=1), torch.cat((held.values, v), dim=1)
            held.positions = torch.cat((held.positions, positions.expand(heads, -1)), dim=1)
        total = held.positions.shape[1]
        group = q.shape[0] // heads
        out = torch.empty_like(q)
        for head in range(q.shape[0]):
            kv = head // group
            at = torch.arange(total) if self.cache_positions else held.positions[kv]
            rotated_k = self._rotate(held.keys[kv], at)
            rotated_q = self._rotate(q[head], at[total - count:])
            logits = rotated_q @ rotated_k.T / math.sqrt(q.shape[-1])
            later = torch.arange(total) > torch.arange(total - count, total).unsqueeze(1)
            out[head] = logits.masked_fill(later, -math.inf).softmax(-1) @ held.values[kv]
        keep = self.keep_prompt if first else self.keep_turn if count > 1 else None
        if keep is not None:
            self._keep(held, keep, q, positions)
        return self._linear(out.transpose(0, 1).flatten(1), f"model.layers.{index}.self_attn.o_proj")

    def _keep(self, held: Held, keep: Keep, q: Tensor, positions: Tensor) -> None:
        rotated = torch.stack([self._rotate(held.keys[head], held.positions[head]) for head in range(len(held.keys))])
        index = keep(self._rotate(q, positions), rotated, held.positions)
        held.keys = torch.stack([keys[i] for keys, i in zip(held.keys, index, strict=True)])
        held.values = torch.stack([values[i] for values, i in zip(held.values, index, strict=True)])
        held.positions = held.positions.gather(1, index)

    def _drop(self, held: Held) -> None:
        stay = [[i for i in range(len(row)) if i != self.evict(row)] for row in held.positions]
        index = torch.tensor(stay)
        held.keys = torch.stack([keys[i] for keys, i in zip(held.keys, index, strict=True)])
        held.values = torch.stack([values[i] for values, i in zip(held.values, index, strict=True)])
        held.positions = held.positions.gather(1, index)


# --- StreamingLLM ------------------------------------------------------------------------------------------------------


def keep_streaming(sinks: int, budget: int) -> Keep:
    """The first `sinks` and the newest `budget - sinks`."""

    def keep(q, k, positions):
        heads, count = positions.shape
        index = [i for i in range(count) if i < sinks or i >= count - (budget - sinks)]
        return torch.tensor([index] * heads)

    return keep


def evict_streaming(sinks: int):
    return lambda positions: sinks


# --- SnapKV ------------------------------------------------------------------------------------------------------------


def snapkv_scores(q: Tensor, k: Tensor, window: int, kernel: int, pooling: str, reduce: str) -> list[list[float]]:
    """Pooled scores of the tokens before the window, `[H][N - window]`, with plain loops.

    `q [Hq, N, D]` and `k [H, N, D]` carry their rotation; only the last `window` queries are read.
    """
    heads, total = k.shape[0], k.shape[1]
    group, window = q.shape[0] // heads, min(window, q.shape[1])
    sums = torch.zeros(q.shape[0], total, dtype=torch.float64)
    for head in range(q.shape[0]):
        for row in range(total - window, total):
            logits = k[head // group, :row + 1] @ q[head, row - total] / math.sqrt(q.shape[-1])
            sums[head, :row + 1] += logits.softmax(0)
    out = []
    for head in range(heads):
        rows = sums[head * group:(head + 1) * group, :total - window]
        reduced = {"mean": rows.mean(0), "sum": rows.sum(0), "max": rows.amax(0)}[reduce].tolist()
        pooled, half = [], kernel // 2
        for j in range(len(reduced)):
            near = [reduced[i] for i in range(j - half, j + half + 1) if 0 <= i < len(reduced)]
            pooled.append(max(near) if pooling == "max" else sum(near) / kernel)
        out.append(pooled)
    return out


def keep_snapkv(budget: int, window: int, kernel: int, pooling: str = "max", reduce: str = "mean", sinks: int = 0) -> Keep:
    """Best `budget - window` before the window (ties to the lower index), and the window; all where there are no more."""

    def keep(q, k, positions):
        heads, total = positions.shape
        if total <= budget:
            return torch.arange(total).expand(heads, -1)
        scores = snapkv_scores(q, k, window, kernel, pooling, reduce)
        out = []
        for head in range(heads):
            before = list(range(total - window))
            chosen = before[:sinks]
            ranked = sorted(before[sinks:], key=lambda j, head=head: (-scores[head][j], j))
            chosen += ranked[: budget - window - sinks]
            out.append(sorted(chosen) + list(range(total - window, total)))
        return torch.tensor(out)

    return keep
