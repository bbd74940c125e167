"""Pictures of what a cache decided: `cache.plot()` and `kvsparse inspect`."""

from . import page, plot
from .decisions import Decisions, Recorder

__all__ = ["Decisions", "Recorder", "page", "plot"]
