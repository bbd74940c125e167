"""MoA: every head has a span of its own, which grows with the length of the text by the head's own rule."""

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator
from transformers import PretrainedConfig, PreTrainedModel

from ..errors import OptionError, PresetError
from ..options import CommonOptions
from ..plans import Plan, head_table
from ..policy.base import Policy
from ..policy.heads import ElasticSpanPolicy
from ..registry import register_method
from .planned import PlannedCache, plain_table


class MoAOptions(CommonOptions):
    """Options of `MoACache`. Defaults: the published code's."""

    rules: Any = Field(
        None,
        description="file with the alpha and beta of every head, of `kvsparse calibrate moa` or as published; or a mapping of "
        "'alphas' and 'betas', each [layers, heads]",
    )
    new_tokens: int = Field(1024, ge=0, description="tokens expected after the prompt (max_new_tokens): they count in N")
    sinks: int = Field(64, ge=0, description="first tokens that every head keeps; part of its span")
    minimum: int = Field(128, ge=1, description="smallest span")
    multiple: int = Field(64, ge=1, description="spans are rounded up to a multiple of this")
    group: Literal["mean", "max"] = Field("mean", description="span of a key/value head, from those of its query heads")

    @field_validator("rules")
    @classmethod
    def _plain(cls, value: Any) -> Any:
        if isinstance(value, dict):
            return {name: plain_table(table) for name, table in value.items()}
        return plain_table(value)


@register_method("moa")
class MoACache(PlannedCache):
    """MoA (Fu et al., "Mixture of Sparse Attention for Automatic Large Language Model Compression", arXiv 2406.14909).

    A head keeps the first `sinks` tokens and the newest ones, together `alpha + beta * N`: at least `minimum`, at most N,
    rounded up to a multiple of 64. N is the length the text is expected to reach, prompt and `new_tokens`. The spans are
    fixed at the end of the prompt; from then on every head's window slides.

    Deviations from the published code: it serves models whose query heads all have keys of their own; here a key/value head
    gets the mean (`group="max"`: the widest) of the spans of its query heads, so that the plan's density holds with GQA; the
    prompt itself is attended densely and then cut; every row has its own N, and a later turn, or the next chunk of a
    prompt, counts anew (what was dropped does not return). A text longer than N slides on, as published.

    Example:
        >>> cache = MoACache(model, rules="spans.safetensors", new_tokens=256)
        >>> model.generate(**inputs, past_key_values=cache, max_new_tokens=256)
    """

    paper = "arXiv 2406.14909"
    needs = "a rule per head"
    Options = MoAOptions

    def read_plan(self, model: PreTrainedModel | PretrainedConfig) -> list:
        """For every layer that is ours and key/value head, the `(alpha, beta)` of its query heads."""
        options, binding = self.options, self.binding
        if options.sinks >= options.minimum:
            raise OptionError(f"moa: sinks={options.sinks} must be below minimum={options.minimum}: spans include the sinks.")
        if options.rules is None:
            raise OptionError("moa needs rules=: the span rule of every head of this model. Make them with `kvsparse calibrate moa`.")
        rules, what = options.rules, "the rules"
        if isinstance(rules, str):
            what = f"rules {rules!r}"
            rules = read_rules(rules, model)
        if not isinstance(rules, dict) or not {"alphas", "betas"} <= rules.keys():
            raise PresetError(f"{what} must hold 'alphas' and 'betas'.")
        heads, pairs = None, []
        for name in ("alphas", "betas"):
            # Checked here, but reduced to key/value heads only once spans are known.
            head_table(rules[name], binding.layers, binding.kv_heads, binding.query_heads, f"{what}, {name}")
            table = [[float(number) for number in row] for row in rules[name]]
            if heads not in (None, len(table[0])):
                raise PresetError(f"{what}: {heads} alphas but {len(table[0])} betas per layer.")
            heads = len(table[0])
            pairs.append(table)
        group = heads // binding.kv_heads
        layers = [list(zip(*(table[layer] for table in pairs), strict=True)) for layer in self._sparse]
        return [tuple(tuple(rows[first : first + group]) for first in range(0, heads, group)) for rows in layers]

    def make_policy(self, layer_idx: int) -> Policy:
        options = self.options
        return ElasticSpanPolicy(
            sinks=options.sinks,
            rules=self.plan[self._sparse.index(layer_idx)],
            new_tokens=options.new_tokens,
            minimum=options.minimum,
            multiple=options.multiple,
            widest=options.group == "max",
        )


def read_rules(path: str, model: PreTrainedModel | PretrainedConfig) -> dict[str, Any]:
    """`alphas` and `betas`, from a plan or from JSON as published."""
    if not path.endswith(".json"):
        return dict(Plan.load(path, "moa", model).tensors)
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PresetError(f"rules {path!r} are not readable JSON: {error}") from error
