"""Time and peak memory of reading a prompt, next to Transformers' DynamicCache."""

import gc
import statistics
from collections.abc import Iterable
from pathlib import Path

import torch

from ..errors import KVSparseError
from ..hf import compat
from .decode import Case, make_cache
from .models import random_model
from .timing import Results


@torch.no_grad()
def run(
    systems: Iterable[str],
    contexts: Iterable[int],
    shape: str = "llama-3.1-8b",
    budget: int = 2048,
    output: str | Path = "examples/results",
    repeats: int = 3,
) -> list[dict]:
    """Appends rows of suite `prefill`: metrics `ms` (median of `repeats`) and `peak_bytes` (above the weights).

    Args:
        systems: methods of this library, or "transformers-dynamic".
        contexts: prompt lengths.
        shape: of the random model; budget: per key/value head.
    """
    model = random_model(shape)
    results = Results(output, "prefill")
    weights = torch.cuda.memory_allocated()
    for context in contexts:
        ids = torch.randint(3, 1000, (1, context), device=model.device)
        for system in systems:
            case = Case(system, "prefill", 1, context, budget)
            times = []
            for _ in range(repeats + 1):
                cache = None
                gc.collect()
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
                cache = make_cache(case, model, 1)
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                logits = model(ids, **{compat.CACHE_ARGUMENT: cache}, logits_to_keep=1).logits
                end.record()
                end.synchronize()
                if not bool(logits.isfinite().all()):
                    raise KVSparseError(f"{system}: logits are not finite.")
                times.append(begin.elapsed_time(end))
            where = {"model": shape, "batch": 1, "context": context, "budget": budget}
            times = times[1:]  # the first run compiles kernels
            results.add(f"{system}/prefill", "ms", round(statistics.median(times), 2), "ms", where, len(times))
            peak = torch.cuda.max_memory_allocated() - weights
            results.add(f"{system}/prefill", "peak_bytes", peak, "B", where)
            print(f"{system:<24} {context:>7} tokens  {statistics.median(times):10.1f} ms  peak {peak / 2**30:.2f} GiB", flush=True)
    return results.rows
