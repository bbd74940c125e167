"""Whether an answer holds what it should: RULER's string matches and exact numbers."""

import re
from collections.abc import Sequence

_CONTROL = re.compile(r"[\x00-\x1f]")


def _clean(prediction: str) -> str:
    """Stripped, control characters as newlines, lower case (RULER's `postprocess_pred`)."""
    return _CONTROL.sub("\n", prediction.strip()).strip().lower()


def match_all(prediction: str, references: str | Sequence[str]) -> float:
    """RULER's `string_match_all` (arXiv 2404.06654): share of the references that occur in the answer, whatever the case."""
    references = [references] if isinstance(references, str) else references
    answer = _clean(prediction)
    return sum(reference.lower() in answer for reference in references) / len(references)


def match_part(prediction: str, references: str | Sequence[str]) -> float:
    """RULER's `string_match_part`: 1 if any reference occurs in the answer."""
    references = [references] if isinstance(references, str) else references
    answer = _clean(prediction)
    return float(any(reference.lower() in answer for reference in references))


def contains(prediction: str, reference: str) -> float:
    """1 if the reference occurs in the answer, whatever the case."""
    return float(reference.lower() in prediction.lower())


def number_match(prediction: str, reference: str | int) -> float:
    """1 if the answer's first number (run of digits) is the reference."""
    found = re.search(r"\d+", prediction)
    return float(found is not None and found.group() == str(reference))
