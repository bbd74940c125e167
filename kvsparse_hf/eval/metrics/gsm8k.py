"""GSM8K's answers, extracted and compared as lm-eval's task `gsm8k` does (filters strict-match and flexible-extract).

Known traps of these rules, kept on purpose so that scores compare: "#### $18" and "####18" are invalid for the strict rule and
right for the flexible one; "so 5... ok" gives "5.." and "10 dollars..." gives ".."; "#### 18.00" is not "18"; text that runs
on into a new question changes the flexible answer, so a stop string matters.
"""

import re

INVALID = "[invalid]"
_STRICT = re.compile(r"#### (-?[0-9.,]+)")
_FLEXIBLE = re.compile(r"(-?[$0-9.,]{2,})|(-?[0-9]+)")
_CALCULATION = re.compile(r"<<[^>]*>>")


def extract_strict(text: str) -> str:
    """The first number after "#### ", else `INVALID`."""
    found = _STRICT.search(text)
    return found.group(1) if found else INVALID


def extract_flexible(text: str) -> str:
    """The last thing that looks like a number, else `INVALID`."""
    found = _FLEXIBLE.findall(text)
    return next(filter(None, found[-1])).strip() if found else INVALID


def normalize_number(text: str) -> str:
    """Without commas, dollar signs, everything up to the last "#### " and one full stop at the end; lower case."""
    text = text.replace(",", "").replace("$", "")
    text = re.sub(r"(?s).*#### ", "", text)
    return re.sub(r"\.$", "", text).lower()


def strict_match(prediction: str, reference: str) -> float:
    """1 if the number after "#### " is the reference's. `reference`: a number, or an answer that ends in "#### N"."""
    return float(normalize_number(extract_strict(prediction)) == normalize_number(reference))


def flexible_extract(prediction: str, reference: str) -> float:
    """1 if the answer's last number is the reference's."""
    return float(normalize_number(extract_flexible(prediction)) == normalize_number(reference))


def is_invalid(prediction: str, reference: str = "") -> float:
    """1 if the strict rule finds no answer."""
    return float(extract_strict(prediction) == INVALID)


def without_calculations(answer: str) -> str:
    """A training answer without its `<<…>>` marks, as few-shot examples show it."""
    return _CALCULATION.sub("", answer)
