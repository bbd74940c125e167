"""kvsparse_hf: sparse key/value caches for Hugging Face Transformers, inside an unmodified `generate()`."""

from .cache import SparseCache
from .decoding import FastDecode, fast_decode
from .errors import (
    BudgetError,
    KVSparseError,
    OptionError,
    PresetError,
    UnsupportedModelError,
    UnsupportedOperationError,
)
from .hf.attention import detach
from .methods import (
    AdaKVCache,
    CLACache,
    DuoAttentionCache,
    ExpectedAttentionCache,
    FullCache,
    H2OCache,
    HeadKVCache,
    HiSparseCache,
    KeyDiffCache,
    KnormCache,
    KVSharerCache,
    KVzipCache,
    LokiCache,
    MoACache,
    PyramidKVCache,
    QuestCache,
    RetrievalAttentionCache,
    RKVCache,
    ScissorhandsCache,
    SnapKVCache,
    SparQCache,
    StreamingLLMCache,
    TieredCache,
    TOVACache,
    YOCOCache,
)
from .presets import list_presets, load_preset
from .registry import get_method, list_methods, register_method
from .report import CacheReport
from .usage import disable, enable, use

__version__ = "0.1.0"

__all__ = [
    "AdaKVCache",
    "BudgetError",
    "CLACache",
    "CacheReport",
    "DuoAttentionCache",
    "ExpectedAttentionCache",
    "FastDecode",
    "FullCache",
    "H2OCache",
    "HeadKVCache",
    "HiSparseCache",
    "KVSharerCache",
    "KVSparseError",
    "KVzipCache",
    "KeyDiffCache",
    "KnormCache",
    "LokiCache",
    "MoACache",
    "OptionError",
    "PresetError",
    "PyramidKVCache",
    "QuestCache",
    "RKVCache",
    "RetrievalAttentionCache",
    "ScissorhandsCache",
    "SnapKVCache",
    "SparQCache",
    "SparseCache",
    "StreamingLLMCache",
    "TOVACache",
    "TieredCache",
    "UnsupportedModelError",
    "UnsupportedOperationError",
    "YOCOCache",
    "detach",
    "disable",
    "enable",
    "fast_decode",
    "get_method",
    "list_methods",
    "list_presets",
    "load_preset",
    "register_method",
    "use",
]
