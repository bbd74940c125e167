"""Options of the caches: one pydantic model per method is its constructor, its YAML schema and its documentation."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from .errors import KVSparseError, OptionError, suggest
from .policy.budgets import Budget
from .texts import brief

MOST = 2**24  # tokens, channels, steps
_NO_COUNTS = ("budget", "seed")  # the one has limits of its own, the other none


class CommonOptions(BaseModel):
    """Options that every method takes."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)

    reserve: int = Field(256, ge=1, description="decode tokens preallocated per head where the cache grows; doubles as it fills")
    backend: Literal["auto", "triton", "flash", "torch"] = Field("auto", description="kernels for attention over kept tokens")


class EvictingOptions(CommonOptions):
    """Options that every evicting method takes."""

    budget: Any = Field(
        1024, description="kept entries per key/value head on average (int), share of the prompt (float), or size ('512MiB')"
    )
    sinks: int = Field(0, ge=0, description="first tokens of each row that are always kept")
    recent: int = Field(0, ge=0, description="newest tokens that are always kept")
    positions: Literal["original", "cache"] = Field(
        "original", description="rotary positions of kept tokens: where they were in the text, or where they are in the cache"
    )

    action: Literal["evict", "offload", "quantize"] = Field(
        "evict", description="what becomes of the tokens over the budget: gone, in host memory and still used exactly, or in few bits"
    )
    bits: Literal[8, 4, "fp8"] = Field(8, description="action='quantize': int8, int4 or float8_e4m3fn")
    group: int = Field(32, ge=1, description="action='quantize': channels of a token that share a range")
    host_bytes: Any = Field(
        None, description="action='offload': host memory that the cache may take ('8GiB' or bytes); null: what the machine has"
    )

    @field_validator("budget")
    @classmethod
    def _plain_budget(cls, value: Any) -> Any:
        budget = Budget.parse(value)
        return next(part for part in (budget.tokens, budget.share, value) if part is not None)

    @model_validator(mode="after")
    def _check_action(self) -> "EvictingOptions":
        belongs = {"bits": "quantize", "group": "quantize", "host_bytes": "offload"}
        for name, action in belongs.items():
            if action != self.action and getattr(self, name) != type(self).model_fields[name].default:
                raise OptionError(f"{name} has no effect with action={self.action!r}; give action={action!r}, or leave it out.")
        return self

    def protected(self) -> tuple[int, str]:
        """Entries that are always kept, and what they are."""
        return self.sinks + self.recent, "sinks + recent"

    @model_validator(mode="after")
    def _check_protected(self) -> "EvictingOptions":
        Budget.parse(self.budget).check_minimum(*self.protected())
        return self


def parse_options(schema: type[CommonOptions], method: str, given: dict[str, Any]) -> CommonOptions:
    """Validates keyword options. None for an option that is a plain string is the empty one: YAML reads `key=` and `key:` so.

    Raises:
        OptionError: an unknown option (with the nearest name) or a value out of range.
    """
    for name in given:
        if name not in schema.model_fields:
            raise OptionError(f"{method} has no option {brief(name)}.{suggest(name, schema.model_fields)}")
    for name, value in given.items():
        counts = isinstance(value, int) and not isinstance(value, bool) and name not in _NO_COUNTS and not name.endswith("_bytes")
        if counts and abs(value) > MOST:
            raise OptionError(f"{method}: {name}={brief(value)} is beyond what any text has; give at most {MOST}.")
    texts = {name: "" for name, value in given.items() if value is None and schema.model_fields[name].annotation is str}
    try:
        return schema(**{**given, **texts})
    except ValidationError as error:
        first = error.errors()[0]
        cause = first.get("ctx", {}).get("error")
        if isinstance(cause, KVSparseError):
            raise cause from None
        where = ".".join(str(part) for part in first["loc"][:1]) or "options"
        raise OptionError(f"{method}: {where}={brief(first.get('input'))}: {first['msg']}.") from error
