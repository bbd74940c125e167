"""HeadKV: a table of head importance, measured once per model, divides the budget over all heads of all layers."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import Field, field_validator
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from ..errors import OptionError, PresetError
from ..plans import Plan, head_table
from ..policy.base import Policy
from ..policy.heads import TableHeads
from ..registry import register_method
from .planned import PlannedCache, plain_table
from .snapkv import SnapKVCache, SnapKVOptions, WindowPolicy


@dataclass(frozen=True)
class HeadTablePolicy(TableHeads, WindowPolicy):
    """SnapKV's scores, and a budget per head from a table."""


class HeadKVOptions(SnapKVOptions):
    """Options of `HeadKVCache`. Defaults: the published code's (window 8)."""

    table: Any = Field(
        None,
        description="importance of every head: a file of `kvsparse calibrate headkv`, a published JSON of 'layer-head' scores, or "
        "numbers [layers, heads]",
    )
    window: int = Field(8, ge=1, description="last prompt queries that score the others; always kept")
    beta: float = Field(
        1.1, ge=1.0, description="the part 1/beta of the budget beside the window is divided by the table, the rest evenly"
    )
    temp: float = Field(1.0, gt=0.0, description="exponent on the normalised importance; above 1 sharpens the table")

    @field_validator("table")
    @classmethod
    def _plain(cls, value: Any) -> Any:
        return plain_table(value)


@register_method("headkv")
class HeadKVCache(PlannedCache, SnapKVCache):
    """HeadKV (Fu et al., "Not All Heads Matter: A Head-Level KV Cache Compression Method with Integrated Retrieval and
    Reasoning", ICLR 2025, arXiv 2410.19258).

    Every head has an importance that was measured once: how much it takes part in finding a needle. With `b = budget -
    window`, the part `b // beta` of every head's budget goes into one pool over all layers and heads, which the importance
    divides; the rest stays where it is. Then each head keeps its own best tokens by SnapKV's scores. A smaller `beta` makes a
    larger pool (the published README says the opposite of its code).

    Deviations from the published code: shares are rounded by largest remainder, so that they sum to the budget; no head gets
    more than the prompt holds, and the excess, which the code drops, goes to the other heads by importance; a table of query
    heads is reduced to key/value heads by the mean over each group; every row follows its own length. The default `beta` is
    ours, from the low end of the paper's grid (1.005 to 10), where it finds the best results. Further deviations: as
    `SnapKVCache`.

    Example:
        >>> cache = HeadKVCache(model, budget=512, table="heads.safetensors")
        >>> model.generate(**inputs, past_key_values=cache)
    """

    paper = "arXiv 2410.19258"
    needs = "a head table, and the last queries of the prompt"
    Options = HeadKVOptions

    def read_plan(self, model: PreTrainedModel | PretrainedConfig) -> tuple[tuple[float, ...], ...]:
        """Importance of the key/value heads of every layer that is ours, normalised over all of them."""
        options, binding = self.options, self.binding
        if options.table is None:
            raise OptionError(
                "headkv needs table=: a head table of this model. Make one with `kvsparse calibrate headkv`, or pass numbers "
                f"[{binding.layers}, {binding.query_heads}]."
            )
        values, what = options.table, "the head table"
        if isinstance(values, str):
            what = f"head table {values!r}"
            values = read_table(values, binding.layers, binding.query_heads, model)
        table = head_table(values, binding.layers, binding.kv_heads, binding.query_heads, what)[self._sparse]
        if bool((table < 0).any()) or (self._sparse and not bool(table.any())):
            raise PresetError(f"{what} must hold importances that are not negative, and not all zero.")
        table = (table / table.sum()) ** options.temp
        return tuple(map(tuple, (table / table.sum()).tolist()))

    def make_policy(self, layer_idx: int) -> Policy:
        depth = self._sparse.index(layer_idx)
        return HeadTablePolicy(**self.window_settings(), table=self.plan, depth=depth, beta=self.options.beta)


def read_table(path: str, layers: int, heads: int, model: PreTrainedModel | PretrainedConfig) -> Tensor:
    """`[layers, heads]` from a plan, or from JSON that maps "layer-head" to a score or a list of scores."""
    if not path.endswith(".json"):
        plan = Plan.load(path, "headkv", model)
        if "table" not in plan.tensors:
            raise PresetError(f"plan {path!r} holds no head table.")
        return plan.tensors["table"]
    try:
        scores = json.loads(Path(path).read_text(encoding="utf-8"))
        found = {tuple(map(int, name.split("-"))): torch.tensor(value, dtype=torch.float64).mean() for name, value in scores.items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise PresetError(f"head table {path!r} is not readable as JSON of 'layer-head' scores: {error}") from error
    wanted = [(layer, head) for layer in range(layers) for head in range(heads)]
    missing = [f"{layer}-{head}" for layer, head in wanted if (layer, head) not in found]
    if missing or len(found) > len(wanted):
        some = f"misses {len(missing)} heads ({', '.join(missing[:3])}, …)" if missing else f"has {len(found)} heads"
        raise PresetError(f"head table {path!r} {some}; the model has {layers} layers of {heads} query heads.")
    return torch.stack([found[key] for key in wanted]).view(layers, heads)
