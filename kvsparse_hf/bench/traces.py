"""Which pages a real model reads from step to step, recorded, and played back in a model of another shape.

Random weights have no locality: their choices are those of noise. So the hit rate of a hot buffer is taken from a real model.
`record` lets a small one read a text with `QuestCache` and notes, for every step and layer, the pages that each key/value
head chose. `Trace.for_shape` maps them onto a larger shape: layers and heads go round, so that no two of a row read alike, rows
take the recorded texts in turn, with other heads and layers each time round, and a page of the prompt stands for as many pages as the
budget is larger. Pages that were written while decoding stand for themselves, since either model writes one token a step; a
list is so much shorter than the budget, for every system alike, as results say (`listed`).
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..errors import KVSparseError
from ..hf import compat
from ..layers.selectors.base import Selection
from ..layers.selectors.pages import PageSelector
from ..methods.quest import QuestCache


@dataclass(frozen=True)
class Trace:
    """Chosen pages.

    Attributes:
        pages: `[L, R, T, H, K]` int32 of L layers, R texts, T steps, H key/value heads; -1 behind the last.
        context: tokens of each prompt, whole pages; page_size, budget: of the selection.
        source: the model, for the record.
    """

    pages: Tensor
    context: int
    page_size: int
    budget: int
    source: str

    def save(self, path: str | Path) -> None:
        facts = {name: str(getattr(self, name)) for name in ("context", "page_size", "budget", "source")}
        small = torch.int16 if int(self.pages.max()) < 2**15 else torch.int32
        save_file({"pages": self.pages.to(small).contiguous()}, str(path), facts)

    @classmethod
    def load(cls, path: str | Path) -> "Trace":
        """Reads a saved trace.

        Raises:
            KVSparseError: no readable trace.
        """
        try:
            with safe_open(str(path), "pt") as file:
                facts = file.metadata()
                numbers = {name: int(facts[name]) for name in ("context", "page_size", "budget")}
                return cls(file.get_tensor("pages").int(), **numbers, source=facts["source"])
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            raise KVSparseError(f"{path} is no recorded trace: {error}") from error

    @classmethod
    def random(cls, context: int, page_size: int, budget: int, steps: int, heads: int = 8, layers: int = 4, seed: int = 0) -> "Trace":
        """Choices without any locality, the worst case: other pages at every step, besides the first and the newest one."""
        generator = torch.Generator().manual_seed(seed)
        total, listed = context // page_size, budget // page_size
        noise = torch.rand(layers, 1, steps, heads, total - 1, generator=generator)
        middle = noise.topk(max(listed - 2, 0), dim=-1).indices + 1
        newest = (total + torch.arange(steps) // page_size).view(1, 1, -1, 1, 1)
        shape = (*middle.shape[:-1], 1)
        pages = torch.cat((torch.zeros(shape), middle, newest.expand(shape)), dim=-1)[..., :listed]
        return cls(pages.sort(-1).values.int(), context, page_size, budget, "random choices")

    @property
    def steps(self) -> int:
        return self.pages.shape[2]

    def for_shape(self, context: int, budget: int) -> Tensor:
        """`[L, R, T, H, K']` the pages as a selection of `budget` tokens from prompts of `context` tokens lists them."""
        if budget % self.budget or context % self.page_size:
            raise KVSparseError(f"a trace of budget {self.budget} does not divide budget {budget}, or its pages {context} tokens.")
        times = budget // self.budget
        mine, theirs = self.context // self.page_size, context // self.page_size
        if times * mine > theirs:
            raise KVSparseError(f"a trace of {self.context} tokens, {times} times over, does not fit a prompt of {context}.")
        part = torch.arange(times)
        spread = self.pages.unsqueeze(-1) * times + part + torch.where(self.pages.unsqueeze(-1) > 0, theirs - times * mine, 0)
        written = torch.where(part == 0, self.pages.unsqueeze(-1) - mine + theirs, -1)
        pages = torch.where(self.pages.unsqueeze(-1) < mine, spread, written)
        pages = torch.where(self.pages.unsqueeze(-1) < 0, -1, pages).flatten(-2).long()
        order = torch.where(pages < 0, 2**40, pages).sort(-1).values  # ascending, as a selector lists them
        return torch.where(order == 2**40, -1, order).int()


@torch.no_grad()
def record(model, ids: Tensor, context: int, budget: int, page_size: int = 16, **options) -> Trace:
    """Reads texts `ids` `[R, N]`: `context` tokens as a prompt, the others one by one, as they are written.

    Args:
        context: a multiple of `page_size`; budget: as of `QuestCache`, whose further options may follow.
    """
    if context % page_size or not 0 < context < ids.shape[1]:
        raise KVSparseError(f"context={context} is no multiple of the page of {page_size} tokens, or leaves no token to decode.")
    if budget % page_size or budget >= context:
        raise KVSparseError(f"budget={budget} is no multiple of the page of {page_size} tokens, or selects everything.")
    cache = _RecordingCache(model, budget=budget, page_size=page_size, **{"dense_layers": 0, "reserve": ids.shape[1], **options})
    model(ids[:, :context], logits_to_keep=1, **{compat.CACHE_ARGUMENT: cache})
    for layer in cache.sparse_layers:
        layer.selector.chosen.clear()
    for at in range(context, ids.shape[1]):
        model(ids[:, at : at + 1], **{compat.CACHE_ARGUMENT: cache})
    chosen = [torch.stack(layer.selector.chosen, dim=1) for layer in cache.sparse_layers]
    name = getattr(model.config, "_name_or_path", "") or type(model).__name__
    return Trace(torch.stack(chosen), context, page_size, budget, Path(name).name)


class _RecordingSelector(PageSelector):
    def select(self, query, store, call) -> Selection:
        selection = super().select(query, store, call)
        self.chosen.append(selection.pages.cpu())
        return selection


class _RecordingCache(QuestCache):
    def make_selector(self, layer_idx: int) -> _RecordingSelector:
        options = self.options
        selector = _RecordingSelector(options.sinks, options.recent, options.reduce, options.page_size, options.backend)
        selector.chosen = []
        return selector


class ReplayingSelector(PageSelector):
    """Quest, whose work it does, with the choices of a trace.

    Args:
        pages: `[R, T, H', K]` of one layer of the trace, on the device.
        first: tokens of the prompt; the step number follows from how many were added.
    """

    def __init__(self, *common, pages: Tensor, first: int):
        super().__init__(*common)
        self.pages, self.first = pages, first

    def select(self, query, store, call) -> Selection:
        super().select(query, store, call)
        texts, steps, heads = self.pages.shape[:3]
        row = torch.arange(store.batch, device=self.pages.device).view(-1, 1)
        head = torch.arange(store.heads, device=self.pages.device)
        step = (store.length.long() - self.first - 1).clamp(0, steps - 1)
        return Selection(self.pages[row % texts, step, (head + row // texts) % heads])
