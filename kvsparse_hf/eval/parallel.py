"""The processes of `accelerate launch` or `torchrun`: each asks its share of the batches, or, where the heads of one model are
divided among them, all ask every batch together. They share one output folder."""

import datetime
import gc
import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ..errors import KVSparseError

# The processes wait for the slowest at the end of each run, far longer than a collective usually may.
_PATIENCE = datetime.timedelta(days=7)


@dataclass(frozen=True)
class World:
    """Attributes:
    rank, size: this process and how many there are.
    device: the device that is this process's own, if there are several.
    tensor_parallel: whether one model is divided among the processes; else each has a whole one.
    own_group: whether the processes' group was started here, and ends here.
    """

    rank: int = 0
    size: int = 1
    device: torch.device | None = None
    tensor_parallel: bool = False
    own_group: bool = False
    state: Any = None

    @classmethod
    def current(cls, device: str, tensor_parallel: bool = False) -> "World":
        """The world that `accelerate launch` (or torchrun) has set up; else this process alone.

        Args:
            device: as on the command line; "auto" is CUDA where there is any.
            tensor_parallel: divide one model among the processes.

        Raises:
            KVSparseError: there is nothing to divide a model among, or another device than Transformers would take.
        """
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if tensor_parallel:
            own = _own_device(device, size)
            own_group = _start(own)
            return cls(dist.get_rank(), dist.get_world_size(), own, tensor_parallel, own_group)
        if size == 1:
            return cls()
        from accelerate import PartialState

        on_cpu = device == "cpu" or (device == "auto" and not torch.cuda.is_available())
        state = PartialState(cpu=on_cpu, timeout=_PATIENCE)
        return cls(state.process_index, state.num_processes, state.device, state=state)

    def note(self) -> str | None:
        """What to say where `accelerate launch` was asked for several processes and started one: so it does on a CPU."""
        asked = (
            "ACCELERATE_MIXED_PRECISION" in os.environ
            and "MASTER_PORT" in os.environ
            and "WORLD_SIZE" not in os.environ
        )
        if not asked:
            return None
        return (
            "accelerate has started one process only, as it does with --cpu; on a CPU, use accelerate launch --multi_gpu "
            "--num_processes N, or torchrun --nproc-per-node N."
        )

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def writes(self) -> bool:
        """Whether this process keeps its answers: those of a divided model are the same in all processes."""
        return self.is_main or not self.tensor_parallel

    @property
    def workers(self) -> int:
        """How many processes share the batches."""
        return 1 if self.tensor_parallel else self.size

    @property
    def worker(self) -> int:
        """Which of them this one is."""
        return 0 if self.tensor_parallel else self.rank

    def wait(self) -> None:
        """Until all processes are here."""
        if self.state is not None:
            self.state.wait_for_everyone()
        elif self.tensor_parallel:
            dist.barrier()

    def agree(self, facts: Iterable[str], what: str) -> None:
        """Until all processes that share a model are here, and found the same facts; else they would wait for each other in
        different batches.

        Raises:
            KVSparseError: in every process, "they differ in `what`".
        """
        if not self.tensor_parallel:
            return
        digests: list[Any] = [None] * self.size
        dist.all_gather_object(digests, hashlib.sha256("\n".join(facts).encode()).hexdigest())
        if len(set(digests)) > 1:
            raise KVSparseError(f"the processes of --tensor-parallel differ in {what}.")

    def close(self) -> None:
        """Ends the group that was started here, when all processes have come so far. Not after an error: a process that fails
        does not wait for the others, which torchrun ends."""
        if self.own_group:
            dist.barrier()
            gc.collect()  # NCCL does not end while there is a CUDA graph that recorded its calls
            dist.destroy_process_group()


def _own_device(device: str, size: int) -> torch.device:
    """The device that Transformers gives this process of torchrun: the GPU of its number, the CPU where there is none."""
    if size == 1:
        raise KVSparseError(
            "--tensor-parallel divides a model among the processes of torchrun, and there is one: torchrun --nproc-per-node N "
            "-m kvsparse_hf.cli eval ... --tensor-parallel."
        )
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    if device not in ("auto", kind):
        here = "its own GPU (CUDA_VISIBLE_DEVICES= hides them all)" if kind == "cuda" else "the CPU, as there is no GPU"
        raise KVSparseError(
            f"--device {device} contradicts --tensor-parallel, under which each process takes {here}; leave it out."
        )
    if kind == "cpu":
        return torch.device(kind)
    number, gpus = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if number >= gpus:
        raise KVSparseError(f"--tensor-parallel: there are more processes than GPUs ({gpus}) on this machine.")
    return torch.device(kind, number)


def _start(own: torch.device) -> bool:
    """Starts the process group, if there is none, before the model is loaded: that of Transformers would be less patient.

    Returns:
        Whether there was none.
    """
    cuda = own.type == "cuda"
    if cuda:
        torch.cuda.set_device(own)
    if dist.is_initialized():
        return False
    dist.init_process_group("nccl" if cuda else "gloo", timeout=_PATIENCE, device_id=own if cuda else None)
    return True
