"""Learns on the host, without stopping the device, when all rows have ended and which tokens were chosen."""

from collections import deque

import torch
from torch import Tensor


class Watch:
    """Copies the step's flags to pinned memory and reads them `lag` steps later.

    Args:
        lag: steps the host may run ahead. 0 waits for every step.
        device: where the step runs; on a CPU nothing is asynchronous and the lag is 0.
        batch: rows.
    """

    def __init__(self, lag: int, device: torch.device, batch: int):
        self.cuda = device.type == "cuda"
        self.lag = lag if self.cuda else 0
        pin = self.cuda
        self._slots = deque(
            (torch.zeros(1, dtype=torch.bool, pin_memory=pin), torch.zeros(batch, dtype=torch.int64, pin_memory=pin),
             torch.cuda.Event() if pin else None)
            for _ in range(self.lag + 1)
        )
        self._waiting: deque = deque()

    def post(self, done: Tensor, token: Tensor) -> None:
        """Notes the flags of the step that was just launched. `token` is `[B]`."""
        flag, tokens, event = self._slots[0]
        self._slots.rotate(-1)
        flag.copy_(done, non_blocking=True)
        tokens.copy_(token, non_blocking=True)
        if event is not None:
            event.record()
        self._waiting.append((flag, tokens, event))

    def ready(self, drain: bool = False):
        """Yields `(done, tokens)` of the steps that are `lag` behind; of all of them when draining."""
        while len(self._waiting) > (0 if drain else self.lag):
            flag, tokens, event = self._waiting.popleft()
            if event is not None:
                event.synchronize()
            yield bool(flag), tokens.clone()
