"""LongBench's metrics (arXiv 2308.14508, `LongBench/metrics.py` and `eval.py` of THUDM/LongBench), for its English tasks.

They give the scores that the official code gives on the same answers, to two decimals. Answers are scored as generated: no
stripping, except where a function says so.
"""

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence

from ..extras import need

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_answer(text: str) -> str:
    """Lower case, without ASCII punctuation, without the words a, an and the, single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def qa_f1(prediction: str, reference: str) -> float:
    """F1 of the two bags of words, after `normalize_answer`."""
    predicted, expected = normalize_answer(prediction).split(), normalize_answer(reference).split()
    same = sum((Counter(predicted) & Counter(expected)).values())
    if same == 0:
        return 0.0
    precision, recall = same / len(predicted), same / len(expected)
    return 2 * precision * recall / (precision + recall)


def rouge_l(prediction: str, reference: str) -> float:
    """ROUGE-L F as the package `rouge` computes it (not `rouge_score`, which differs). What it refuses, such as an empty
    answer, is 0."""
    rouge = need("rouge", "the metric rouge_l")
    try:
        return rouge.Rouge(metrics=["rouge-l"]).get_scores([prediction], [reference], avg=True)["rouge-l"]["f"]
    except (ValueError, RecursionError):
        return 0.0


def classification(prediction: str, reference: str, classes: Sequence[str] = ()) -> float:
    """One divided by the number of class names in the answer, if the right one is among them.

    A class name that is a part of the right one does not count against it. The official loop removes such names from the
    list it walks over, and may miss one after another; this does not.
    """
    named = [name for name in classes if name in prediction]
    named = [name for name in named if name == reference or name not in reference]
    return 1 / len(named) if reference in named else 0.0


def retrieval(prediction: str, reference: str) -> float:
    """Share of the answer's numbers that are the N of the reference "Paragraph N"."""
    found = re.search(r"Paragraph (\d+)", reference)
    return count(prediction, found.group(1)) if found else 0.0


def count(prediction: str, reference: str) -> float:
    """Share of the answer's numbers (runs of digits) that are the reference; 0 where it has none."""
    numbers = re.findall(r"\d+", prediction)
    return numbers.count(str(reference)) / len(numbers) if numbers else 0.0


def code_similarity(prediction: str, reference: str) -> float:
    """Levenshtein (Indel) similarity of the first line of code, rounded to a percent.

    The first line is the first without a back-tick, `#` or `//`; leading newlines are dropped.
    """
    fuzz = need("rapidfuzz.fuzz", "the metric code_similarity")
    lines = prediction.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    return round(fuzz.ratio(line, reference)) / 100


# The metric of each English task.
METRICS: dict[str, Callable[..., float]] = {
    "narrativeqa": qa_f1,
    "qasper": qa_f1,
    "multifieldqa_en": qa_f1,
    "hotpotqa": qa_f1,
    "2wikimqa": qa_f1,
    "musique": qa_f1,
    "gov_report": rouge_l,
    "qmsum": rouge_l,
    "multi_news": rouge_l,
    "trec": classification,
    "triviaqa": qa_f1,
    "samsum": rouge_l,
    "passage_retrieval_en": retrieval,
    "passage_count": count,
    "lcc": code_similarity,
    "repobench-p": code_similarity,
}
_FIRST_LINE = ("trec", "triviaqa", "samsum")


def score(dataset: str, prediction: str, references: Sequence[str], classes: Sequence[str] = ()) -> float:
    """The score of one row of one task: the best over its references.

    For trec, triviaqa and samsum only the first line counts, leading newlines dropped.
    """
    if dataset in _FIRST_LINE:
        prediction = prediction.lstrip("\n").split("\n")[0]
    metric = METRICS[dataset]
    extra = (classes,) if metric is classification else ()
    return max((metric(prediction, reference, *extra) for reference in references), default=0.0)
