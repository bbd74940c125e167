"""Words, numbers and filler text of the generated tasks. All from a seed, the same on every machine."""

import functools
import importlib.resources
import itertools
import random
import re
import uuid
from collections.abc import Callable, Iterator

from transformers import PreTrainedTokenizerBase

from ...errors import KVSparseError

_CONSONANTS, _VOWELS = "bdfgklmnprstvz", "aeiou"


@functools.cache
def haystack() -> tuple[str, ...]:
    """Paragraphs that have nothing to do with any task (the text of `kvsparse demo`)."""
    file = importlib.resources.files("kvsparse_hf.demo").joinpath("haystack.txt")
    return tuple(file.read_text(encoding="utf-8").splitlines())


@functools.cache
def vocabulary() -> tuple[str, ...]:
    """The distinct words of five to nine letters in the haystack, sorted."""
    return tuple(sorted(set(re.findall(r"\b[a-z]{5,9}\b", " ".join(haystack())))))


def endless(rng: random.Random, lines: tuple[str, ...]) -> Iterator[str]:
    """The lines in random order, again and again, in a new order each time."""
    while True:
        yield from rng.sample(lines, len(lines))


def pairs(rng: random.Random, count: int) -> list[str]:
    """Distinct keys of two words, such as "kettle-island"."""
    words = vocabulary()
    chosen = rng.sample(range(len(words) ** 2), count)
    return [f"{words[index // len(words)]}-{words[index % len(words)]}" for index in chosen]


def made_up(rng: random.Random, count: int) -> list[str]:
    """Distinct words that mean nothing, of three syllables."""
    syllables = ["".join(pair) for pair in itertools.product(_CONSONANTS, _VOWELS)]
    chosen = rng.sample(range(len(syllables) ** 3), count)
    return [
        "".join(syllables[index // len(syllables) ** place % len(syllables)] for place in range(3)) for index in chosen
    ]


def number(rng: random.Random, digits: int) -> str:
    """A number of exactly that many digits."""
    return str(rng.randrange(10 ** (digits - 1), 10**digits))


def make_uuid(rng: random.Random) -> str:
    """A random UUID of version 4."""
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def largest_fit(
    tokenizer: PreTrainedTokenizerBase, render: Callable[[int], str], tokens: int, low: int, high: int, what: str
) -> str:
    """`render(n)` of the largest n in `[low, high]` that has at most `tokens` tokens.

    Raises:
        KVSparseError: not even `low` fits.
    """

    def fits(count: int) -> bool:
        return len(tokenizer(render(count), add_special_tokens=False, verbose=False).input_ids) <= tokens

    if not fits(low):
        raise KVSparseError(f"{what} does not fit in {tokens} tokens; choose a greater length.")
    step = 1  # grows until something does not fit, so that no text far too long is tokenized
    while low + step <= high and fits(low + step):
        low, step = low + step, 2 * step
    high = min(high, low + step - 1)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return render(low)


def spread(index: int) -> float:
    """The index-th of a sequence of depths in (0, 1) that covers them evenly from the beginning (golden ratio)."""
    return (0.5 + index * 0.6180339887498949) % 1.0
