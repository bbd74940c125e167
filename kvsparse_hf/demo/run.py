"""Runs the trials with each cache and adds up what was measured."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from ..cache import SparseCache
from ..hf.compat import CACHE_ARGUMENT
from ..report import CacheReport
from .passkey import Trial

METHODS = ("full", "snapkv", "streaming-llm")
NEW_TOKENS = 16


@dataclass
class Outcome:
    """What one method did over all trials. Figures of the cache are those right after the prompt.

    Attributes:
        method: its name.
        answers: one `(trial, answer)` each.
        reports: what the cache held, one each.
        decoded, decode_s: tokens after the first of each answer, and the seconds they took.
    """

    method: str
    answers: list[tuple[Trial, str]] = field(default_factory=list)
    reports: list[CacheReport] = field(default_factory=list)
    decoded: int = 0
    decode_s: float = 0.0

    @property
    def found(self) -> int:
        """Answers that are right."""
        return sum(trial.is_found(answer) for trial, answer in self.answers)

    @property
    def missed_depths(self) -> list[float]:
        """Depths of the trials whose answer is wrong."""
        return [trial.depth for trial, answer in self.answers if not trial.is_found(answer)]

    @property
    def tokens_per_s(self) -> float:
        """Decoded tokens per second, the prompt left out."""
        return self.decoded / self.decode_s if self.decode_s else 0.0

    def mean(self, figure: Callable[[CacheReport], float]) -> float:
        """A figure of the cache's report, averaged over the trials."""
        return sum(map(figure, self.reports)) / len(self.reports)


class _Watch(BaseStreamer):
    """Notes when each token arrives, and what the cache holds once it has read the prompt and nothing else."""

    def __init__(self, cache: SparseCache):
        self.cache = cache
        self.report: CacheReport | None = None
        self.times: list[float] = []
        self._prompt_is_next = True

    def put(self, value) -> None:
        if self._prompt_is_next:
            self._prompt_is_next = False
            return
        if self.report is None:
            self.report = self.cache.report()
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing to flush."""


def run_demo(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    trials: list[Trial],
    make_cache: Callable[[str], SparseCache],
    encode: Callable[[str], dict[str, Any]],
    advance: Callable[[], None] = lambda: None,
) -> list[Outcome]:
    """Asks every method every question.

    Args:
        make_cache: a fresh cache from a method's name.
        encode: model inputs from a prompt.
        advance: called after each answer.
    """
    # The first forward of a process pays for its start; no method should.
    warm_up = {name: tensor[:, -8:] for name, tensor in encode(trials[0].prompt).items()}
    model.generate(**warm_up, max_new_tokens=2, do_sample=False)
    outcomes = {method: Outcome(method) for method in METHODS}
    for trial in trials:  # the methods take turns, so that a busy machine slows all of them alike
        inputs = encode(trial.prompt)
        for method, outcome in outcomes.items():
            cache = make_cache(method)
            watch = _Watch(cache)
            output = model.generate(
                **inputs,
                **{CACHE_ARGUMENT: cache},
                max_new_tokens=NEW_TOKENS,
                min_new_tokens=NEW_TOKENS,
                do_sample=False,
                streamer=watch,
            )
            answer = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
            outcome.answers.append((trial, answer))
            outcome.reports.append(watch.report)
            outcome.decoded += len(watch.times) - 1
            outcome.decode_s += watch.times[-1] - watch.times[0]
            advance()
    return list(outcomes.values())
