"""Decode steps of a model whose heads are divided among GPUs of one host (tensor parallelism), next to Transformers' own caches."""

import os
import socket
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as processes

from ..errors import KVSparseError
from ..hf import compat
from . import decode
from .models import shared_model
from .timing import Results


def run(cases: Sequence[decode.Case], gpus: int, shape: str, output: str | Path, case_s: float = 0) -> None:
    """Starts one process a GPU (or, without CUDA, so many on the CPU), and appends rows of suite `multi_gpu`. Bytes are those of
    one rank.

    Args:
        gpus: ranks, 2 or more; the key/value heads must divide among them.
        case_s: see `decode.run`.

    Raises:
        KVSparseError: fewer GPUs, the check before the timing failed, or a case did on any rank (others may then wait for it in
            a collective, so that none goes on); the rows of the cases before it are written.
    """
    if torch.cuda.is_available() and torch.cuda.device_count() < gpus:
        raise KVSparseError(f"{gpus} GPUs are wanted, {torch.cuda.device_count()} are here.")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    try:
        processes.spawn(_rank, (gpus, port, list(cases), shape, str(output), case_s), nprocs=gpus)
    except processes.ProcessRaisedException as error:
        raise KVSparseError(f"a rank failed: {str(error).strip().splitlines()[-1]}") from error


def _rank(rank: int, size: int, port: int, cases: list[decode.Case], shape: str, output: str, case_s: float) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if cuda else "gloo")
    try:
        _measure(rank, size, cases, shape, output, case_s)
    finally:
        dist.destroy_process_group()


def _measure(rank: int, size: int, cases: list[decode.Case], shape: str, output: str, case_s: float) -> None:
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    off = difference(shared_model(shape, dtype, layers=4))  # as `decode.check`: over all layers bf16 itself strays by 5 %
    if not off < 2e-2:
        raise KVSparseError(f"decode logits differ by {off:.3g} from those of Transformers' cache; nothing was timed.")
    model = shared_model(shape, dtype)
    bench, results = decode.Bench(model), Results(output, "multi_gpu") if rank == 0 else None
    for case in cases:
        torch.manual_seed(0)  # every rank draws the same tokens
        dist.barrier()
        with decode.at_most(case_s):
            figures = bench.run(case)
        if results is not None:
            decode.add_rows(results, case, figures, {"model": shape, "gpus": size})
            print(f"{case.name:<34} {size} ranks  B={case.batch:<3} {case.context:>7}  {figures['ms']:8.3f} ms", flush=True)


@torch.no_grad()
def difference(model, tokens: int = 300) -> float:
    """Relative difference, in norm, of the logits of a decoded token with `FullCache` and with `DynamicCache`."""
    torch.manual_seed(1)
    ids = torch.randint(3, min(1000, model.config.vocab_size), (1, tokens + 1), device=model.device)
    logits = []
    for system in ("full", "transformers-dynamic"):
        cache = decode.make_cache(decode.Case(system, "eager", 1, tokens), model, 1)
        model(ids[:, :-1], **{compat.CACHE_ARGUMENT: cache})
        logits.append(model(ids[:, -1:], **{compat.CACHE_ARGUMENT: cache}).logits.double())
    ours, theirs = logits
    return float((ours - theirs).norm() / theirs.norm())
