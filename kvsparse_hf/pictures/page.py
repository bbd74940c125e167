"""One HTML page, with nothing to load from elsewhere: the heat map, and the text coloured by it."""

from __future__ import annotations

import base64
import html
import json
from pathlib import Path
from string import Template

import torch
from torch import Tensor

from .decisions import Decisions
from .plot import COLOURS

_PAGE = Path(__file__).with_name("page.html")


def render(decisions: Decisions) -> str:
    """The page as text. Layers can be chosen one by one or all together; the text shows the chosen ones."""
    data = {
        "layers": decisions.layers,
        "places": {name: _bytes(share) for name, share in decisions.places.items()},
        "colours": {name: COLOURS[name] for name in decisions.places},
        "read": None if decisions.read is None else _bytes(decisions.read),
        "held": decisions.held.tolist(),
        "hits": decisions.hits,
        "tokens": decisions.tokens,
        "count": decisions.kept.shape[1],
    }
    # Inside a script element nothing may look like its end.
    text = json.dumps(data, ensure_ascii=False).replace("<", "\\u003c")
    return Template(_PAGE.read_text(encoding="utf-8")).substitute(method=html.escape(decisions.method), data=text)


def save(decisions: Decisions, path: str | Path) -> None:
    """Writes the page."""
    Path(path).write_text(render(decisions), encoding="utf-8")


def _bytes(share: Tensor) -> str:
    """`[L, N]` shares as one byte each, row after row."""
    return base64.b64encode((share.clamp(0, 1) * 255).round().to(torch.uint8).numpy().tobytes()).decode("ascii")
