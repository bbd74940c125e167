"""Whether anything grows: one long `generate()`, and many short ones, watching device, host and pinned memory.

Weights are random. Caches reserve room for the whole run, so that every curve has to be flat: what still grows is lost.
"""

import gc
import os
import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import PreTrainedModel

from ..cache import SparseCache
from ..cli.loading import choose_dtype
from ..decoding import fast_decode
from ..errors import KVSparseError
from ..eval.contenders import Contender
from ..hf import compat
from ..layers.host import mapped_bytes, registered_bytes
from ..presets import load_preset
from .models import random_model
from .timing import Results

PRESETS = (
    "full",
    "snapkv-1024:budget=256,decode=bounded",
    "h2o-1024:budget=256",
    "quest-1024:budget=256,dense_layers=0",
    "hisparse-2048:budget=128,hot_tokens=256,dense_layers=0",
    "tiered-25",
)

# Bytes that the median of the last quarter may lie above that of the first. Allocators and Python's heap move a little;
# what is held for offloaded tokens may not move at all.
TOLERANCE = {
    "device_allocated": 4 << 20,
    "device_reserved": 64 << 20,
    "torch_pinned": 1 << 20,
    "host_registered": 0,
    "host_mapped": 0,
    "rss": 32 << 20,
}


@dataclass(frozen=True)
class Plan:
    """How long to run.

    Attributes:
        steps: decoded tokens of the one long `generate()`, which runs through `fast_decode`.
        calls: short `generate()` calls in Transformers' own loop: every other one with a fresh cache, the rest with one that is reset.
        prompt: tokens of the longest prompt; the short calls walk over four lengths.
        call_tokens: decoded tokens of a short call.
        samples: moments of each phase at which memory is read.
        seconds: for everything; each phase gets an equal share of what is left and ends early when it is used up.
    """

    steps: int = 10_000
    calls: int = 500
    prompt: int = 512
    call_tokens: int = 8
    samples: int = 100
    seconds: float = float("inf")


@dataclass
class Curve:
    """Memory over the units (steps or calls) of one phase."""

    device: torch.device
    every: int
    deadline: float
    slack: int = 0  # bytes of `rss` that may come late: a CPU gives a reserve its pages when they are first written
    at: list[int] = field(default_factory=list)
    held: list[dict[str, int]] = field(default_factory=list)

    def note(self, unit: int) -> bool:
        """Reads memory where it is due. True when the time of the phase is used up."""
        if unit % self.every == 0:
            self.at.append(unit)
            self.held.append(memory(self.device))
        return time.perf_counter() > self.deadline

    def growth(self) -> dict[str, tuple[float, float, float]]:
        """By kind of memory: medians of the first and the last quarter of the samples, and growth per 1,000 units between."""
        count = len(self.at) // 4
        if not count:
            raise KVSparseError(
                f"only {len(self.at)} samples of memory were taken; give more seconds, steps or calls."
            )
        apart = statistics.fmean(self.at[-count:]) - statistics.fmean(self.at[:count])
        found = {}
        for name in self.held[0]:
            values = [sample[name] for sample in self.held]
            first, last = statistics.median(values[:count]), statistics.median(values[-count:])
            found[name] = (first, last, (last - first) / apart * 1000)
        return found


def memory(device: torch.device) -> dict[str, int]:
    """Bytes held by this process: see the names in `TOLERANCE`; those of the device only on CUDA, `rss` only on Linux."""
    held = {"host_registered": registered_bytes(), "host_mapped": mapped_bytes()}
    if device.type == "cuda":
        held["device_allocated"] = torch.cuda.memory_allocated(device)
        held["device_reserved"] = torch.cuda.memory_reserved(device)
        if hasattr(torch.cuda, "host_memory_stats"):
            held["torch_pinned"] = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)
    statm = Path("/proc/self/statm")
    if statm.exists():
        held["rss"] = int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return held


class _TimeIsUp(Exception):
    """Ends a `generate()` from inside its streamer."""


class _Watch:
    """A streamer that reads memory. The first call brings the prompt."""

    def __init__(self, curve: Curve):
        self.curve, self.tokens = curve, -1

    def put(self, tokens) -> None:
        self.tokens += 1
        if self.tokens > 0 and self.curve.note(self.tokens):
            raise _TimeIsUp

    def end(self) -> None:
        pass


