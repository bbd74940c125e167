"""Metrics as plain functions of one answer and one reference, from 0 to 1, and as modules of the `evaluate` library.

from kvsparse_hf.eval.metrics import get_metric, module
get_metric("qa_f1")("in Paris", "Paris")                       # 0.666…, no other package
evaluate.load(module("longbench"), "qa_f1").compute(predictions=["in Paris"], references=[["Paris"]])
"""

from collections.abc import Callable
from pathlib import Path

from ...errors import KVSparseError, suggest
from .gsm8k import flexible_extract, is_invalid, strict_match
from .longbench import classification, code_similarity, count, qa_f1, retrieval, rouge_l
from .text import contains, match_all, match_part, number_match

_METRICS: dict[str, Callable[..., float]] = {
    "classification": classification,
    "code_similarity": code_similarity,
    "contains": contains,
    "count": count,
    "flexible_extract": flexible_extract,
    "invalid": is_invalid,
    "match_all": match_all,
    "match_part": match_part,
    "number_match": number_match,
    "qa_f1": qa_f1,
    "retrieval": retrieval,
    "rouge_l": rouge_l,
    "strict_match": strict_match,
}
MODULES = ("gsm8k", "longbench")


def list_metrics() -> list[str]:
    """The names of all metrics."""
    return sorted(_METRICS)


def get_metric(name: str) -> Callable[..., float]:
    """The function of that name: `(prediction, reference) -> score`.

    Raises:
        KVSparseError: an unknown name; the nearest known one is suggested.
    """
    if name not in _METRICS:
        raise KVSparseError(f"unknown metric {name!r}.{suggest(name, _METRICS)}")
    return _METRICS[name]


def module(name: str) -> str:
    """The path of a module for `evaluate.load`: "longbench" or "gsm8k".

    Raises:
        KVSparseError: an unknown name.
    """
    if name not in MODULES:
        raise KVSparseError(f"no evaluate module {name!r}.{suggest(name, MODULES)}")
    return str(Path(__file__).parent / "modules" / f"{name}.py")
