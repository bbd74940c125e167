"""Timing GPU work, and writing what was measured.

Launches are captured into one CUDA graph and its replays are timed with events, so host overhead stays out. The
captured launches walk over several copies of their inputs, so that none finds its data in the L2 cache.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import pathlib
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

L2_BYTES = 60 << 20
COLD_BYTES = 4 * L2_BYTES
COLD_COPIES = 16


@dataclass(frozen=True)
class Timing:
    """Median time of one launch over ``n`` replays, and the standard error of the mean of the replays."""

    us: float
    n: int
    se: float

    def bandwidth(self, nbytes: float) -> float:
        """TB/s for a launch that moves ``nbytes``."""
        return nbytes / self.us * 1e-6


def cold_copies(nbytes: int, budget: float = 60e9) -> int:
    """Copies of an input of ``nbytes`` that a cold measurement walks over: at least 16 and 4 x L2, within a budget."""
    if nbytes >= COLD_BYTES:
        wanted = 2  # every launch flushes the cache by itself
    else:
        wanted = max(COLD_COPIES, -(-COLD_BYTES // max(1, nbytes)))
    return max(1, min(wanted, 256, int(budget // max(1, nbytes))))


def time_graph(launches: Sequence[Callable[[], object]], replays: int = 20, target_ms: float = 2.0) -> Timing:
    """Time launches (all the same work on different data) as replays of one captured graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for launch in launches[:2]:
            launch()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [launch() for launch in launches]  # outputs must not share memory inside the graph
    graph.replay()
    first = _elapsed_ms(graph, 1)
    loops = max(1, min(50, round(target_ms / max(first, 1e-3))))
    times = [_elapsed_ms(graph, loops) * 1e3 / (loops * len(launches)) for _ in range(replays)]
    del kept
    error = statistics.stdev(times) / len(times) ** 0.5 if len(times) > 1 else 0.0
    return Timing(statistics.median(times), len(times), error)


def _elapsed_ms(graph: torch.cuda.CUDAGraph, loops: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(loops):
        graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def _commit() -> str | None:
    try:
        git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    except OSError:
        return None
    return git.stdout.strip() or None


def environment() -> dict:
    """GPU, versions, commit (KVSPARSE_COMMIT where there is no repository), command and date of a measurement."""
    versions = {"python": sys.version.split()[0], "torch": torch.__version__, "cuda": torch.version.cuda}
    for name in ("triton", "transformers"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "versions": versions,
        "commit": os.environ.get("KVSPARSE_COMMIT") or _commit(),
        "command": _command(),
        "date": datetime.date.today().isoformat(),
    }


def _command() -> str:
    program, *arguments = map(_without_folder, sys.argv)
    start = ["kvsparse"] if program in ("kvsparse", "__main__.py") else ["python", program]
    return " ".join([*start, *arguments])


def _without_folder(argument: str) -> str:
    """A path from outside of here as its name alone: where a machine keeps its files says nothing."""
    path = pathlib.Path(argument)
    return path.name if path.is_absolute() or ".." in path.parts else argument


class Results:
    """Appends rows to ``<output>/<suite>.jsonl``, one JSON object a line, and keeps them."""

    def __init__(self, output: str | pathlib.Path, suite: str):
        self.path = pathlib.Path(output) / f"{suite}.jsonl"
        self.suite = suite
        self.rows: list[dict] = []
        self._environment = environment()

    def add(self, case: str, metric: str, value: float, unit: str, shape: dict, n: int | None = None,
            se: float | None = None) -> None:
        row = {"suite": self.suite, "case": case, "metric": metric, "value": value, "unit": unit, "n": n, "se": se,
               "shape": shape, **self._environment}
        self.rows.append(row)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def newest(self, metric: str) -> list[dict]:
        """The last row of every case and shape in the file, in the order in which they first came."""
        found: dict[tuple, dict] = {}
        for line in self.path.read_text().splitlines():
            row = json.loads(line)
            if row["metric"] == metric:
                found[row["case"], json.dumps(row["shape"], sort_keys=True)] = row
        return list(found.values())

    def add_timing(self, case: str, timing: Timing, nbytes: float, shape: dict) -> None:
        """The rows "us" and, if the launch is known to move ``nbytes``, "TB_per_s"."""
        self.add(case, "us", round(timing.us, 3), "us", shape, timing.n, round(timing.se, 4))
        if nbytes:
            self.add(case, "TB_per_s", round(timing.bandwidth(nbytes), 4), "TB/s", shape, timing.n)
