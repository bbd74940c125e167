"""Shared by the methods that choose at the end of a prompt, and may choose again after every n decoded tokens."""

from typing import Literal

from pydantic import Field, model_validator

from ..errors import OptionError
from ..options import EvictingOptions


class PeriodicOptions(EvictingOptions):
    """Options of methods published for prompts only."""

    recompress_every: int | None = Field(
        None,
        ge=1,
        description="compress to the budget again after so many decoded tokens, which are added until then; default: never",
    )

    def newest_queries(self) -> int:
        """Newest queries that the method's scores look at."""
        return 0

    @model_validator(mode="after")
    def _check_interval(self) -> "PeriodicOptions":
        interval = self.recompress_every
        if interval is None:
            return self
        if interval < self.newest_queries():
            raise OptionError(
                f"recompress_every={interval} is shorter than the window of {self.newest_queries()} queries that choose; raise it, or "
                "lower the window."
            )
        if getattr(self, "decode", "grow") != "grow":
            raise OptionError("recompress_every and decode='bounded' exclude each other: a bounded layer never has more to compress.")
        if self.positions == "cache":
            raise OptionError("positions='cache' with recompress_every is not available; use positions='original'.")
        return self


class KeyScoreOptions(PeriodicOptions):
    """Options of methods that look at keys alone, and can therefore give up one token for each new one."""

    decode: Literal["grow", "bounded"] = Field(
        "grow", description="decoded tokens are added ('grow'), or each takes the place of the token with the worst key ('bounded')"
    )

    @model_validator(mode="after")
    def _check_bounded(self) -> "KeyScoreOptions":
        if self.decode == "bounded" and self.positions == "cache":
            raise OptionError(
                "positions='cache' with decode='bounded' is not available here: evictions from anywhere would move all kept keys at "
                "every step. Use positions='original'."
            )
        return self
