"""The same task for the recall model: a name and its number, among others, at some depth of a text."""

from ..recall.model import LENGTH
from ..recall.tasks import ASK, make_questions
from .passkey import Trial

TEXT_TOKENS = 3 * LENGTH // 4
_DRAWN = 24  # questions per depth, of which the nearest is taken


def make_fact_trials(depths: int, seed: int) -> list[Trial]:
    """One trial in the middle of each of `depths` equal parts of the text. Its answer is the whole answer."""
    trials = []
    for index in range(depths):
        wanted = (index + 0.5) / depths
        drawn = make_questions("facts", _DRAWN, TEXT_TOKENS + ASK, seed * depths + index)
        nearest = min(drawn, key=lambda question: abs(question.depth - wanted))
        trials.append(Trial(wanted, nearest.answer, nearest.prompt))
    return trials
