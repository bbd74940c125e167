"""Saved caches that were damaged or forged: our own error and nothing left behind, or a cache that works."""

import copy
import gc
import hashlib
import json
import tempfile
from functools import cache as once
from pathlib import Path

import pytest
import torch
from helpers import decode, left_pad, prefill, tokens
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from methods import ALL
from safetensors.torch import load, save
from tiny_models import build

from kvsparse_hf import KVSparseError, SparseCache
from kvsparse_hf.layers.host import mapped_bytes

CASES = ["full", "snapkv", "snapkv-cachepos", "streaming", "h2o", "rkv", "adakv", "quest", "loki", "retrieval-ivf", "hisparse", "tiered-lossy",
         "cla-snapkv", "yoco"]  # fmt: skip
COMMON = dict(deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
HOSTILE = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 40), st.sampled_from([2**31, 2**63, 10**30, -(10**30), 1e308]),
    st.floats(allow_nan=True), st.text(max_size=8), st.sampled_from([[], {}, [[]], [[1, 2]], "../../x", "../../../etc/passwd", [None], {"a": 1}]),
)  # fmt: skip
DTYPES = [torch.float16, torch.float64, torch.bfloat16, torch.int8, torch.int64, torch.uint8, torch.bool]

MODEL = build()


@once
def saved(name: str) -> tuple[dict, bytes]:
    """Description and tensors of a cache that saw padded prompts and some steps."""
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        mine = ALL[name].make(MODEL, reserve=3)
        ids, mask = left_pad([tokens(30, seed=1), tokens(17, seed=2)])
        prefill(MODEL, mine, ids, mask)
        decode(MODEL, mine, tokens(3, 2, seed=3), mask)
        mine.save(folder)
        return json.loads((Path(folder) / "cache.json").read_text()), (Path(folder) / "cache.safetensors").read_bytes()


def check(folder, description: str, blob: bytes) -> None:
    """Loads what was written: refused by one of our errors with nothing changed, or usable."""
    (folder / "cache.json").write_text(description, encoding="utf-8")
    (folder / "cache.safetensors").write_bytes(blob)
    MODEL.config._attn_implementation = "sdpa"
    before = mapped_bytes()
    loaded = None
    try:
        loaded = SparseCache.load(folder, MODEL)
    except KVSparseError as error:
        assert len(str(error)) < 4000 and MODEL.config._attn_implementation == "sdpa"
    if loaded is not None:
        use(loaded)
        return
    if mapped_bytes() > before:
        gc.collect()
    assert mapped_bytes() <= before


def use(loaded: SparseCache) -> None:
    """Whatever was in the file and was taken: every step afterwards works, or is refused."""
    try:
        rows = max(loaded.batch_size, 1)
        assert loaded.report().seen is not None
        decode(MODEL, loaded, tokens(6, rows, seed=4))
        loaded.fork()
    except KVSparseError:
        pass  # such as a padding that now needs its mask


def sealed(description: dict, tensors: dict) -> tuple[str, bytes]:
    """As the library would have written them: the checksum fits."""
    blob = save({name: tensor.clone().contiguous() for name, tensor in tensors.items()})
    return json.dumps({**description, "tensors": sorted(tensors), "sha256": hashlib.sha256(blob).hexdigest()}), blob


@st.composite
def places(draw, value):
    """A place inside nested JSON, as the container and the key."""
    while True:
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        key = draw(st.sampled_from(keys))
        inner = value[key]
        if not isinstance(inner, (dict, list)) or not inner or draw(st.booleans()):
            return value, key
        value = inner


@settings(max_examples=100, **COMMON)
@given(
    name=st.sampled_from(CASES),
    data=st.data(),
    how=st.sampled_from(["replace", "replace", "delete", "add"]),
    value=HOSTILE,
)
def test_a_forged_description(name, data, how, value, tmp_path_factory):
    description, blob = copy.deepcopy(saved(name)[0]), saved(name)[1]
    container, key = data.draw(places(description))
    if how == "delete":
        del container[key]
    elif how == "add" and isinstance(container, dict):
        container["unknown"] = value
    else:
        container[key] = value
    check(tmp_path_factory.mktemp("forged"), json.dumps(description), blob)


