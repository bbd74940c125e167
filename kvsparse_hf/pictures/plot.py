"""A figure of what a cache decided, with matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import KVSparseError
from .decisions import Decisions

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# One colour a place, from a palette that readers with colour blindness can tell apart; evicted tokens stay white.
COLOURS = {"device": "#0072b2", "host": "#e69f00", "quantized": "#009e73"}
DPI = 130
WIDEST = 1600  # columns of a heat map; longer texts are averaged down to them


def draw(decisions: Decisions) -> Figure:
    """Heat maps over layers and tokens (where each token is; what steps read), entries per head, hits per step.

    Raises:
        KVSparseError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise KVSparseError("pictures need matplotlib: pip install matplotlib.") from error
    maps = 1 + (decisions.read is not None)
    below = 1 + any(h or m for h, m in decisions.hits)
    figure = Figure(figsize=(11, 2.4 * maps + 2.6), layout="constrained")
    grid = figure.add_gridspec(maps + 1, below, height_ratios=[1] * maps + [1])
    _places(figure.add_subplot(grid[0, :]), decisions)
    if decisions.read is not None:
        _reads(figure.add_subplot(grid[1, :]), decisions)
    _heads(figure.add_subplot(grid[maps, 0]), decisions)
    if below > 1:
        _hits(figure.add_subplot(grid[maps, 1]), decisions)
    return figure


def save(decisions: Decisions, path: str | Path) -> None:
    """Writes the figure; the ending of `path` names the format (.png, .svg, .pdf)."""
    draw(decisions).savefig(path, dpi=DPI)


def mixed(decisions: Decisions) -> Tensor:
    """`[L, N, 3]` colours in 0 … 1: white for evicted tokens, a place's colour by the share of heads that hold them there."""
    image = torch.ones(*next(iter(decisions.places.values())).shape, 3)
    for place, share in decisions.places.items():
        colour = torch.tensor([int(COLOURS[place][i : i + 2], 16) / 255 for i in (1, 3, 5)])
        image -= share.unsqueeze(-1) * (1 - colour)
    return image.clamp(0, 1)


def _narrow(values: Tensor) -> Tensor:
    """`[L, N, …]` averaged to at most `WIDEST` columns."""
    columns = values.shape[1]
    if columns <= WIDEST:
        return values
    edges = torch.linspace(0, columns, WIDEST + 1).long()
    return torch.stack([values[:, a:b].mean(1) for a, b in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)], dim=1)


def _layers_and_tokens(axes, decisions: Decisions) -> dict:
    layers, tokens = len(decisions.layers), decisions.kept.shape[1]
    axes.set(xlabel="token", ylabel="layer")
    step = max(1, layers // 8)
    axes.set_yticks([i + 0.5 for i in range(0, layers, step)], [decisions.layers[i] for i in range(0, layers, step)])
    return dict(aspect="auto", interpolation="nearest", extent=(0, tokens, layers, 0))


def _places(axes, decisions: Decisions) -> None:
    from matplotlib.patches import Patch

    axes.imshow(_narrow(mixed(decisions)).numpy(), **_layers_and_tokens(axes, decisions))
    shares = {place: float(share.mean()) for place, share in decisions.places.items()}
    evicted = 1 - float(decisions.kept.mean())
    patches = [Patch(color=COLOURS[place], label=f"{place} {share:.1%}") for place, share in shares.items()]
    patches.append(Patch(facecolor="white", edgecolor="grey", label=f"evicted {evicted:.1%}"))
    axes.legend(handles=patches, loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8)
    axes.set_title(f"{decisions.method}: where each token is (shade: share of the layer's key/value heads)", fontsize=10)


def _reads(axes, decisions: Decisions) -> None:
    image = axes.imshow(_narrow(decisions.read).numpy(), cmap="magma_r", vmin=0, vmax=1, **_layers_and_tokens(axes, decisions))
    axes.figure.colorbar(image, ax=axes, fraction=0.02, pad=0.01)
    axes.set_title("share of decode steps and heads that read it", fontsize=10)


def _heads(axes, decisions: Decisions) -> None:
    held = decisions.held.float()
    heads = held.shape[1]
    width = 0.8 / heads
    for head in range(heads):
        where = [layer + (head - (heads - 1) / 2) * width for layer in range(len(decisions.layers))]
        axes.bar(where, held[:, head].tolist(), width=width, label=f"head {head}")
    step = max(1, len(decisions.layers) // 12)
    axes.set_xticks(range(0, len(decisions.layers), step), decisions.layers[::step])
    axes.set(xlabel="layer", ylabel="entries", title="entries held per key/value head")
    axes.title.set_fontsize(10)
    if heads <= 8:
        axes.legend(fontsize=7, ncols=2)


def _hits(axes, decisions: Decisions) -> None:
    rates = [100 * hits / max(hits + misses, 1) for hits, misses in decisions.hits]
    axes.plot(range(1, len(rates) + 1), rates, lw=1)
    axes.set(xlabel="decode step", ylabel="hits, %", ylim=(0, 102), title="pages found on the device")
    axes.title.set_fontsize(10)
