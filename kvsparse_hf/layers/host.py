"""Keys and values in host memory that the device's kernels read and write in place."""

import contextlib
import gc
import math
import mmap
import os
import sys
import warnings
from pathlib import Path

import torch
from torch import Tensor

from ..errors import BudgetError, OptionError
from ..policy.budgets import Budget

_MOST = 0.9  # of the available memory: the rest of the process needs some too
_PORTABLE = 1  # cudaHostRegisterPortable: registered for every device, not only the current one

# A mapping of its own for each tensor, shared with no other process. (Windows knows no flags.)
_FLAGS = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_ANONYMOUS") else {}

_live: dict[int, tuple[int, bool]] = {}  # address -> bytes, registered; of every region of this process
_warned = False


def registered_bytes() -> int:
    """Bytes of host memory that this process holds registered with CUDA for caches."""
    return sum(nbytes for nbytes, registered in list(_live.values()) if registered)


def mapped_bytes() -> int:
    """Bytes of host memory that caches of this process hold, registered or not."""
    return sum(nbytes for nbytes, _ in list(_live.values()))


def parse_bytes(value: int | str | None, name: str) -> int | None:
    """A size the user wrote, such as `"8GiB"`, in bytes; an int is bytes already, None stays None.

    Raises:
        OptionError: for anything else.
    """
    if value is None:
        return None
    if isinstance(value, str):
        try:
            return Budget.parse(value).nbytes
        except BudgetError:
            pass
    elif isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    raise OptionError(f"{name}={value!r} is no size; give a text such as '8GiB', or bytes as an int >= 1.")


def available_bytes() -> int:
    """Memory that new allocations can get without swapping, within the limit of the process's control group."""
    free = [_cgroup_room()]
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free.append(next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")))
    except (OSError, StopIteration):
        if hasattr(os, "sysconf") and "SC_AVPHYS_PAGES" in os.sysconf_names:
            free.append(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return min((room for room in free if room is not None), default=2**62)


def _cgroup_room() -> int | None:
    root = Path("/sys/fs/cgroup")
    try:
        limit = (root / "memory.max").read_text().strip()
        if limit == "max":
            return None
        stat = dict(line.split() for line in (root / "memory.stat").read_text().splitlines())
        used = int((root / "memory.current").read_text()) - int(stat["inactive_file"])  # what it can drop is no use
        return max(int(limit) - used, 0)
    except (OSError, KeyError, ValueError):
        return None  # no control group, or an older kind


class HostMemory:
    """Host memory of one cache: bounded, of exactly the size asked for, zeroed, and given back when its tensors die.

    With CUDA a tensor's pages are locked and registered, and what `zeros` returns is a tensor *of the device* whose memory
    is on the host: kernels and torch ops of that device take it as any other, at the speed of the link. Where registering
    is refused (a limit on locked memory, no rights), one warning says so, `pinned` turns False and `zeros` returns ordinary
    CPU tensors. Without CUDA these are ordinary CPU tensors from the start.

    The usual `pin_memory` would round the size up to a power of two.

    Args:
        limit: bytes that all tensors of this cache together may take; None: only the machine limits.

    Attributes:
        pinned: the device reads the tensors in place.
    """

    def __init__(self, limit: int | None = None):
        self.limit = limit
        self.pinned = True
        self._mine: set[int] = set()

    def __deepcopy__(self, memo: dict) -> "HostMemory":
        return memo.setdefault(id(self), HostMemory(self.limit))

    @property
    def held(self) -> int:
        """Bytes of the tensors that are alive."""
        self._mine.intersection_update(list(_live))
        return sum(_live[address][0] for address in self._mine)

    def require(self, nbytes: int, what: str = "offloaded keys and values") -> None:
        """Checks that so many further bytes may be had.

        Raises:
            BudgetError: more than the limit, or than 90 % of what the machine has available.
        """
        available = int(_MOST * available_bytes())
        if nbytes > available:
            gc.collect()  # a dropped cache is a cycle, which may still hold its memory
            available = int(_MOST * available_bytes())
        if self.limit is not None and self.held + nbytes > self.limit:
            raise BudgetError(
                f"{what} need {nbytes} bytes of host memory beside {self.held} held, host_bytes allows {self.limit}: raise "
                "host_bytes, or shorten the prompt, the batch or reserve."
            )
        if nbytes > available:
            raise BudgetError(
                f"{what} need {nbytes} bytes of host memory, the machine has {available} to give (90 % of what is available): "
                "shorten the prompt, the batch or reserve, or use a method that evicts."
            )

    def zeros(self, *shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A zeroed tensor in host memory, of the device type that kernels of `device` need (see above).

        Raises:
            BudgetError: see `require`. Nothing is allocated then.
        """
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes == 0:
            return torch.zeros(shape, dtype=dtype, device=device)
        self.require(nbytes)
        region = _Region.of(nbytes)
        device = torch.device(device)
        on_device = device.type == "cuda" and region.register(device)
        self._mine.add(region.address)
        with torch.inference_mode(False):
            if on_device:
                flat = torch.as_tensor(region, device=device)
            else:
                flat = torch.frombuffer(region, dtype=torch.uint8)
            tensor = flat.view(dtype).view(shape)
        self.pinned &= on_device or device.type != "cuda"
        if not torch.compiler.is_compiling():
            torch._dynamo.mark_static_address(tensor)
        return tensor

    def like(self, tensor: Tensor, device: torch.device) -> Tensor:
        """A copy of a host tensor, with memory of its own."""
        return self.zeros(*tensor.shape, dtype=tensor.dtype, device=device).copy_(tensor)


class _Region(mmap.mmap):
    """Whole pages of their own: two registrations may not share one. Tensors on it keep it alive; it dies with them."""

    nbytes: int
    address: int
    device: torch.device | None

    @classmethod
    def of(cls, nbytes: int) -> "_Region":
        region = cls(-1, nbytes, **_FLAGS)
        region.nbytes, region.device = nbytes, None
        region.address = torch.frombuffer(region, dtype=torch.uint8).data_ptr()
        _live[region.address] = (nbytes, False)
        return region

    @property
    def __cuda_array_interface__(self) -> dict:
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": (self.address, False), "version": 3}

    def register(self, device: torch.device) -> bool:
        """Locks the pages and shows them to the devices; False, after one warning, where the driver refuses."""
        for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):  # fewer pages to lock; a fork must not move them
            if hasattr(mmap, advice):
                with contextlib.suppress(OSError):  # a kernel without it
                    self.madvise(getattr(mmap, advice))
        with torch.cuda.device(device):
            code = int(torch.cuda.cudart().cudaHostRegister(self.address, self.nbytes, _PORTABLE))
        if code == 0:
            self.device = device
            _live[self.address] = (self.nbytes, True)
            return True
        with contextlib.suppress(RuntimeError, AssertionError):
            torch.zeros(1, device=device)  # CUDA reports the refusal once more, at the next launch: let it be this one
        _warn_unpinned(self.nbytes, code)
        return False

    def __del__(self):
        if sys.is_finalizing() or getattr(self, "address", None) is None:
            return
        _live.pop(self.address, None)
        if self.device is not None:
            torch.cuda.synchronize(self.device)  # kernels may still be reading
            torch.cuda.cudart().cudaHostUnregister(self.address)


def _warn_unpinned(nbytes: int, code: int) -> None:
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            f"CUDA refused to register {nbytes} bytes of host memory (error {code}; see `ulimit -l`): offloaded keys and values "
            "are staged through ordinary copies, which is slow, and decode steps are not compiled.",
            stacklevel=5,
        )
