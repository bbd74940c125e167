"""Scores of a run: means with standard errors, by part of the task and over all."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Mean:
    """Attributes:
    value, se: mean and its standard error; None where one value alone gives none.
    n: values.
    """

    value: float
    se: float | None
    n: int

    @classmethod
    def of(cls, values: Iterable[float]) -> "Mean":
        values = list(values)
        n = len(values)
        mean = math.fsum(values) / n
        if n < 2:
            return cls(mean, None, n)
        variance = math.fsum((value - mean) ** 2 for value in values) / (n - 1)
        return cls(mean, math.sqrt(variance / n), n)

    @classmethod
    def of_means(cls, means: list["Mean"]) -> "Mean":
        """The unweighted mean of independent means."""
        if len(means) == 1:
            return means[0]
        value = math.fsum(mean.value for mean in means) / len(means)
        errors = [mean.se for mean in means]
        se = None if None in errors else math.sqrt(math.fsum(error**2 for error in errors)) / len(means)
        return cls(value, se, sum(mean.n for mean in means))

    def scaled(self, factor: float) -> "Mean":
        return Mean(self.value * factor, None if self.se is None else self.se * factor, self.n)


@dataclass(frozen=True)
class Summary:
    """One contender's run.

    Attributes:
        scores: by metric, over all; the mean of the parts' means where the task has parts. Shares are in percent.
        subsets: the same by part, where there is more than one.
        bytes: means per example: "held", "host", "dense", "read" (see `tasks.Answer`).
        difference: primary metric minus that of the full cache, paired by example; None for the full cache itself.
        cells: `(length, depth) -> score` of the primary metric, where the task has a grid.
    """

    scores: dict[str, Mean]
    subsets: dict[str, dict[str, Mean]]
    bytes: dict[str, float]
    prompt_tokens: float
    new_tokens: float
    difference: Mean | None = None
    cells: dict[tuple[int, float], float] = field(default_factory=dict)

    @property
    def share(self) -> float:
        """Bytes held, host included, as a share of dense."""
        return (self.bytes["held"] + self.bytes["host"]) / self.bytes["dense"] if self.bytes["dense"] else 0.0


def summarise(
    records: list[dict[str, Any]], primary: str, unit: str, baseline: list[dict[str, Any]] | None = None
) -> Summary:
    """Adds up the kept records of a run (see `runner.record`).

    Args:
        baseline: the full cache's records of the same examples.
    """
    factor = 100.0 if unit == "%" else 1.0
    parts = {name: [r for r in records if r["subset"] == name] for name in sorted({r["subset"] for r in records})}
    metrics = list(records[0]["scores"])
    by_part = {
        name: {metric: Mean.of(r["scores"][metric] for r in rows).scaled(factor) for metric in metrics}
        for name, rows in parts.items()
    }
    scores = {metric: Mean.of_means([part[metric] for part in by_part.values()]) for metric in metrics}
    if primary == "nll":
        scores["ppl"] = _exponential(scores["nll"])
    grid: dict[tuple[int, float], list[float]] = {}
    for row in records:
        if {"length", "depth"} <= row["group"].keys():
            grid.setdefault((row["group"]["length"], row["group"]["depth"]), []).append(
                factor * row["scores"][primary]
            )

    def mean(read: Callable[[dict], float]) -> float:
        return math.fsum(map(read, records)) / len(records)

    return Summary(
        scores=scores,
        subsets=by_part if len(by_part) > 1 else {},
        bytes={name: mean(lambda r, name=name: r["bytes"][name]) for name in records[0]["bytes"]},
        prompt_tokens=mean(lambda r: r["prompt_tokens"]),
        new_tokens=mean(lambda r: r["new_tokens"]),
        difference=None if baseline is None else _paired(parts, baseline, primary).scaled(factor),
        cells={cell: math.fsum(values) / len(values) for cell, values in grid.items()},
    )


def _paired(parts: dict[str, list[dict[str, Any]]], baseline: list[dict[str, Any]], metric: str) -> Mean:
    """Mean difference over the same examples. What is hard or easy about an example falls out of its error."""
    base = {row["id"]: row["scores"][metric] for row in baseline}
    return Mean.of_means([Mean.of(row["scores"][metric] - base[row["id"]] for row in rows) for rows in parts.values()])


def _exponential(nll: Mean) -> Mean:
    value = math.exp(nll.value)
    return Mean(value, None if nll.se is None else nll.se * value, nll.n)
