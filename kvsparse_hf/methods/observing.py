"""Shared by the methods that follow the attention of every decoded token."""

from pydantic import Field, model_validator

from ..errors import OptionError
from ..options import EvictingOptions


class ObservingOptions(EvictingOptions):
    """Options of methods that update a score of every kept token at each step."""

    interval: int | None = Field(
        None,
        ge=1,
        description="action='offload' or 'quantize': decoded tokens between two rankings, which gather on the device; default: 16",
    )

    @model_validator(mode="after")
    def _check_observable(self) -> "ObservingOptions":
        if self.positions == "cache":
            raise OptionError(
                "positions='cache' is not available where decode evicts from anywhere: every step would have to rotate all kept keys "
                "again. Use positions='original'."
            )
        if self.backend == "flash":
            raise OptionError("backend='flash' gives no attention weights, which this method needs; use 'auto', 'triton' or 'torch'.")
        if self.interval is not None and self.action == "evict":
            raise OptionError("interval has no effect with action='evict', where every token that comes takes the place of another.")
        return self
