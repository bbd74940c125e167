"""What a calibration has found so far, in files that survive an interruption."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor


class RunningSums:
    """Named sums of tensors over samples, kept in a file beside the plan until the plan is written.

    A file that another setting (or model) has left is ignored and overwritten.

    Attributes:
        sums: by name, fp64.
        done: samples that are in them.
    """

    def __init__(self, plan: str | Path, settings: dict[str, Any]):
        plan = Path(plan)
        self.path = plan.with_name(plan.name + ".partial")
        self.settings = json.loads(json.dumps(settings))
        self.sums: dict[str, Tensor] = {}
        self.done = 0
        try:
            with safe_open(self.path, "pt") as file:
                head = json.loads(file.metadata()["kvsparse"])
                if head["settings"] == self.settings:
                    self.sums = {name: file.get_tensor(name) for name in file.keys()}
                    self.done = head["done"]
        except (OSError, SafetensorError, KeyError, TypeError, ValueError):
            pass  # nothing usable was left

    def remaining(self, samples: int) -> Iterator[int]:
        """Numbers of the samples that are still to be added, in order."""
        yield from range(self.done, samples)

    def add(self, found: dict[str, Tensor]) -> None:
        """Adds one sample and writes the file."""
        for name, tensor in found.items():
            tensor = tensor.detach().double().cpu()
            self.sums[name] = self.sums[name] + tensor if name in self.sums else tensor
        self.done += 1
        self.path.parent.mkdir(parents=True, exist_ok=True)
        scratch = self.path.with_name(self.path.name + ".new")
        head = {"settings": self.settings, "done": self.done}
        save_file({name: tensor.contiguous() for name, tensor in self.sums.items()}, scratch, {"kvsparse": json.dumps(head)})
        scratch.replace(self.path)

    def finish(self) -> None:
        """The plan is written: the file has served."""
        self.path.unlink(missing_ok=True)


class RunningRecords:
    """A list of findings that grows one by one, kept in a file beside the plan until the plan is written.

    A file that another setting (or model) has left is ignored and overwritten.

    Attributes:
        items: JSON objects, in the order in which they were found.
    """

    def __init__(self, plan: str | Path, settings: dict[str, Any]):
        plan = Path(plan)
        self.path = plan.with_name(plan.name + ".partial")
        self.settings = json.loads(json.dumps(settings))
        self.items: list[dict[str, Any]] = []
        try:
            left = json.loads(self.path.read_text(encoding="utf-8"))
            if left["settings"] == self.settings:
                self.items = list(left["items"])
        except (OSError, UnicodeDecodeError, KeyError, TypeError, ValueError):
            pass  # nothing usable was left

    def add(self, item: dict[str, Any]) -> None:
        """Adds one finding and writes the file."""
        self.items.append(item)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        scratch = self.path.with_name(self.path.name + ".new")
        scratch.write_text(json.dumps({"settings": self.settings, "items": self.items}), encoding="utf-8")
        scratch.replace(self.path)

    def finish(self) -> None:
        """The plan is written: the file has served."""
        self.path.unlink(missing_ok=True)


def by_layer(found: dict[int, Tensor], layers: int) -> Tensor:
    """`[L, …]` with zeros for the layers that gave nothing."""
    like = next(iter(found.values()))
    return torch.stack([found.get(layer, torch.zeros_like(like)) for layer in range(layers)])


def text_mark(windows: Iterable[Tensor]) -> int:
    """A number that other texts would hardly have."""
    return sum(int((window.flatten().cpu().long() * (torch.arange(window.numel()) % 97 + 1)).sum()) for window in windows)
