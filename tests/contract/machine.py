"""The state machine: anything a caller may do to two caches of one model, next to a model that remembers everything.

What the reference lets a query see is what the cache says it holds (`helpers.kept`) and, where it selects, what it selected.
So a fault in what is held, moved, copied, rotated or read shows in the logits; whether the right tokens were chosen is the
business of each method's own oracle.
"""

import tempfile
from functools import cache as once

import torch
from helpers import forward, kept, left_pad, positions, same_snapshot, seen, snapshot
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from methods import AMPLE, BUDGET, MethodCase
from replay import Layer, ReplayLlama, Row, Seen
from tiny_models import build
from torch import Tensor

from kvsparse_hf import SparseCache, UnsupportedOperationError

MOST_ROWS = 4
EXACT, ROUNDED = 2e-4, 0.5  # on logits of size 3
SLOTS = st.integers(0, 1)
PROMPTS = st.lists(st.integers(1, 30), min_size=1, max_size=3)

the_model = once(lambda layers: build(num_hidden_layers=layers))


class Held:
    """One cache under test and the rows of the reference.

    Attributes:
        fresh: tokens taken in since the last forward that may have dropped some.
        decoding: a one-token step ran since the prompt.
    """

    def __init__(self, cache: SparseCache, rows: list[Row] | None = None):
        self.cache, self.rows = cache, rows or []
        self.pad: list[int] = []
        self.fresh, self.decoding = 0, False

    @property
    def columns(self) -> int:
        """Tokens seen, padding included."""
        return self.rows[0].seen + self.pad[0] if self.rows else 0

    def copied(self, cache: SparseCache) -> "Held":
        other = Held(cache, [row.copy() for row in self.rows])
        other.pad, other.fresh, other.decoding = list(self.pad), self.fresh, self.decoding
        return other


