"""TieredCache: tokens are moved by rank between the device, host memory, few bits, and nowhere."""

import math
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator
from torch import Tensor

from ..cache import SparseCache
from ..errors import OptionError
from ..layers.host import HostMemory, parse_bytes
from ..layers.tiered import TieredLayer
from ..layers.tiers import FORMATS, Coding
from ..options import CommonOptions
from ..policy.geometry import distinctness, key_norms
from ..policy.scored import Entries, ObservingPolicy
from ..policy.tiers import Shares
from ..registry import register_method
from .h2o import HeavyHitterPolicy
from .tova import LastQueryPolicy

_SHARES = ("hbm", "host", "quantized", "evicted")


@dataclass(frozen=True)
class RankedKeysPolicy(ObservingPolicy):
    """Ranks by the keys alone, read from all tiers whenever it ranks.

    Attributes:
        distinct: the most distinct keys first (KeyDiff); otherwise the shortest (Knorm).
    """

    distinct: bool = True

    reads_weights = False
    reads_keys = True

    def worth(self, entries: Entries) -> Tensor:
        return distinctness(entries.keys, entries.valid) if self.distinct else -key_norms(entries.keys)


class TieredOptions(CommonOptions):
    """Options of `TieredCache`."""

    hbm: float = Field(0.5, ge=0.0, le=1.0, description="share of the tokens seen that stays on the device in full precision")
    host: float = Field(0.5, ge=0.0, le=1.0, description="share in host memory, in full precision, used exactly at every step")
    quantized: float = Field(0.0, ge=0.0, le=1.0, description="share on the device in few bits")
    evicted: float = Field(0.0, ge=0.0, le=1.0, description="share that is gone for good")
    interval: int = Field(16, ge=1, description="decoded tokens between two rankings, which gather on the device until then")
    sinks: int = Field(4, ge=0, description="first tokens of each row that always stay on the device")
    recent: int = Field(64, ge=1, description="newest tokens that stay on the device whenever tokens are ranked")
    scorer: Literal["attention", "last", "keydiff", "knorm"] = Field(
        "attention",
        description="the rank: attention received so far (H2O), the newest query's (TOVA), distinct keys (KeyDiff), short keys (Knorm)",
    )
    normalize: Literal["none", "count"] = Field(
        "none", description="scorer='attention': sums, which favour early tokens, or divided by the queries that could see the token"
    )
    bits: Literal[8, 4, "fp8"] = Field(8, description="of the quantized share: int8, int4 or float8_e4m3fn")
    group: int = Field(32, ge=1, description="channels of a token that share a range in the quantized share")
    host_bytes: Any = Field(None, description="host memory that the cache may take ('8GiB' or bytes); null: what the machine has")

    @field_validator("host_bytes")
    @classmethod
    def _plain_size(cls, value: Any) -> Any:
        parse_bytes(value, "host_bytes")
        return value

    @model_validator(mode="after")
    def _check(self) -> "TieredOptions":
        shares = [getattr(self, name) for name in _SHARES]
        if abs(math.fsum(shares) - 1.0) > 1e-6:
            given = " + ".join(f"{name}={share:g}" for name, share in zip(_SHARES, shares, strict=True))
            raise OptionError(f"the shares {given} add up to {math.fsum(shares):g}; they must add up to 1.")
        if self.backend == "flash":
            raise OptionError("backend='flash' gives no attention weights, which the ranking needs; use 'auto', 'triton' or 'torch'.")
        return self


@register_method("tiered")
class TieredCache(SparseCache):
    """Evict, offload and quantize by one ranking, after "Not All Thoughts Need HBM" (Yuan et al., arXiv 2605.09490).

    The tokens of every row and key/value head are ranked by the attention they received so far. The best share `hbm` stays
    on the device, the next `host` lies in host memory in full precision, the next `quantized` stays on the device in few
    bits, and the worst `evicted` is gone. Every step attends to the first three together, exactly as they are held: host
    tokens are read through the link in place, quantized ones are dequantized inside the kernel, and the parts are merged by
    log-sum-exp. All of them keep being scored, so every `interval` decoded tokens they are ranked anew and move both ways:
    between device and host bit for bit, and into few bits with one rounding, however often a token comes and goes.

    With `quantized=0` and `evicted=0` nothing is approximated: the logits are those of `FullCache`, whatever `hbm` is, and
    crops, drafts and reuse of a prefix are exact. Only then can tokens be taken back.

    Of the paper only the abstract and summaries could be read (four such tiers, cumulative attention as the rank, offloaded
    tokens fetched in full precision before every attention step); neither its tables nor its code, window, interval and
    prompt treatment. Choices made here:

    - Shares count the tokens a row has seen, prompt included. The evicted share counts everything ever seen, so ranking
      again drops only what is missing from it and never compounds. Fractions round down in favour of the device.
    - Rows and key/value heads rank for themselves; query heads of a group are averaged after the softmax. The prompt is
      ranked at its end like all else; protected are the first `sinks` and the newest `recent` tokens, on the device. Where
      that is more than its share, the host holds less.
    - Quantized keys and values have one range per token and `group` of channels (least and greatest value; for fp8 the
      largest magnitude), keys after their rotation. Ranges per channel over many tokens (KIVI) would tie tokens together that
      are ranked apart.
    - `interval`, `sinks` and `recent` are this library's defaults.

    Args:
        model: a causal language model, or its config.
        options: `hbm`, `host`, `quantized`, `evicted` (together 1) and the others of `TieredOptions`.

    Raises:
        OptionError: shares that do not add up to 1, a group that does not divide the head size.
        BudgetError: more host memory than `host_bytes` or the machine allows. Nothing was changed then, but for a first prompt,
            after which the cache refuses to go on until `reset()`.

    Example:
        >>> cache = TieredCache(model, hbm=0.25, host=0.72, evicted=0.03)
        >>> model.generate(**inputs, past_key_values=cache)
    """

    paper = "arXiv 2605.09490"
    action = "offload"
    needs = "the attention each token received from all queries, or keys"
    Options = TieredOptions

    def prepare(self) -> None:
        options = self.options
        self._coding = Coding(FORMATS[options.bits], options.group)
        if options.quantized > 0 and self.binding.head_dim:
            self._coding.check(self.binding.head_dim)
        self._memory = HostMemory(parse_bytes(options.host_bytes, "host_bytes"))
        self._split = Shares(options.host, options.quantized, options.evicted, options.sinks + options.recent)
        self.prefix_safe = not self._split.lossy

    def make_policy(self) -> ObservingPolicy:
        """What ranks the tokens of a layer."""
        options = self.options
        protected = dict(sinks=options.sinks, recent=options.recent)
        if options.scorer == "attention":
            return HeavyHitterPolicy(**protected, normalize=options.normalize, backend=options.backend)
        if options.scorer == "last":
            return LastQueryPolicy(**protected, backend=options.backend)
        return RankedKeysPolicy(**protected, distinct=options.scorer == "keydiff")

    def make_layer(self, layer_idx: int) -> TieredLayer:
        options = self.options
        return TieredLayer(
            layer_idx,
            self.session,
            self.make_policy(),
            self._split,
            options.interval,
            options.reserve,
            options.backend,
            self._memory,
            self._coding,
        )
