"""The processes of `accelerate launch`. Each asks its share of the batches; all write into one output folder."""

import datetime
import os
from dataclasses import dataclass
from typing import Any

import torch

# The processes wait for the slowest at the end of each run, far longer than a collective usually may.
_PATIENCE = datetime.timedelta(days=7)


@dataclass(frozen=True)
class World:
    """Attributes:
    rank, size: this process and how many there are.
    """

    rank: int = 0
    size: int = 1
    state: Any = None

    @classmethod
    def current(cls, device: str) -> "World":
        """The world that `accelerate launch` (or torchrun) has set up; else this process alone.

        Args:
            device: as on the command line; "auto" is CUDA where there is any.
        """
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return cls()
        from accelerate import PartialState

        on_cpu = device == "cpu" or (device == "auto" and not torch.cuda.is_available())
        state = PartialState(cpu=on_cpu, timeout=_PATIENCE)
        return cls(state.process_index, state.num_processes, state)

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
    def device(self) -> torch.device | None:
        """The device that is this process's own, if there are several."""
        return None if self.state is None else self.state.device

    def wait(self) -> None:
        """Until all processes are here."""
        if self.state is not None:
            self.state.wait_for_everyone()
