"""Sharing written out over the modules of a Llama, without any cache: the whole text at once, in plain torch."""

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb


def shared_forward(
    model: nn.Module, ids: Tensor, sources: list[int], mask: Tensor | None = None, windows: list[int] | None = None
) -> tuple[Tensor, list[Tensor]]:
    """Logits `[B, N, V]`, and the attention weights `[B, Hq, N, N]` of every layer.

    Args:
        sources: the layer whose keys and values each layer uses.
        mask: `[B, N]` 1 for real tokens, left-padded.
        windows: tokens that each layer sees, 0 for all.
    """
    body = model.model
    mask = torch.ones_like(ids) if mask is None else mask
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    hidden = body.embed_tokens(ids)
    rotation = body.rotary_emb(hidden, positions)
    at = torch.arange(ids.shape[1])
    stored, weights = {}, []
    for index, layer in enumerate(body.layers):
        attention, normed = layer.self_attn, layer.input_layernorm(hidden)
        shape = (*ids.shape, -1, attention.head_dim)
        query, key, value = (
            projection(normed).view(shape).transpose(1, 2) for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        query, key = apply_rotary_pos_emb(query, key, *rotation)
        if sources[index] == index:
            stored[index] = key, value
        key, value = (part.repeat_interleave(attention.num_key_value_groups, dim=1) for part in stored[sources[index]])
        allowed = (at <= at[:, None])[None, None] & mask.bool()[:, None, None]
        if windows and windows[index]:
            allowed = allowed & (at > at[:, None] - windows[index])
        allowed = allowed | (at == at[:, None])  # a padding token sees itself
        logits = (query @ key.transpose(-1, -2) * attention.scaling).masked_fill(~allowed, float("-inf"))
        weights.append(logits.softmax(-1))
        out = (weights[-1] @ value).transpose(1, 2).reshape(*ids.shape, -1)
        hidden = hidden + attention.o_proj(out)
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    return model.lm_head(body.norm(hidden)), weights


def in_groups(layers: int, factor: int) -> list[int]:
    """CLA's map."""
    return [layer - layer % factor for layer in range(layers)]


def yoco_map(layers: int) -> list[int]:
    """YOCO's map: everything above the middle reads the middle layer."""
    return [min(layer, layers // 2) for layer in range(layers)]


def yoco_windows(layers: int, window: int) -> list[int]:
    """YOCO's windows: the layers below the middle."""
    return [window if layer < layers // 2 else 0 for layer in range(layers)]


def group_mean(weights: list[Tensor], readers: list[int], heads: int) -> Tensor:
    """`[B, H, N, N]` attention averaged over all query heads, of all layers, that read a key/value head."""
    return torch.stack([weights[layer].unflatten(1, (heads, -1)).mean(2) for layer in readers]).mean(0)
