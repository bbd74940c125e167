"""Feeds synthetic queries, keys and values through the border (mask, update, attention) of a one-layer cache.

No model: so that keys can be crafted (ties, duplicates), and an oracle gets exactly what the layer got.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.masking_utils import causal_mask_function

from kvsparse_hf.hf.attention import kvsparse_attention_forward, kvsparse_mask

DIM = 8
SCALE = DIM**-0.5


def tiny_config(query_heads: int = 4, kv_heads: int = 2, dim: int = DIM, layers: int = 1, **more) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=16,
        hidden_size=query_heads * dim,
        intermediate_size=16,
        num_hidden_layers=layers,
        num_attention_heads=query_heads,
        num_key_value_heads=kv_heads,
        head_dim=dim,
        max_position_embeddings=32768,
        **more,
    )


@dataclass
class Row:
    """What one row was given, without padding: `q [Hq, N, D]`, `k`, `v` `[H, N, D]`, growing with every forward."""

    q: Tensor
    k: Tensor
    v: Tensor

    def add(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        self.q, self.k, self.v = (torch.cat(pair, dim=1) for pair in ((self.q, q), (self.k, k), (self.v, v)))

    @property
    def length(self) -> int:
        return self.q.shape[1]


class Driver:
    """One layer of a cache, and the record of what it was fed.

    Args:
        cache: made from `tiny_config`.
        pads: leading padding of each row.
        spread: standard deviation of queries and keys; large values make attention peaky.
    """

    def __init__(self, cache, pads=(0,), spread: float = 1.5, seed: int = 0, dtype=torch.float32, layer: int = 0):
        config = cache.binding.config
        self.cache, self.pads, self.spread, self.dtype, self.layer = cache, list(pads), spread, dtype, layer
        self.heads, self.kv_heads, self.dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.generator = torch.Generator().manual_seed(seed)
        self.rows: list[Row] = []
        self.seen = 0
        self.module = nn.Module()
        self.module.config, self.module.layer_idx = config, layer
        self.module.num_key_value_groups, self.module.is_causal = self.heads // self.kv_heads, True

    def random(self, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of every row, the same whatever the padding of the row."""
        size = (len(self.pads), tokens, self.dim)
        q = torch.randn(size[0], self.heads, *size[1:], generator=self.generator) * self.spread
        k = torch.randn(size[0], self.kv_heads, *size[1:], generator=self.generator) * self.spread
        v = torch.randn(size[0], self.kv_heads, *size[1:], generator=self.generator)
        return q.to(self.dtype), k.to(self.dtype), v.to(self.dtype)

    def feed(self, tokens: int, given: tuple[Tensor, Tensor, Tensor] | None = None) -> Tensor:
        """One forward of so many tokens (padding included); returns `[B, T, Hq, D]`."""
        q, k, v = self.random(tokens) if given is None else given
        for b, pad in enumerate(self.pads):
            new = max(pad - self.seen, 0)
            part = q[b, :, new:], k[b, :, new:], v[b, :, new:]
            if self.seen == 0:
                self.rows.append(Row(*part))
            else:
                self.rows[b].add(*part)
        self.seen += tokens
        mask = torch.ones(len(self.pads), self.seen, dtype=torch.bool)
        for b, pad in enumerate(self.pads):
            mask[b, :pad] = False
        mask = mask if any(self.pads) else None
        length, offset = self.cache.get_mask_sizes(tokens, self.layer)
        mask = kvsparse_mask(
            len(q), tokens, length, 0, offset, mask_function=causal_mask_function, attention_mask=mask,
            config=self.module.config, dtype=q.dtype, device=q.device, allow_is_causal_skip=True,
        )  # fmt: skip
        keys, values = self.cache.update(k, v, self.layer)
        return kvsparse_attention_forward(self.module, q, keys, values, mask, scaling=self.dim**-0.5, dropout=0.0)[0]

    @property
    def held(self):
        return self.cache.layers[self.layer]

    def kept(self, row: int = 0) -> list[list[int]]:
        """Positions held by each key/value head of a row, ascending."""
        store = self.held.store
        out = []
        for head in range(store.heads):
            first, count = int(store.start[row, head]), int(store.length[row, head])
            out.append(sorted(store.positions[first : first + count].tolist()))
        return out

    def remembered(self, name: str, row: int, head: int) -> dict[int, Tensor]:
        """What the layer remembers of each held position."""
        store = self.held.store
        first, count = int(store.start[row, head]), int(store.length[row, head])
        positions = store.positions[first : first + count].tolist()
        return dict(zip(positions, store.extra[name][first : first + count].clone(), strict=True))
