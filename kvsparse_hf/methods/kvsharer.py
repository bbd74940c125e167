"""KVSharer: layers of an unmodified model read the keys and values of earlier ones, as a calibration has found them to bear."""

from pathlib import Path
from typing import Any

import torch
from pydantic import Field, field_validator
from transformers import PretrainedConfig, PreTrainedModel

from ..errors import OptionError
from ..plans import Plan
from ..registry import register_method
from .planned import plain_table
from .sharing import SharingCache, SharingOptions


class KVSharerOptions(SharingOptions):
    """Options of `KVSharerCache`, beside those of the inner method."""

    plan: Any = Field(
        None,
        validate_default=True,
        description="a file that `kvsparse calibrate kvsharer` wrote, or pairs [reader, source] in the order to take them",
    )
    shared: int | float | None = Field(
        None, ge=0, description="layers that give up their keys and values, or their share of all; default: as many as the plan has"
    )

    @field_validator("plan")
    @classmethod
    def _plain_plan(cls, value: Any) -> Any:
        if value is None:
            raise OptionError("kvsharer needs a plan: make one with `kvsparse calibrate kvsharer MODEL TEXT`.")
        return plain_table(value)


@register_method("kvsharer")
class KVSharerCache(SharingCache):
    """KVSharer (Yang et al., "KVSharer: Efficient Inference via Layer-Wise Dissimilar KV Cache Sharing", arXiv 2410.18517).

    Some layers of a model that was not trained for it read the keys and values of earlier layers. Which ones, a calibration
    finds (`calibrate_kvsharer`): pairs are tried from the most dissimilar keys and values on, and one is accepted when the
    model's last hidden states keep their direction and its logits stay near. Expect modest losses up to a quarter of the
    layers of a large model, and collapse soon after; small models bear less.

    Example:
        >>> cache = KVSharerCache(model, plan="kvsharer-plan.safetensors", shared=0.25)
        >>> model.generate(**inputs, past_key_values=cache)
    """

    paper = "arXiv 2410.18517"
    Options = KVSharerOptions

    def __init__(self, model: PreTrainedModel | PretrainedConfig, **options):
        self._plan_model = model  # a plan file is checked against its weights
        super().__init__(model, **options)
        del self._plan_model

    def sources(self, full: list[int]) -> list[int]:
        plan, layers = self.options.plan, self.binding.layers
        pairs = read_pairs(plan, self._plan_model)
        shared = self.options.shared
        count = len(pairs) if shared is None else shared if isinstance(shared, int) else round(shared * layers)
        if count > len(pairs):
            raise OptionError(f"kvsharer: shared={shared!r} wants {count} layers, the plan has {len(pairs)}.")
        return join_pairs(pairs[:count], layers)


def read_pairs(plan: Any, model: PreTrainedModel | PretrainedConfig) -> list[tuple[int, int]]:
    """`(reader, source)` pairs of a plan file or of a list.

    Raises:
        PresetError: no such file, or a plan of another method or model.
        OptionError: a list that does not consist of pairs of layers.
    """
    if isinstance(plan, (str, Path)):
        plan = Plan.load(plan, "kvsharer", model).tensors["pairs"].tolist()
    try:
        table = torch.as_tensor(plan)
    except (TypeError, ValueError, RuntimeError) as error:
        raise OptionError(f"kvsharer: plan is no list of [reader, source] pairs: {error}") from error
    if table.numel() and (table.dim() != 2 or table.shape[1] != 2 or table.is_floating_point()):
        raise OptionError(f"kvsharer: plan has shape {tuple(table.shape)}; give pairs [reader, source] of layer numbers.")
    return [tuple(pair) for pair in table.tolist()]


def join_pairs(pairs: list[tuple[int, int]], layers: int) -> list[int]:
    """The map that results when the pairs are applied one after the other. Chains collapse: who read a layer that now reads
    another one reads that one too.

    Raises:
        OptionError: a layer that does not exist or is given up twice, or a pair whose reader comes first.
    """
    sources = list(range(layers))
    for reader, source in pairs:
        if not (0 <= source < layers and 0 <= reader < layers):
            raise OptionError(f"kvsharer: the pair ({reader}, {source}) names no layers of a model with {layers}.")
        if source >= reader:
            raise OptionError(f"kvsharer: layer {reader} cannot read layer {source}, which does not run before it.")
        if sources[reader] != reader:
            raise OptionError(f"kvsharer: layer {reader} is given up twice.")
        target = sources[source]
        sources = [target if owner == reader else owner for owner in sources]
    return sources