@settings(max_examples=100, **COMMON)
@given(
    name=st.sampled_from(CASES),
    data=st.data(),
    how=st.sampled_from(["dtype", "shape", "missing", "added", "renamed", "values"]),
)
def test_forged_tensors(name, data, how, tmp_path_factory):
    description, tensors = copy.deepcopy(saved(name)[0]), load(saved(name)[1])
    # What a selector keeps for itself has a form of its own; the checksum alone protects it.
    victim = data.draw(st.sampled_from(sorted(name for name in tensors if ".selector." not in name)))
    held = tensors[victim]
    if how == "dtype":
        tensors[victim] = held.to(data.draw(st.sampled_from([dtype for dtype in DTYPES if dtype != held.dtype])))
    elif how == "shape":
        tensors[victim] = data.draw(
            st.sampled_from(
                [held[:-1], held[..., :-1], held.unsqueeze(0), torch.cat((held, held)), held.flatten()[:0]]
            )
        )
    elif how == "missing":
        del tensors[victim]
    elif how == "added":
        other = data.draw(
            st.sampled_from(["0.more", "7.keys", "../../escape", "/etc/passwd", "0.host.keys", "0.__class__", ""])
        )
        tensors[other] = held
    elif how == "renamed":
        tensors[data.draw(st.sampled_from(["0.k", "1.../x", "x", "9.keys"]))] = tensors.pop(victim)
    elif not held.is_floating_point():
        at = data.draw(st.integers(0, max(held.numel() - 1, 0)))
        tensors[victim].view(-1)[at] = data.draw(
            st.sampled_from([-1, 1, 5, 10**6, torch.iinfo(held.dtype).max, torch.iinfo(held.dtype).min])
        )
    else:
        tensors[victim].fill_(float("nan"))
    check(tmp_path_factory.mktemp("forged"), *sealed(description, tensors))


@settings(max_examples=60, **COMMON)
@given(name=st.sampled_from(CASES), at=st.floats(0, 1), bit=st.integers(0, 7), cut=st.booleans(), which=st.booleans())
def test_bytes_lost_and_flipped(name, at, bit, cut, which, tmp_path_factory):
    description, blob = saved(name)
    description = json.dumps(description).encode()
    victim = bytearray(description if which else blob)
    where = min(int(at * len(victim)), len(victim) - 1)
    if cut:
        del victim[where:]
    else:
        victim[where] ^= 1 << bit
    victim = bytes(victim)
    folder = tmp_path_factory.mktemp("broken")
    text = victim.decode("latin-1") if which else description.decode()
    check(folder, text, blob if which else victim)


@pytest.mark.parametrize("name", ["streaming", "h2o", "yoco", "snapkv-bounded", "scissorhands"])
@pytest.mark.parametrize("limit", [None, 7, [[3]], [[0, 0]] * 2, [[-1, 12]] * 2, [[5.5, 12.0]] * 2, [[True, True]] * 2], ids=str)
def test_a_forged_limit_of_a_bounded_head(name, limit, tmp_path):
    """What a head may hold has no part in the checksum: at the next token it would be too late."""
    description, blob = copy.deepcopy(saved(name)[0]), saved(name)[1]
    assert description["layers"][0]["limit"] is not None
    description["layers"][0]["limit"] = limit
    (tmp_path / "cache.json").write_text(json.dumps(description))
    (tmp_path / "cache.safetensors").write_bytes(blob)
    with pytest.raises(KVSparseError):
        SparseCache.load(tmp_path, MODEL)


def _numbers(value, path: tuple = ()):
    """Paths of the numbers in nested JSON, one for each list."""
    items = value.items() if isinstance(value, dict) else enumerate(value[:1])
    for key, inner in items:
        if isinstance(inner, (dict, list)):
            yield from _numbers(inner, (*path, key))
        elif isinstance(inner, (int, float)) and not isinstance(inner, bool):
            yield (*path, key)


@pytest.mark.parametrize("huge", [2**31 - 1, 10**30])
@pytest.mark.parametrize("name", ["rkv", "retrieval-ivf", "hisparse", "tiered-lossy"])
def test_huge_numbers_take_no_memory(name, huge, tmp_path):
    description, blob = saved(name)
    for path in _numbers(description):
        forged = copy.deepcopy(description)
        inner = forged
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = huge
        check(tmp_path, json.dumps(forged), blob)


@pytest.mark.parametrize(
    "text", ["[" * 100000, '{"a":' * 5000, "1" + "0" * 6000, "NaN", "null", '"x"', "[]"], ids=lambda text: text[:8]
)
def test_descriptions_that_are_none(text, tmp_path):
    with pytest.raises(KVSparseError):
        (tmp_path / "cache.safetensors").write_bytes(saved("full")[1])
        (tmp_path / "cache.json").write_text(text)
        SparseCache.load(tmp_path, MODEL)


@pytest.mark.parametrize("path", ["a\0b", "x" * 5000, ""], ids=["null", "long", "empty"])
def test_paths_that_are_none(path):
    with pytest.raises(KVSparseError):
        SparseCache.load(path, MODEL)
