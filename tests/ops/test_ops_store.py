"""store_token and gather_rows: every slot policy, and nothing written elsewhere."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsparse_hf import ops


class Store:
    """A ragged store with its counters, and a plain Python model of what it should hold."""

    def __init__(self, capacities, dim=8, dim_v=4, pages=None, page_size=0, pinned=0, device="cpu",
                 dtype=torch.float32):
        capacity = torch.tensor(capacities)
        self.batch, self.heads = capacity.shape
        rows = int(capacity.sum()) + 7
        starts = torch.cumsum(capacity.flatten(), 0) - capacity.flatten()
        self.start = (starts.view_as(capacity) + 3).to(device)
        self.k = torch.full((rows, dim), 7.0, dtype=dtype, device=device)
        self.v = torch.full((rows, dim_v), 7.0, dtype=dtype, device=device)
        self.pos = torch.full((rows,), -1, dtype=torch.int32, device=device)
        self.capacity = capacity.int().to(device)
        self.length = torch.zeros_like(self.capacity)
        self.pinned = torch.full_like(self.capacity, pinned)
        self.cursor = torch.zeros_like(self.capacity)
        self.page_size = page_size
        self.summary = None
        if pages:
            self.summary = torch.full((self.batch, self.heads, pages, 2, dim), 99.0, dtype=dtype, device=device)

    def step(self, backend, position, override=None):
        dim, dim_v, device = self.k.shape[1], self.v.shape[1], self.k.device
        key = torch.randn(self.batch, self.heads, dim, device=device)
        value = torch.randn(self.batch, self.heads, dim_v, device=device)
        new_pos = torch.full((self.batch,), position, dtype=torch.int32, device=device)
        ops.store_token(
            self.k, self.v, self.pos, key, value, new_pos, self.start, self.capacity, self.length, self.pinned,
            self.cursor, override, self.summary, self.page_size, backend=backend,
        )
        return key, value


def test_appends_then_overwrites_in_a_ring(target):
    store = Store([[4, 2], [0, 5]], pinned=1, device=target.device)
    expected = {(b, h): [] for b in range(2) for h in range(2)}
    untouched = store.k.clone()
    for step in range(11):
        key, value = store.step(target.backend, step)
        for (b, h), slots in expected.items():
            capacity = int(store.capacity[b, h])
            entry = (key[b, h], value[b, h], step)
            if len(slots) < capacity:
                slots.append(entry)
            elif capacity > 1:
                slots[1 + (step - capacity) % (capacity - 1)] = entry
    written = torch.zeros(store.k.shape[0], dtype=torch.bool)
    for (b, h), slots in expected.items():
        assert int(store.length[b, h]) == len(slots) == int(store.capacity[b, h])
        for slot, (key, value, step) in enumerate(slots):
            row = int(store.start[b, h]) + slot
            written[row] = True
            assert torch.equal(store.k[row], key) and torch.equal(store.v[row], value) and store.pos[row] == step
    written = written.to(target.device)
    assert torch.equal(store.k[~written], untouched[~written])
    assert (store.pos[~written] == -1).all()


def test_all_pinned_and_full_writes_nothing(target):
    store = Store([[3, 3]], pinned=3, device=target.device)
    for step in range(3):
        store.step(target.backend, step)
    before = store.k.clone(), store.v.clone(), store.pos.clone()
    for step in range(3, 6):
        store.step(target.backend, step)
    assert all(torch.equal(a, b) for a, b in zip(before, (store.k, store.v, store.pos), strict=True))
    assert (store.length == 3).all() and (store.cursor == 0).all()


def test_override_is_used_only_when_full(target):
    store = Store([[3, 3]], device=target.device)
    override = torch.tensor([[2, 0]], dtype=torch.int32, device=target.device)
    keys = [store.step(target.backend, step, override)[0] for step in range(4)]
    first = int(store.start[0, 0])
    assert torch.equal(store.k[first : first + 3], torch.stack([keys[0][0, 0], keys[1][0, 0], keys[3][0, 0]]))
    second = int(store.start[0, 1])
    assert torch.equal(store.k[second : second + 3], torch.stack([keys[3][0, 1], keys[1][0, 1], keys[2][0, 1]]))
    assert (store.cursor == 0).all() and (store.length == 3).all()


@pytest.mark.parametrize("bad", [-1, 3])
def test_override_outside_the_segment_writes_nothing(target, bad):
    store = Store([[3, 3]], device=target.device)
    for step in range(3):
        store.step(target.backend, step)
    before = store.k.clone()
    store.step(target.backend, 9, torch.full((1, 2), bad, dtype=torch.int32, device=target.device))
    assert torch.equal(store.k, before)


@pytest.mark.parametrize("page_size", [1, 4])
def test_page_summary_follows_every_key(target, page_size):
    store = Store([[10, 6]], pages=10, page_size=page_size, device=target.device)
    for step in range(13):
        store.step(target.backend, step)
        for h in range(2):
            length, first = int(store.length[0, h]), int(store.start[0, h])
            for page in range(-(-length // page_size)):
                keys = store.k[first + page * page_size : first + min(length, (page + 1) * page_size)]
                high, low = store.summary[0, h, page]
                if step < int(store.capacity[0, h]) or page_size == 1:  # exact until an entry is overwritten
                    assert torch.equal(high, keys.amax(0)) and torch.equal(low, keys.amin(0))
                assert (high >= keys.amax(0)).all() and (low <= keys.amin(0)).all()
    assert (store.summary[0, 1, -(-6 // page_size):] == 99).all()


def test_casts_to_the_dtype_of_the_store(target):
    dtype = target.runnable(torch.bfloat16)
    store = Store([[2]], dtype=dtype, pages=1, page_size=2, device=target.device)
    key, value = store.step(target.backend, 0)
    first = int(store.start[0, 0])
    assert torch.equal(store.k[first], key[0, 0].to(dtype)) and torch.equal(store.v[first], value[0, 0].to(dtype))
    assert torch.equal(store.summary[0, 0, 0, 0], key[0, 0].to(dtype))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=4, max_size=4), st.integers(0, 2), st.integers(1, 9))
def test_length_and_cursor_stay_in_range(capacities, pinned, steps):
    store = Store([capacities[:2], capacities[2:]], pinned=pinned)
    store.pinned = torch.minimum(store.pinned, store.capacity)
    for step in range(steps):
        store.step("torch", step)
    assert torch.equal(store.length, store.capacity.clamp(max=steps))
    assert (store.cursor >= 0).all() and (store.cursor < (store.capacity - store.pinned).clamp(min=1)).all()


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("dim, dim_v, dtype", [(16, 16, torch.float32), (80, 40, torch.bfloat16)])
def test_gather_rows(target, dim, dim_v, dtype, index_dtype):
    src_k = torch.randn(2, 50, 3, dim).to(dtype).to(target.device).transpose(1, 2)
    src_v = torch.randn(2, 3, 50, dim_v).to(dtype).to(target.device)
    index = torch.stack([torch.randperm(50)[:37] for _ in range(6)]).view(2, 3, 37)
    index[0, 1, 20:] = -1
    index[1, 2] = -1
    index = index.to(index_dtype).to(target.device)
    start = (torch.arange(6).view(2, 3) * 40 + 2).to(target.device)
    dst_k = torch.full((250, dim), 5.0, dtype=dtype, device=target.device)
    dst_v = torch.full((250, dim_v), 5.0, dtype=dtype, device=target.device)
    expected_k, expected_v = dst_k.clone(), dst_v.clone()
    for b in range(2):
        for h in range(3):
            for m, token in enumerate(index[b, h].tolist()):
                if token >= 0:
                    expected_k[int(start[b, h]) + m] = src_k[b, h, token]
                    expected_v[int(start[b, h]) + m] = src_v[b, h, token]
    ops.gather_rows(src_k, src_v, index, start, dst_k, dst_v, backend=target.backend)
    assert torch.equal(dst_k, expected_k) and torch.equal(dst_v, expected_v)


def test_gather_rows_skipped_entries_spare_the_neighbour(target):
    """Entries of -1 past the end of a segment point into the next one, which must not notice."""
    src = torch.arange(1.0, 5.0, device=target.device).view(1, 1, 4, 1).expand(1, 2, 4, 1).contiguous()
    index = torch.tensor([[[0, 1, -1, -1], [3, 2, 1, 0]]], device=target.device)
    start = torch.tensor([[0, 2]], device=target.device)
    dst_k, dst_v = torch.zeros(6, 1, device=target.device), torch.zeros(6, 1, device=target.device)
    ops.gather_rows(src, src, index, start, dst_k, dst_v, backend=target.backend)
    assert dst_k.flatten().tolist() == dst_v.flatten().tolist() == [1, 2, 4, 3, 2, 1]