class Soak:
    """One method under test on one model."""

    def __init__(self, model: PreTrainedModel, contender: Contender, plan: Plan):
        self.model, self.contender, self.plan = model, contender, plan

    def _cache(self, tokens: int) -> SparseCache:
        return load_preset(self.contender.preset, self.model, **{**self.contender.overrides, "reserve": tokens})

    def _generate(self, cache: SparseCache, prompt: int, tokens: int, **arguments) -> None:
        ids = torch.randint(3, self.model.config.vocab_size, (1, prompt), device=self.model.device)
        self.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=None, do_sample=False,
            eos_token_id=None, pad_token_id=0, **{compat.CACHE_ARGUMENT: cache}, **arguments,
        )  # fmt: skip

    def decode(self, deadline: float) -> Curve:
        """The long run. It begins with a short one, which compiles kernels."""
        plan = self.plan
        cache = self._cache(plan.steps + 1)
        self._generate(cache, plan.prompt, min(40, plan.steps), custom_generate=fast_decode)
        held = cache.report()
        cache.reset()
        curve = Curve(self.model.device, max(1, plan.steps // plan.samples), deadline)
        if self.model.device.type == "cpu":
            curve.slack = held.reserve_bytes + held.host_bytes
        try:
            self._generate(cache, plan.prompt, plan.steps, custom_generate=fast_decode, streamer=_Watch(curve))
        except _TimeIsUp:
            pass  # the curve ends here
        return curve

    def call(self, deadline: float) -> Curve:
        """Many short runs, after one round over the prompt lengths."""
        plan = self.plan
        lengths = [max(1, plan.prompt * part // 4) for part in (1, 3, 2, 4)]
        curve = Curve(self.model.device, max(1, plan.calls // plan.samples), deadline)
        kept = self._cache(plan.call_tokens)
        for number in range(-2 * len(lengths), plan.calls):
            cache = kept if number % 2 else self._cache(plan.call_tokens)
            self._generate(cache, lengths[number // 2 % len(lengths)], plan.call_tokens, disable_compile=True)
            del cache
            kept.reset()
            if number >= 0 and curve.note(number + 1):
                break
        return curve


def grown(curve: Curve) -> list[str]:
    """What lies above its tolerance at the end, in words."""
    found = []
    for name, (first, last, _) in curve.growth().items():
        if last - first > TOLERANCE[name] + (curve.slack if name == "rss" else 0):
            found.append(f"{name} grew by {last - first:.0f} bytes (from {first:.0f})")
    return found


@torch.no_grad()
def run(
    presets: Iterable[str] = PRESETS,
    plan: Plan | None = None,
    shape: str = "llama-4-layers",
    device: torch.device | str = "cuda",
    output: str | Path = "examples/results",
) -> list[dict]:
    """Appends rows of suite `soak`: per preset, phase and kind of memory the growth in bytes per 1,000 steps or calls, and in
    `shape` the medians of the first and the last quarter.

    Args:
        presets: `NAME` or `NAME:key=value,…`.
        shape: of the random model (`bench.models.SHAPES`).

    Raises:
        KVSparseError: something grew beyond `TOLERANCE`, once everything has run; or too little time to say so.
    """
    plan, device = plan or Plan(), torch.device(device)
    contenders = [Contender.parse(text) for text in presets]
    model = random_model(shape, device, choose_dtype("auto", device))
    results, faults = Results(output, "soak"), []
    begun, left = time.perf_counter(), 2 * len(contenders)
    for contender in contenders:
        for phase in ("decode", "call"):
            gc.collect()
            now = time.perf_counter()
            share = max(begun + plan.seconds - now, 0) / left
            left -= 1
            curve = getattr(Soak(model, contender, plan), phase)(now + share)
            _add(results, contender.label, phase, curve, {"model": shape, "batch": 1, "context": plan.prompt})
            faults += [f"{contender.label}, {phase}: {fault}" for fault in grown(curve)]
    if faults:
        raise KVSparseError("memory grows: " + "; ".join(faults) + ".")
    return results.rows


def _add(results: Results, label: str, phase: str, curve: Curve, where: dict) -> None:
    units, line = "calls" if phase == "call" else "steps", []
    for name, (first, last, growth) in curve.growth().items():
        facts = {**where, units: curve.at[-1], "first_quarter": first, "last_quarter": last}
        results.add(f"{label}/{phase}", f"{name}_growth", round(growth, 1), f"B/1000 {units}", facts, len(curve.at))
        line.append(f"{name} {last / 2**20:.1f} MiB ({(last - first) / 2**20:+.3f})")
    print(f"{label}, {curve.at[-1]} {units}: {', '.join(line)}", flush=True)
