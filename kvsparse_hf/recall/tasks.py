"""Texts for the recall model, as batches to train on and as questions to ask.

facts   Pairs of a name and a number among other words; asked for one name, the model repeats it and gives its number:

            ... sea bako 37 . the old road dalo 5 . ... ? bako => bako 37

        The number follows from a decode step (the repeated name), so the cache must still hold it, wherever it stood.

chains  Definitions that lean on earlier ones, and their solution step by step. Every step reads its definition and the
        result of an earlier step, often a long way back; sums are modulo 10:

            let bako none + 7 ... let dalo bako - 3 ... solve bako none + 7 : 0 = bako 7 . dalo bako - 3 : 7 = dalo 4 . ...
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .vocabulary import FILLER, IDS, NAMES, NUMBERS, WORDS

TASKS = ("facts", "chains")
IGNORED = -100
FACT, DEFINITION, STEP = 3, 5, 10  # tokens of a fact, a definition and a step of a solution
MODULUS = 10  # of the sums in a chain: what is to be hard is to find the earlier result
ASK = 5  # tokens of a question and its answer: ? name => name number

_NUMBER, _NAME, _FILLER = IDS[NUMBERS[0]], IDS[NAMES[0]], IDS[FILLER[0]]


class Batch(NamedTuple):
    """`ids` `[B, T]` int64, and `labels` `[B, T]`: the ids where the model is to be right, -100 elsewhere."""

    ids: Tensor
    labels: Tensor


@dataclass(frozen=True)
class Question:
    """A text to complete.

    Attributes:
        prompt: what is given (without <s>); answer: how it goes on.
        depth: where in the text the fact stands, 0 … 1; None where many places matter.
    """

    prompt: str
    answer: str
    depth: float | None = None


def facts_batch(batch: int, length: int, facts: int, asked: int, generator: torch.Generator, device="cpu") -> Batch:
    """Texts of `length` tokens at most that hold `facts` facts, and ask for `asked` of them one after the other."""
    cells = (length - 1 - ASK * asked) // FACT
    facts = min(facts, cells, len(NAMES))
    names = _permutation(batch, len(NAMES), generator, device)[:, :facts]
    numbers = _random(batch, facts, 100, generator, device)
    text = _filler(batch, cells, FACT, generator, device)
    place = _permutation(batch, cells, generator, device)[:, :facts].sort(1).values
    fact = torch.stack((names + _NAME, numbers + _NUMBER, torch.full_like(names, IDS["."])), dim=2)
    text.scatter_(1, place.unsqueeze(2).expand(-1, -1, FACT), fact)
    chosen = _random(batch, asked, facts, generator, device)
    name, number = names.gather(1, chosen) + _NAME, numbers.gather(1, chosen) + _NUMBER
    mark, arrow = torch.full_like(name, IDS["?"]), torch.full_like(name, IDS["=>"])
    ask = torch.stack((mark, name, arrow, name, number), dim=2)
    wanted = torch.full_like(ask, IGNORED)
    wanted[..., 3:] = ask[..., 3:]
    return _join([(text.flatten(1), None), (ask.flatten(1), wanted.flatten(1))])


def chains_batch(batch: int, steps: int, filler: int, generator: torch.Generator, device="cpu") -> Batch:
    """Chains of `steps` definitions with `filler` other stretches of words between them, and their solutions."""
    names = _permutation(batch, len(NAMES), generator, device)[:, :steps] + _NAME
    change = _random(batch, steps, 9, generator, device) + 1
    minus = _random(batch, steps, 2, generator, device)
    leans = torch.full((batch, steps), -1, device=device)  # the earlier definition that each one leans on, -1 for none
    value = torch.zeros(batch, steps, dtype=torch.int64, device=device)
    base = torch.zeros(batch, steps, dtype=torch.int64, device=device)
    for step in range(steps):
        if step > 1:  # two that lean on nothing
            leans[:, step] = _random(batch, 1, step, generator, device)[:, 0]
            base[:, step] = value.gather(1, leans[:, step : step + 1])[:, 0]
        value[:, step] = (base[:, step] + torch.where(minus[:, step] == 1, -change[:, step], change[:, step])) % MODULUS
    operand = torch.where(leans < 0, IDS["none"], names.gather(1, leans.clamp(min=0)))
    sign = torch.where(minus == 1, IDS["-"], IDS["+"])
    word = {mark: torch.full_like(names, IDS[mark]) for mark in ("let", ":", "=", ".", "solve")}
    definition = torch.stack((word["let"], names, operand, sign, change + _NUMBER), dim=2)
    step = torch.stack((names, operand, sign, change + _NUMBER, word[":"], base + _NUMBER, word["="], names, value + _NUMBER, word["."]), dim=2)
    cells = _filler(batch, steps + filler, DEFINITION, generator, device)
    place = _permutation(batch, steps + filler, generator, device)[:, :steps].sort(1).values
    cells.scatter_(1, place.unsqueeze(2).expand(-1, -1, DEFINITION), definition)
    step = step.flatten(1)
    return _join([(cells.flatten(1), None), (word["solve"][:, :1], None), (step, step)])


def make_questions(task: str, count: int, size: int, seed: int = 0) -> list[Question]:
    """Questions of one task.

    Args:
        size: tokens of a text of facts, which holds a fact in every fourth cell; steps of a chain.

    Raises:
        ValueError: no such task.
    """
    generator = torch.Generator().manual_seed(seed)
    if task == "facts":
        batch = facts_batch(count, size, size // (4 * FACT), 1, generator)
        return [_fact(ids) for ids in batch.ids]
    if task == "chains":
        batch = chains_batch(count, size, size // 2, generator)
        given = batch.ids.shape[1] - STEP * size
        return [Question(_text(ids[1:given]), _text(ids[given:])) for ids in batch.ids]
    raise ValueError(f"task must be one of {', '.join(TASKS)}, got {task!r}")


def _fact(ids: Tensor) -> Question:
    place = int((ids[:-ASK] == ids[-2]).nonzero()[0])
    return Question(_text(ids[1:-2]), _text(ids[-2:]), place / (len(ids) - ASK))


def _text(ids: Tensor) -> str:
    return " ".join(WORDS[token] for token in ids.tolist())


def _join(parts: list[tuple[Tensor, Tensor | None]]) -> Batch:
    """<s> and the parts; labels where a part has them."""
    start = torch.full_like(parts[0][0][:, :1], IDS["<s>"])
    ids = torch.cat([start, *(part for part, _ in parts)], dim=1)
    labels = [torch.full_like(part, IGNORED) if wanted is None else wanted for part, wanted in parts]
    return Batch(ids, torch.cat([torch.full_like(start, IGNORED), *labels], dim=1))


def _random(batch: int, count: int, below: int, generator: torch.Generator, device) -> Tensor:
    return torch.randint(below, (batch, count), generator=generator, device=device)


def _permutation(batch: int, count: int, generator: torch.Generator, device) -> Tensor:
    return torch.rand(batch, count, generator=generator, device=device).argsort(1)


def _filler(batch: int, cells: int, width: int, generator: torch.Generator, device) -> Tensor:
    return _random(batch, cells * width, len(FILLER), generator, device).view(batch, cells, width) + _FILLER
