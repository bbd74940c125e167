"""One short file per method: the paper, the defaults, and which scorer, budget and action it combines."""

from .full import FullCache
from .snapkv import SnapKVCache
from .streaming_llm import StreamingLLMCache

__all__ = ["FullCache", "SnapKVCache", "StreamingLLMCache"]