class CacheMachine(RuleBasedStateMachine):
    """Subclasses set `case`."""

    case: MethodCase

    @initialize(
        budget=st.sampled_from([BUDGET, AMPLE]),
        reserve=st.sampled_from([1, 5, 64]),
        prompts=st.tuples(PROMPTS, PROMPTS),
    )
    def start(self, budget, reserve, prompts):
        self.model = the_model(self.case.layers)
        self.budget, self.reserve = budget, reserve
        self.held = [Held(self._new()) for _ in range(2)]
        sources = self.held[0].cache.layer_map.sources
        self.windows = self.case.windows(len(sources))
        in_the_cache = getattr(self.held[0].cache.options, "positions", "original") == "cache"
        self.reference = ReplayLlama(self.model, list(sources), in_the_cache)
        self.tolerance = ROUNDED if self.case.rounds or "lossy" in self.case.id else EXACT
        for seed, (held, lengths) in enumerate(zip(self.held, prompts, strict=True)):
            self._prefill(held, lengths, seed)

    def _new(self) -> SparseCache:
        return self.case.make(self.model, self.budget, reserve=self.reserve)

    # --- forwards --------------------------------------------------------------------------------------------------

    @precondition(lambda self: any(not held.rows for held in self.held))
    @rule(lengths=PROMPTS, seed=st.integers(0, 2**20))
    def prefill(self, lengths, seed):
        self._prefill(next(held for held in self.held if not held.rows), lengths, seed)

    def _prefill(self, held: "Held", lengths: list[int], seed: int) -> None:
        ids = self._ids(seed, len(lengths), max(lengths))
        held.rows = [self.reference.row() for _ in lengths]
        held.pad = [max(lengths) - length for length in lengths]
        padded, mask = left_pad([row[-length:] for row, length in zip(ids, lengths, strict=True)])
        explicit = any(held.pad) or seed % 2
        self._feed(held, padded, mask if explicit else None)
        held.fresh, held.decoding = 0, False

    @precondition(lambda self: any(held.rows for held in self.held))
    @rule(slot=SLOTS, steps=st.integers(1, 8), seed=st.integers(0, 2**20))
    def decode(self, slot, steps, seed):
        held = self._started(slot)
        for step in range(steps):
            self._feed(held, self._ids(seed + step, len(held.rows), 1), self._mask(held, 1, seed))
        held.decoding = True
        held.fresh += steps

    @precondition(lambda self: any(held.rows for held in self.held))
    @rule(slot=SLOTS, count=st.integers(2, 9), seed=st.integers(0, 2**20))
    def turn(self, slot, count, seed):
        """A chunk of the prompt, or another message."""
        held = self._started(slot)
        self._feed(held, self._ids(seed, len(held.rows), count), self._mask(held, count, seed))
        held.fresh = held.fresh + count if held.decoding else 0

    def _ids(self, seed: int, rows: int, count: int) -> Tensor:
        return torch.randint(3, 97, (rows, count), generator=torch.Generator().manual_seed(seed))

    def _mask(self, held: Held, count: int, seed: int) -> Tensor | None:
        """The 2-D mask, which a caller may leave out where nothing is padded."""
        if not any(held.pad) and seed % 2:
            return None
        mask = torch.ones(len(held.rows), held.columns + count, dtype=torch.long)
        for row, pad in enumerate(held.pad):
            mask[row, :pad] = 0
        return mask

    def _started(self, slot: int) -> Held:
        return self.held[slot] if self.held[slot].rows else self.held[1 - slot]

    def _feed(self, held: Held, ids: Tensor, mask: Tensor | None) -> None:
        cache, rows, count = held.cache, held.rows, ids.shape[1]
        first = int(seen(cache)) == 0
        one_by_one = not first and count == 1 and all(row.seen for row in rows)
        before = None if first else self._kept(cache)
        kwargs = {} if mask is None else {"attention_mask": mask, "position_ids": positions(mask)[:, -count:]}
        with Recorder(cache, one_by_one) as recorder:
            logits = forward(self.model, ids, cache, **kwargs)
        after = self._kept(cache)
        for index, row in enumerate(rows):
            skip = held.pad[index] if first else 0
            new = count - skip
            must_newest = one_by_one or self.case.window
            self._check_held(
                row,
                new,
                must_newest,
                None if first else [layer[index] for layer in before],
                [layer[index] for layer in after],
            )
            shown = [
                self._shown(recorder, index, layer, row.seen, new, before if not one_by_one else after)
                for layer in range(len(self.reference.sources))
            ]
            expected = self.reference.forward(row, ids[index, skip:], shown)
            torch.testing.assert_close(logits[index, skip:].double(), expected, atol=self.tolerance, rtol=0)
        assert int(seen(cache)) == held.columns
        report = cache.report()
        assert report.seen == [row.seen for row in rows]
        total = sum(len(head) for layer in after for row in layer for head in row)
        heads = self.model.config.num_key_value_heads * len(after)
        assert report.evicted == sum(row.seen for row in rows) * heads - total

    @staticmethod
    def _kept(cache: SparseCache) -> list:
        return [kept(cache, layer) for layer in range(len(cache.sparse_layers))]

    @staticmethod
    def _check_held(row: Row, new: int, newest: bool, before: list | None, after: list) -> None:
        """Nothing held twice, nothing unseen, nothing that was dropped before; the newest token where the method promises it."""
        for layer, heads in enumerate(after):
            for head, held in enumerate(heads):
                could = set(range(row.seen, row.seen + new)) | (set() if before is None else set(before[layer][head]))
                assert len(held) == len(set(held)) and set(held) <= could
                assert not newest or held[-1] == row.seen + new - 1

    def _shown(self, recorder, index: int, layer: int, past: int, new: int, held: list | None) -> Seen:
        """What the queries of one layer and row see."""
        window = self.windows[layer]
        near = torch.ones(new, past + new, dtype=torch.bool)
        near = near.triu(past + 1 - window) if window else near
        heads = self.model.config.num_key_value_heads
        group = self.model.config.num_attention_heads // heads
        if held is None:
            return Seen(near.tril().expand(heads * group, -1, -1))
        own = recorder.owner_number[layer]
        visible = torch.zeros(heads, new, past + new, dtype=torch.bool)
        for head in range(heads):
            visible[head, :, held[own][index][head]] = True
        visible[:, :, past:] = torch.ones(new, new, dtype=torch.bool).tril()
        visible = (visible & near).repeat_interleave(group, dim=0)
        selection = recorder.selection(layer)
        if selection is None:
            return Seen(visible)
        pages = selection.pages[index].repeat_interleave(len(visible) // selection.pages.shape[1], dim=0)
        size = recorder.selector(layer).page_size
        chosen = torch.zeros_like(visible)
        for head, numbers in enumerate(pages.tolist()):
            for page in (number for number in numbers if number >= 0):
                chosen[head, 0, page * size : (page + 1) * size] = True
        finish = FINISH.get(type(recorder.selector(layer)).__name__)
        return Seen(visible & chosen, finish and finish(selection, index, chosen))

    # --- everything else -------------------------------------------------------------------------------------------

    @precondition(lambda self: any(held.rows for held in self.held))
    @rule(slot=SLOTS, removed=st.integers(0, 7))
    def crop(self, slot, removed):
        held = self._started(slot)
        before = snapshot(held.cache)
        must = not (self.case.evicts or self.case.rounds) or (self.case.croppable and removed <= held.fresh)
        try:
            held.cache.crop(-removed)
        except UnsupportedOperationError:
            assert not must and removed
            assert same_snapshot(snapshot(held.cache), before) and int(seen(held.cache)) == held.columns
            return
        if removed >= held.columns:
            self._forget(held)
            return
        left = held.columns - removed
        for row in held.rows:
            row.crop(removed)
        held.pad = [min(pad, left) for pad in held.pad]
        held.fresh = max(held.fresh - removed, 0)

    @precondition(lambda self: any(held.rows for held in self.held))
    @rule(slot=SLOTS, how=st.sampled_from(["reorder", "select", "repeat"]), data=st.data())
    def rows(self, slot, how, data):
        held = self._started(slot)
        count = len(held.rows)
        if how == "repeat" and 2 * count <= MOST_ROWS:
            index = [row for row in range(count) for _ in range(2)]
            held.cache.batch_repeat_interleave(2)
        elif how == "select":
            index = data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=MOST_ROWS))
            held.cache.batch_select_indices(torch.tensor(index))
        else:
            index = data.draw(st.lists(st.integers(0, count - 1), min_size=count, max_size=count))
            held.cache.reorder_cache(torch.tensor(index))
        held.rows, held.pad = [held.rows[i].copy() for i in index], [held.pad[i] for i in index]

    @rule(slot=SLOTS, how=st.sampled_from(["fork", "file", "fork", "file", "reset"]))
    def whole(self, slot, how):
        """A fork becomes the other cache, and both go on."""
        held = self.held[slot]
        if how == "fork":
            self.held[1 - slot] = held.copied(held.cache.fork())
        elif how == "file":
            with tempfile.TemporaryDirectory() as folder:
                held.cache.save(folder)
                held.cache = SparseCache.load(folder, self.model)
        else:
            held.cache.reset()
            self._forget(held)

    @staticmethod
    def _forget(held: Held) -> None:
        held.rows, held.pad, held.fresh, held.decoding = [], [], 0, False
        assert int(seen(held.cache)) == 0 and held.cache.report().seen == []


