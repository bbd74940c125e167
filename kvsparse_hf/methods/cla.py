"""Cross-Layer Attention: neighbouring layers read the keys and values of the first among them."""

from typing import Any

from pydantic import Field

from ..errors import OptionError
from ..hf.sharing import declared
from ..registry import register_method
from .sharing import SharingCache, SharingOptions


class CLAOptions(SharingOptions):
    """Options of `CLACache`, beside those of the inner method."""

    factor: int | None = Field(
        None, ge=1, description="so many consecutive layers share; default: the map in the model's config, else 2"
    )
    groups: tuple[tuple[int, ...], ...] | None = Field(
        None, description="the layers that share, one list each, instead of `factor`; layers named nowhere keep their own"
    )


@register_method("cla")
class CLACache(SharingCache):
    """CLA (Brandon et al., "Reducing Transformer Key-Value Cache Size with Cross-Layer Attention", NeurIPS 2024, arXiv
    2405.12981).

    Of every `factor` consecutive layers the first computes keys and values for all: 1/factor of the bytes. What a step reads
    from memory does not shrink. For models trained that way; on others the text falls apart. A checkpoint whose config carries
    the map (`mark`) needs no option. In models with several kinds of layers the full-attention ones are counted, and the
    others stay as they are.

    The map composes with every method: `CLACache(model, inner="snapkv", budget=1024)` compresses the owners, and SnapKV's
    scores are the mean over the query heads of all layers that read them.

    Deviations from the paper: the reading layers of an unmodified model still compute keys and values, which are dropped. In a
    prompt the owner's dense keys and values live until their last reader has run.

    Example:
        >>> cache = CLACache(model, factor=2)
        >>> model.generate(**inputs, past_key_values=cache)
    """

    paper = "arXiv 2405.12981"
    Options = CLAOptions

    def sources(self, full: list[int]) -> list[int]:
        options, layers = self.options, self.binding.layers
        if options.factor is not None and options.groups is not None:
            raise OptionError("cla: give factor or groups, not both.")
        if options.groups is not None:
            return sources_of_groups(options.groups, layers)
        trained = declared(self.binding.config)
        if options.factor is None and trained is not None:
            return trained["sources"]
        factor, sources = options.factor or 2, list(range(layers))
        for place, layer in enumerate(full):
            sources[layer] = full[place - place % factor]
        return sources


def sources_of_groups(groups: Any, layers: int) -> list[int]:
    """A map in which every group reads its first layer.

    Raises:
        OptionError: a layer that does not exist, stands in two groups, or stands before the first of its group.
    """
    sources, seen = list(range(layers)), set()
    for group in groups:
        for layer in group:
            if not 0 <= layer < layers:
                raise OptionError(f"cla: groups name layer {layer}; the model has layers 0 to {layers - 1}.")
            if layer in seen:
                raise OptionError(f"cla: layer {layer} stands in two groups (or twice in one).")
            seen.add(layer)
            sources[layer] = group[0]
    return sources
