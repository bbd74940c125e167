"""Dense attention with our kernels: the baseline, and the oracle of the tests."""

from ..options import CommonOptions
from ..policy.base import Policy
from ..registry import register_method
from .evicting import EvictingCache


@register_method("full")
class FullCache(EvictingCache):
    """Keeps everything.

    Example:
        >>> cache = FullCache(model)
        >>> model.generate(**inputs, past_key_values=cache)
    """

    action = "none"
    Options = CommonOptions

    def make_policy(self, layer_idx: int) -> Policy:
        return Policy()
