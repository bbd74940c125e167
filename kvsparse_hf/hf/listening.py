"""The logs of the softmax denominators that torch's fused attention computes on the way, and drops."""

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# Where it pays: on a GPU the denominators cost another pass over all queries and keys. A CPU's prompts are short, and there
# a padded row is to rank its tokens exactly as the row alone, whichever kernel torch picks.
DEVICES = ("cuda",)

_aten = torch.ops.aten
# Overloads of the fused kernels, and where their argument `compute_log_sumexp` stands; None: they always compute it.
_FUSED = {
    getattr(_aten, name).default: place
    for name, place in (
        ("_scaled_dot_product_flash_attention", None),
        ("_scaled_dot_product_flash_attention_for_cpu", None),
        ("_scaled_dot_product_efficient_attention", 4),
        ("_scaled_dot_product_cudnn_attention", 4),
    )
    if hasattr(_aten, name)
}


class LseListener(TorchDispatchMode):
    """Hears the fused attention kernels that run inside it. Their output stays the same, bit for bit.

        with LseListener() as listener:
            out = scaled_dot_product_attention(query, key, value, is_causal=True)
        lse = listener.lse(query)
    """

    def __init__(self):
        super().__init__()
        self._heard: list[Tensor] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is _aten.scaled_dot_product_attention.default:  # whole in inference mode
            with self:
                return func.decompose(*args, **kwargs)
        if func not in _FUSED:
            return func(*args, **kwargs)
        place = _FUSED[func]
        if place is not None:
            args = (*args[:place], True, *args[place + 1 :])
        result = func(*args, **kwargs)
        self._heard.append(result[1])
        return result

    def lse(self, query: Tensor) -> Tensor | None:
        """`[B, Hq, T]` fp32 natural logs for `query` `[B, Hq, T, D]`; None where no fused kernel took exactly these queries."""
        if len(self._heard) != 1:
            return None
        batch, heads, tokens = query.shape[:3]
        lse = self._heard[0]
        if lse.dim() == 4:  # cuDNN: [B, Hq, T, 1]
            lse = lse.squeeze(-1)
        if lse.dim() != 3 or lse.shape[:2] != (batch, heads) or not tokens <= lse.shape[2] < tokens + 128:
            return None
        return lse[:, :, :tokens].float()  # the memory-efficient kernel pads the tokens
