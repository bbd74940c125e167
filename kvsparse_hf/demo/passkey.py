"""The task: a passkey of two words, hidden at some depth of a text that has nothing to do with it."""

import importlib.resources
import random
import re
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

TEXT_TOKENS = 1450
ANSWER_BEGINS = 'The secret passkey is "'

_INTRODUCTION = (
    "There is an important piece of information hidden in a lot of text. "
    "Find it and memorise it; I will ask you about it."
)
_NEEDLE = 'The secret passkey is "{passkey}". Remember it: the secret passkey is "{passkey}".'
_QUESTION = "What is the secret passkey?"
_FIRST = "amber copper crimson frozen gentle golden hidden hollow ivory jolly lucky marble narrow olive purple quiet rusty scarlet silver tiny"
_SECOND = "anchor basket candle dragon engine falcon feather garden hammer island jacket kettle ladder lantern mirror needle pepper rabbit"


@dataclass(frozen=True)
class Trial:
    """One question.

    Attributes:
        depth: where the passkey stands, 0 (start) to 1 (end of the text).
        passkey: the expected answer.
        prompt: text and question; the answer begins with `ANSWER_BEGINS`.
    """

    depth: float
    passkey: str
    prompt: str

    def is_found(self, answer: str) -> bool:
        """Whether an answer, as it goes on after `ANSWER_BEGINS`, starts with the passkey."""
        return re.findall(r"\w+", answer.lower())[:2] == self.passkey.split()


def make_trials(tokenizer: PreTrainedTokenizerBase, depths: int, seed: int) -> list[Trial]:
    """One trial in the middle of each of `depths` equal parts of the text.

    Each has its own passkey and its own order of paragraphs. The same seed and tokenizer give the same trials.
    """
    text = importlib.resources.files(__package__).joinpath("haystack.txt").read_text(encoding="utf-8")
    lines = text.splitlines()
    lengths = dict(zip(lines, map(len, tokenizer(lines, add_special_tokens=False).input_ids), strict=True))
    trials = []
    for index in range(depths):
        rng = random.Random(f"{seed}/{index}")
        passkey = f"{rng.choice(_FIRST.split())} {rng.choice(_SECOND.split())}"
        trials.append(_trial(rng.sample(lines, len(lines)), lengths, (index + 0.5) / depths, passkey))
    return trials


def _trial(lines: list[str], lengths: dict[str, int], depth: float, passkey: str) -> Trial:
    """Takes lines up to `TEXT_TOKENS`, and puts the passkey between the two nearest to `depth`."""
    taken, total = [], 0
    for line in lines:
        if total + lengths[line] > TEXT_TOKENS:
            break
        taken.append(line)
        total += lengths[line]
    before = [sum(lengths[line] for line in taken[:count]) for count in range(len(taken) + 1)]
    at = min(range(len(before)), key=lambda count: abs(before[count] - depth * total))
    text = "\n".join((*taken[:at], _NEEDLE.format(passkey=passkey), *taken[at:]))
    return Trial(depth, passkey, f"{_INTRODUCTION}\n\n{text}\n\n{_QUESTION}")