# --- what was selected -------------------------------------------------------------------------------------------------


class Recorder:
    """Notes what the selectors of a cache chose in a one-token step, layer by layer."""

    def __init__(self, cache: SparseCache, active: bool):
        self.cache, self.active = cache, active
        sources = cache.layer_map.sources
        self.owner_number = [cache._sparse.index(source) for source in sources]
        self._turn = [sources[:layer].count(source) for layer, source in enumerate(sources)]  # the owner comes first
        self.chosen: dict[int, list] = {}

    def __enter__(self) -> "Recorder":
        for number, layer in enumerate(self.cache.sparse_layers if self.active else ()):
            if hasattr(layer, "selector"):
                layer.selector.select = self._noting(number, layer.selector.select)
        return self

    def _noting(self, number: int, select):
        def noting(*args):
            self.chosen.setdefault(number, []).append(select(*args))
            return self.chosen[number][-1]

        return noting

    def __exit__(self, *_) -> None:
        for layer in self.cache.sparse_layers if self.active else ():
            if hasattr(layer, "selector"):
                del layer.selector.select

    def selection(self, layer: int):
        """What one layer read; None for everything."""
        chosen = self.chosen.get(self.owner_number[layer])
        return None if chosen is None else chosen[self._turn[layer]]

    def selector(self, layer: int):
        return self.cache.sparse_layers[self.owner_number[layer]].selector


def rest_by_mean(selection, index: int, chosen: Tensor):
    """The mean value of all tokens stands for what was not read, as far as the approximate weights reach it."""
    weights = selection.extra[0][index].flatten(0, 1).double()[:, : chosen.shape[-1]]
    share = (weights * chosen[:, 0]).sum(-1, keepdim=True)

    def finish(layer: Layer, out: Tensor, lse: Tensor) -> Tensor:
        mean = layer.values.mean(1).repeat_interleave(len(out) // len(layer.values), dim=0)
        return share * out + (1 - share) * mean

    return finish


def rest_by_groups(selection, index: int, chosen: Tensor):
    """The estimated groups join by their log-sum-exp."""
    if not selection.extra:
        return None
    estimate, mass = (part[index].double() for part in selection.extra)

    def finish(layer: Layer, out: Tensor, lse: Tensor) -> Tensor:
        whole = torch.logaddexp(lse, mass)
        return (lse - whole).exp().unsqueeze(-1) * out + (mass - whole).exp().unsqueeze(-1) * estimate

    return finish


FINISH = {"ChannelSelector": rest_by_mean, "ClusterSelector": rest_by_groups}
