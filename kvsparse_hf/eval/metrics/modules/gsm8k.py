"""GSM8K's exact match for `evaluate.load(path)`: the strict and the flexible rule, and the share of invalid answers."""

import datasets
import evaluate

from kvsparse_hf.eval.metrics.gsm8k import flexible_extract, is_invalid, strict_match

_INPUTS = """
Args:
    predictions: list of strings, the whole generated answers.
    references: list of strings, a number each or an answer that ends in "#### N".
Returns:
    "strict_match", "flexible_extract" and "invalid", 0 to 100.
"""


class GSM8K(evaluate.Metric):
    """Exact match of GSM8K answers by lm-eval's rules."""

    def _info(self):
        return evaluate.MetricInfo(
            description="Exact match of GSM8K answers (arXiv 2110.14168) by lm-eval's strict and flexible rules.",
            citation="arXiv 2110.14168",
            inputs_description=_INPUTS,
            features=datasets.Features(
                {"predictions": datasets.Value("string"), "references": datasets.Value("string")}
            ),
        )

    def _compute(self, predictions, references):
        pairs = list(zip(predictions, references, strict=True))
        rules = {"strict_match": strict_match, "flexible_extract": flexible_extract, "invalid": is_invalid}
        return {name: 100 * sum(rule(*pair) for pair in pairs) / len(pairs) for name, rule in rules.items()}
