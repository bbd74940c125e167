"""Shared by the methods that let several layers read one layer's keys and values."""

from functools import cache
from typing import Any

from pydantic import Field
from transformers import PretrainedConfig, PreTrainedModel

from ..cache import SparseCache
from ..errors import OptionError, UnsupportedModelError
from ..hf.binding import unwrap
from ..hf.sharing import LayerMap, check_sources, declare, declared
from ..options import CommonOptions
from ..registry import get_method


class SharingOptions(CommonOptions):
    """Options of the methods that impose a map. Those of the inner method are given beside them."""

    inner: str = Field("full", description="the method that keeps the owners' keys and values; its options are given beside this one")


class SharingCache(SparseCache):
    """Imposes a map of owners and readers on another method, whose layers the owners get. A method gives `sources`.

    An object of such a class is also one of the inner method's class: `CLACache(model, inner="kvzip").compress(...)`.
    """

    action = "share"
    Options: type[CommonOptions] = SharingOptions

    def __new__(cls, model: Any = None, **options: Any):
        # copy.copy and copy.deepcopy come here with the combined class and without a model.
        return object.__new__(cls if model is None else cls.combined(options))

    @classmethod
    def combined(cls, given: dict[str, Any]) -> type["SharingCache"]:
        """This method over the method that the options name as `inner` (default: its own default)."""
        if "_over" in vars(cls):
            return cls
        inner = given.get("inner", cls.Options.model_fields["inner"].default)
        if not isinstance(inner, str):
            raise OptionError(f"{cls.method}: inner={inner!r} is not the name of a method.")
        return _combined(cls, inner)

    @classmethod
    def options_for(cls, given: dict[str, Any]) -> type[CommonOptions]:
        return cls.combined(given).Options

    def sources(self, full: list[int]) -> list[int]:
        """The layer whose keys and values each decoder layer reads.

        Args:
            full: the layers with plain full attention.
        """
        raise TypeError(f"{type(self).__name__} does not say what each layer reads.")

    def window(self) -> int | None:
        """Tokens that the layers below the first shared one see, where the map comes with a window."""
        return None

    def make_map(self, full: list[int]) -> LayerMap:
        config = self.binding.config
        if LayerMap.of_model(config).shares:
            raise UnsupportedModelError(
                f"{config.model_type} shares keys and values between layers by itself; use {self.options.inner!r} on it directly."
            )
        sources = check_sources(self.sources(full), full, config, self.method)
        trained = declared(config)
        mine = {"sources": list(sources), "window": self.window()}
        if trained is not None and trained != mine:
            raise OptionError(f"{self.method}: the model was trained with {trained}, and this cache would run it with {mine}.")
        return LayerMap(sources, native=False)

    def mark(self, model: PreTrainedModel | PretrainedConfig) -> None:
        """Writes the map into the model's config: its checkpoints carry it, caches take it from there, and a forward of the
        model without a cache of this library is refused."""
        model = unwrap(model)
        config = getattr(model, "config", model).get_text_config(decoder=True)
        declare(config, self.layer_map.sources, self.window())


@cache
def _combined(cls: type[SharingCache], inner: str) -> type[SharingCache]:
    method = get_method(inner)
    if issubclass(method, SharingCache):
        raise OptionError(f"{cls.method}: inner={inner!r} imposes a map itself; name a method that keeps keys and values.")
    mine, theirs = cls.Options, method.Options
    both = (mine.model_fields.keys() & theirs.model_fields.keys()) - CommonOptions.model_fields.keys()
    if both:
        raise OptionError(f"{cls.method}: inner={inner!r} has an option {sorted(both)[0]!r} of its own; they cannot be combined.")
    options = type(mine.__name__, (mine, theirs), {"__module__": mine.__module__, "__doc__": mine.__doc__})
    action = cls.action if method.action == "none" else method.action
    facts = {"__module__": cls.__module__, "__doc__": cls.__doc__, "Options": options, "action": action, "_over": inner}
    return type(cls.__name__, (cls, method), facts)
