"""LongBench's metrics for `evaluate.load(path, config)`; the config is a metric's name, "qa_f1" by default."""

import datasets
import evaluate

from kvsparse_hf.errors import KVSparseError, suggest
from kvsparse_hf.eval.metrics import get_metric

_NAMES = ("classification", "code_similarity", "count", "qa_f1", "retrieval", "rouge_l")
_INPUTS = """
Args:
    predictions: list of strings.
    references: list of lists of strings; the best reference counts.
    classes: list of lists of class names, for "classification" alone.
Returns:
    a dictionary with the metric's name and the mean score, 0 to 100.
"""


class LongBench(evaluate.Metric):
    """One of LongBench's metrics."""

    def _info(self):
        if self.config_name == "default":
            self.config_name = "qa_f1"
        if self.config_name not in _NAMES:
            raise KVSparseError(f"LongBench has no metric {self.config_name!r}.{suggest(self.config_name, _NAMES)}")
        return evaluate.MetricInfo(
            description="The metrics of LongBench (arXiv 2308.14508) for its English tasks.",
            citation="arXiv 2308.14508",
            inputs_description=_INPUTS,
            features=datasets.Features(
                {"predictions": datasets.Value("string"), "references": datasets.Sequence(datasets.Value("string"))}
            ),
        )

    def _compute(self, predictions, references, classes=None):
        metric = get_metric(self.config_name)
        extra = [(names,) for names in classes] if classes is not None else [()] * len(predictions)
        scores = [
            max(metric(prediction, reference, *more) for reference in given)
            for prediction, given, more in zip(predictions, references, extra, strict=True)
        ]
        return {self.config_name: 100 * sum(scores) / len(scores)}
