"""One short file per method: the paper, the defaults, and which scorer, budget and action it combines."""

from .adakv import AdaKVCache
from .cla import CLACache
from .duo_attention import DuoAttentionCache
from .expected_attention import ExpectedAttentionCache
from .full import FullCache
from .h2o import H2OCache
from .headkv import HeadKVCache
from .hisparse import HiSparseCache
from .keydiff import KeyDiffCache
from .knorm import KnormCache
from .kvsharer import KVSharerCache
from .kvzip import KVzipCache
from .loki import LokiCache
from .moa import MoACache
from .pyramidkv import PyramidKVCache
from .quest import QuestCache
from .retrieval import RetrievalAttentionCache
from .rkv import RKVCache
from .scissorhands import ScissorhandsCache
from .snapkv import SnapKVCache
from .sparq import SparQCache
from .streaming_llm import StreamingLLMCache
from .tiered import TieredCache
from .tova import TOVACache
from .yoco import YOCOCache

__all__ = [
    "AdaKVCache",
    "CLACache",
    "DuoAttentionCache",
    "ExpectedAttentionCache",
    "FullCache",
    "H2OCache",
    "HeadKVCache",
    "HiSparseCache",
    "KVSharerCache",
    "KVzipCache",
    "KeyDiffCache",
    "KnormCache",
    "LokiCache",
    "MoACache",
    "PyramidKVCache",
    "QuestCache",
    "RKVCache",
    "RetrievalAttentionCache",
    "ScissorhandsCache",
    "SnapKVCache",
    "SparQCache",
    "StreamingLLMCache",
    "TOVACache",
    "TieredCache",
    "YOCOCache",
]
