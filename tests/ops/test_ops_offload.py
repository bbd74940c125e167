"""hot_append, hot_plan and hot_fetch against a host pool and an LRU kept in Python lists; decode attention with a page stride."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsparse_hf import ops
from kvsparse_hf.ops.backend import interpreting


class Unit:
    """One KV head of one row, page by page and slot by slot."""

    def __init__(self, pages: int, slots: int, size: int, pinned: int):
        self.slots, self.size, self.pinned = slots, size, pinned
        self.held: list[int | None] = [None] * slots
        self.used = [0] * slots
        self.tick = self.length = self.hits = self.misses = 0
        self.capacity = pages * size
        self.tokens: list[tuple[torch.Tensor, torch.Tensor]] = []

    def _victims(self, count: int, busy: set[int]) -> list[int]:
        free = [s for s in range(self.pinned, self.slots - 1) if s not in busy]
        return sorted(sorted(free, key=lambda s: (self.used[s], s))[:count])

    def append(self, key, value) -> None:
        if self.length == self.capacity:
            return
        if self.length and self.length % self.size == 0:
            full = self.length // self.size - 1
            slot = full if full < self.pinned else self._victims(1, set())[0]
            self.held[slot], self.used[slot] = full, self.tick
        self.held[-1] = self.length // self.size
        self.tokens.append((key, value))
        self.length += 1

    def plan(self, listed: list[int]) -> tuple[list[int], list[int], list[int]]:
        self.tick += 1
        wanted = [page for page in listed if page >= 0]
        for page in wanted:
            if page in self.held:
                self.used[self.held.index(page)] = self.tick
        missing = [page for page in wanted if page not in self.held]
        slots = self._victims(len(missing), {s for s in range(self.slots) if self.used[s] == self.tick})
        for page, slot in zip(missing, slots, strict=True):
            self.held[slot], self.used[slot] = page, self.tick
        self.hits += len(wanted) - len(missing)
        self.misses += len(missing)
        return [self.held.index(page) if page >= 0 else -1 for page in listed], missing, slots

    def page(self, page: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return self.tokens[page * self.size:(page + 1) * self.size]


class Pair:
    """The tensors of a store beside their oracles. Whatever was not written is NaN."""

    def __init__(self, batch, heads, pages, slots, size, dim, pinned, device="cpu", dtype=torch.float32):
        full = dict(dtype=dtype, device=device)
        self.hot = torch.full((batch, heads, slots, 2, size, dim), math.nan, **full)
        self.host = torch.full((batch, heads, pages, 2, size, dim), math.nan, **full)
        ints = dict(dtype=torch.int32, device=device)
        self.page_table = torch.full((batch, heads, pages), -1, **ints)
        self.slot_page = torch.full((batch, heads, slots), -1, **ints)
        self.stamp = torch.zeros(batch, heads, slots, **ints)
        self.tick, self.length, self.visible = (torch.zeros(batch, heads, **ints) for _ in range(3))
        self.counters = torch.zeros(batch, heads, 2, dtype=torch.int64, device=device)
        self.summary = torch.full((batch, heads, pages, 2, dim), math.nan, **full)
        self.pinned = pinned
        self.units = [[Unit(pages, slots, size, pinned) for _ in range(heads)] for _ in range(batch)]
        self.generator = torch.Generator().manual_seed(0)

    def append(self, backend) -> None:
        key, value = (torch.randn(*self.length.shape, self.hot.shape[-1], generator=self.generator).to(self.hot) for _ in range(2))
        tables = (self.page_table, self.slot_page, self.stamp, self.tick, self.length, self.visible)
        capacity = self.host.shape[2] * self.host.shape[4]
        ops.hot_append(self.hot, self.host, *tables, key, value, capacity, self.pinned, self.summary, backend=backend)
        for b, row in enumerate(self.units):
            for h, unit in enumerate(row):
                unit.append(key[b, h], value[b, h])

    def step(self, lists: list[list[list[int]]], backend) -> None:
        """Plans and fetches `lists[row][head]`, and compares everything."""
        pages = torch.tensor(lists, dtype=torch.int32, device=self.hot.device)
        tables = (self.page_table, self.slot_page, self.stamp, self.tick, self.counters)
        slots, miss_page, miss_slot, count = ops.hot_plan(pages, *tables, self.pinned, backend=backend)
        for b, row in enumerate(self.units):
            for h, unit in enumerate(row):
                expected, missing, given_slots = unit.plan(lists[b][h])
                behind = [-1] * (pages.shape[-1] - len(missing))
                assert slots[b, h].tolist() == expected
                assert miss_page[b, h].tolist() == missing + behind
                assert miss_slot[b, h].tolist() == given_slots + behind
                assert int(count[b, h]) == len(missing)
        ops.hot_fetch(self.host, self.hot, miss_page, miss_slot, count, backend=backend)
        self.check()

    def check(self) -> None:
        size = self.hot.shape[4]
        for b, row in enumerate(self.units):
            for h, unit in enumerate(row):
                assert int(self.length[b, h]) == unit.length
                if unit.length:
                    assert int(self.visible[b, h]) == (unit.slots - 1) * size + (unit.length - 1) % size + 1
                assert self.slot_page[b, h].tolist() == [-1 if page is None else page for page in unit.held]
                table = [unit.held.index(page) if page in unit.held else -1 for page in range(self.page_table.shape[-1])]
                assert self.page_table[b, h].tolist() == table
                assert self.stamp[b, h, :-1].tolist() == unit.used[:-1]
                assert self.counters[b, h].tolist() == [unit.hits, unit.misses]
                for slot, page in enumerate(unit.held):
                    for i, (key, value) in enumerate(unit.page(page) if page is not None else []):
                        assert torch.equal(self.hot[b, h, slot, 0, i], key) and torch.equal(self.hot[b, h, slot, 1, i], value)
                for page in range(unit.length // size - (unit.length % size == 0)):
                    keys = torch.stack([key for key, _ in unit.page(page)])
                    assert torch.equal(self.host[b, h, page, 0], keys)
                    assert torch.equal(self.host[b, h, page, 1], torch.stack([value for _, value in unit.page(page)]))
                    assert torch.equal(self.summary[b, h, page], torch.stack((keys.amax(0), keys.amin(0))))


def _lists(pair: Pair, width: int, generator: torch.Generator) -> list[list[list[int]]]:
    """Random distinct pages of what each head holds, with holes."""
    out = []
    for row in pair.units:
        out.append([])
        for unit in row:
            held = -(-unit.length // unit.size)
            chosen = torch.randperm(held, generator=generator)[: int(torch.randint(0, width + 1, (1,), generator=generator))]
            listed = sorted(chosen.tolist())
            listed += [-1] * (width - len(listed))
            out[-1].append(listed if width % 2 else listed[::-1])
    return out


@pytest.mark.parametrize("size, slots, width, pinned", [
    (4, 9, 6, 1), (1, 13, 8, 0), *[pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((2, 8, 5, 2), (4, 12, 7, 0))],
])  # fmt: skip
def test_a_long_walk(target, size, slots, width, pinned):
    """Pages come and go, also those that were filled while walking (row 9: what is listed is never stale)."""
    pair = Pair(2, 2, 24, slots, size, 8, pinned, target.device)
    generator = torch.Generator().manual_seed(1)
    for step in range(24 * size + 3):  # over the end of the capacity
        pair.append(target.backend)
        if step % max(size // 2, 1) == 0:
            pair.step(_lists(pair, width, generator), target.backend)
    assert all(unit.misses > 10 for row in pair.units for unit in row)


@pytest.mark.parametrize("dim, dtype", [(10, torch.float16), (128, torch.bfloat16), (80, torch.float32)])
def test_odd_pages_and_dtypes(target, dim, dtype):
    pair = Pair(1, 3, 12, 7, 4, dim, 1, target.device, target.runnable(dtype))
    generator = torch.Generator().manual_seed(2)
    for _ in range(40):
        pair.append(target.backend)
    for _ in range(6):
        pair.step(_lists(pair, 4, generator), target.backend)


@pytest.mark.parametrize("extra", [-1, 0, 1])
@pytest.mark.parametrize("slots", [8, 32, 33])
def test_sizes_around_the_hot_buffer(target, slots, extra):
    """Row 10: as many pages as slots, one fewer, one more; every one of them asked for in turn."""
    pages = slots + extra
    pair = Pair(1, 1, pages, slots, 1, 4, 0, target.device)
    for _ in range(pages):
        pair.append(target.backend)
    width = slots - 1  # the largest list there may be
    for first in range(0, pages, 3):
        listed = [(first + i) % pages for i in range(min(width, pages))]
        pair.step([[listed + [-1] * (width - len(listed))]], target.backend)


def test_only_the_least_recent_go(target):
    """One page more than fits, in turn: with LRU every step misses exactly the page that was longest away."""
    pair = Pair(1, 1, 6, 5, 1, 4, 0, target.device)
    for _ in range(6):
        pair.append(target.backend)
    for page in [0, 1, 2, 3]:
        pair.step([[[page]]], target.backend)
    before = int(pair.counters[0, 0, 1])
    for page in [4, 0, 1, 2, 3, 4]:
        pair.step([[[page]]], target.backend)
    assert int(pair.counters[0, 0, 1]) - before == 6
    for page in [1, 2, 3, 4, 3, 2]:
        pair.step([[[page]]], target.backend)
    assert int(pair.counters[0, 0, 1]) - before == 6


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_walk(data):
    """Hypothesis: appends and lists in any order, in the reference (and in the kernels where they are interpreted)."""
    size, pinned, width = data.draw(st.sampled_from([1, 2])), data.draw(st.integers(0, 2)), data.draw(st.integers(1, 4))
    slots, pages = width + pinned + 1 + data.draw(st.integers(0, 3)), data.draw(st.integers(4, 10))
    moves = data.draw(st.lists(st.one_of(st.none(), st.sets(st.integers(0, pages - 1), max_size=width)), max_size=25))
    for backend in ("torch", "triton") if interpreting() else ("torch",):
        pair = Pair(1, 1, pages, slots, size, 4, pinned)
        pair.append(backend)
        for move in moves:
            if move is None:
                pair.append(backend)
                continue
            held = -(-pair.units[0][0].length // size)
            listed = [page if page < held else -1 for page in sorted(move)]
            pair.step([[listed + [-1] * (width - len(listed))]], backend)


def test_fetch_of_many_units(target):
    """Row 17: the misses of one unit are dealt out over the programs; many units without any cost nothing but their count."""
    batch, heads, listed = (60, 20, 3) if target.device == "cpu" else (60, 40, 3)
    host = torch.randn(batch, heads, 4, 2, 2, 4, device=target.device)
    hot = torch.full((batch, heads, 5, 2, 2, 4), math.nan, device=target.device)
    count = torch.zeros(batch, heads, dtype=torch.int32)
    miss_page, miss_slot = (torch.full((batch, heads, listed), -1, dtype=torch.int32) for _ in range(2))
    for b, h, n in ((0, 0, 1), (3, 19, 3), (17, 5, 2), (59, 19, 3)):
        count[b, h] = n
        miss_page[b, h, :n], miss_slot[b, h, :n] = torch.tensor([3, 0, 2][:n]), torch.tensor([4, 1, 0][:n])
    where = [t.to(target.device) for t in (miss_page, miss_slot, count)]
    ops.hot_fetch(host, hot, *where, backend=target.backend)
    for b in range(batch):
        for h in range(heads):
            moved = dict(zip(miss_slot[b, h].tolist(), miss_page[b, h].tolist(), strict=True))
            for slot in range(5):
                expected = host[b, h, moved[slot]] if slot in moved else torch.full_like(hot[b, h, slot], math.nan)
                torch.testing.assert_close(hot[b, h, slot], expected, equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("size, dim", [(4, 32), (1, 16), (16, 64)])
def test_attention_with_a_page_stride(target, size, dim):
    """Keys and values in turn, a page each: bit for bit what two plain stores give."""
    batch, heads, pages, group = 2, 2, 6, 3
    pool = torch.randn(batch, heads, pages, 2, size, dim, device=target.device)
    keys, values = (pool[:, :, :, i].reshape(-1, dim).contiguous() for i in range(2))
    length = torch.randint(1, pages * size + 1, (batch, heads), dtype=torch.int32, device=target.device)
    start = torch.arange(batch * heads, device=target.device).view(batch, heads) * pages * size
    pages_read = torch.tensor([0, 2, 3, 5, -1], dtype=torch.int32, device=target.device).expand(batch, heads, -1)
    q = torch.randn(batch, heads * group, dim, device=target.device)
    options = dict(max_len=pages * size, scale=0.3, pages=pages_read, page_size=size, return_lse=True, backend=target.backend)
    expected = ops.decode_attention(q, keys, values, start, length, **options)
    rows = pool.view(-1, dim)
    got = ops.decode_attention(q, rows, rows[size:], start * 2, length, page_stride=2 * size, **options)
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])


def test_the_ops_are_registered_with_what_they_write():
    """A compiled step sees every write in place: AOTAutograd's copies end where eager ends."""
    from torch._dynamo.backends.debugging import aot_eager

    def run(pair: Pair, step) -> None:
        for i in range(12):
            pages = torch.tensor([[[i // 2, max(i // 2 - 3, 0) if i > 5 else -1]]], dtype=torch.int32)
            step(pair, pages, torch.full((1, 1, 4), float(i)))

    def step(pair, pages, new):
        tables = (pair.page_table, pair.slot_page, pair.stamp, pair.tick)
        ops.hot_append(pair.hot, pair.host, *tables, pair.length, pair.visible, new, -new, 12, 1, pair.summary)
        _, *misses = ops.hot_plan(pages, *tables, pair.counters, 1)
        ops.hot_fetch(pair.host, pair.hot, *misses)

    eager, compiled = Pair(1, 1, 6, 5, 2, 4, 1), Pair(1, 1, 6, 5, 2, 4, 1)
    run(eager, step)
    torch._dynamo.reset()
    run(compiled, torch.compile(step, backend=aot_eager, fullgraph=True))
    for name, value in vars(eager).items():
        if torch.is_tensor(value):
            torch.testing.assert_close(getattr(compiled, name), value, equal_nan=True, rtol=0, atol=0)


def test_triton_without_cuda_is_refused(monkeypatch):
    from kvsparse_hf.ops import backend as backends

    monkeypatch.setattr(backends, "interpreting", lambda: False)
    pair = Pair(1, 1, 4, 4, 1, 4, 0)
    with pytest.raises(ops.BackendError, match="'cpu'|not installed"):
        pair.append("triton")
