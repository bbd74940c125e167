"""Tensor parallelism on CPUs: two processes with half of the heads each do what one process does with all of them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import dense, generate, tokens
from methods import ALL, AMPLE, METHODS
from tiny_models import build
from transformers import AutoModelForCausalLM

import kvsparse_hf
from kvsparse_hf import KVSparseError, SparseCache, UnsupportedModelError, UnsupportedOperationError
from kvsparse_hf.bench import decode, models, parallel
from kvsparse_hf.ranks import Ranks

WORKER = Path(__file__).with_name("tp_worker.py")
RANKS = 2
CASES = [case.id for case in METHODS]
MOVING = ["adakv, offload", "tova, offload", "tiered by the last query"]
TURNS = [case.id + ", second turn" for case in METHODS if case.uneven and case.evicts]


def _launch(ranks: int, *arguments: str, timeout: int = 300) -> subprocess.CompletedProcess:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    start = [sys.executable] if ranks == 1 else [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={ranks}"]
    command = [*start, *(["--standalone"] if ranks > 1 else []), str(WORKER), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parallel")
    torch.manual_seed(0)
    model = build("llama-gqa2", num_attention_heads=8, num_key_value_heads=4)
    model.save_pretrained(folder / "model")
    with torch.no_grad():
        cache = kvsparse_hf.SnapKVCache(model, budget=12, window=4, kernel=3)
        model(input_ids=torch.arange(3, 40)[None], **{kvsparse_hf.hf.compat.CACHE_ARGUMENT: cache})
    cache.save(folder / "saved-by-one")
    return folder


@pytest.fixture(scope="module")
def found(folder):
    """What one process found, and what each of two did."""
    for ranks in (1, RANKS):
        run = _launch(ranks, str(folder / "model"), str(folder))
        assert run.returncode == 0, run.stderr[-3000:]
    return torch.load(folder / "found-0-of-1.pt"), [torch.load(folder / f"found-{rank}-of-{RANKS}.pt") for rank in range(RANKS)]


@pytest.mark.parametrize("name", [*CASES, *TURNS, *MOVING, "bytes", "kvzip, compressed"])
def test_same_tokens_same_entries_half_the_bytes(found, name):
    one, many = found[0][name], [rank[name] for rank in found[1]]
    assert all(torch.equal(rank["tokens"], one["tokens"]) for rank in many)
    together = [[sum((rank["kept"][layer][row] for rank in many), []) for row in range(2)] for layer in range(len(one["kept"]))]
    assert together == one["kept"]
    total = sum(rank["bytes"] for rank in many)
    even = not any(word in name for word in ("adakv", "headkv", "duo", "kvzip, compressed"))
    # Tables that count rows, not heads, are on every rank; unequal heads fill the buffers of an earlier prompt less well.
    assert one["bytes"] <= total <= one["bytes"] * (1.02 if even else 1.1)
    assert not even or max(rank["bytes"] for rank in many) <= total / RANKS * 1.001


def test_a_byte_budget_counts_all_ranks(found):
    assert found[0]["bytes"]["kept"] != [] and sum(rank["bytes"]["bytes"] for rank in found[1]) <= found[0]["bytes"]["bytes"] * 1.02


def test_saved_by_every_rank(found, folder):
    for rank in found[1]:
        assert rank["saved"]["kept"]
        assert "1 tensor-parallel rank" in rank["saved"]["refusal"]
    assert sorted(path.name for path in (folder / "saved").glob("rank-*")) == ["rank-0-of-2", "rank-1-of-2"]


def test_loading_on_another_number_of_ranks_is_refused(found, folder, tmp_path):
    only = tmp_path / "saved"
    only.mkdir()
    (folder / "saved" / "rank-0-of-2").rename(only / "rank-0-of-2")
    model = build("llama-gqa2", num_attention_heads=8, num_key_value_heads=4)
    with pytest.raises(UnsupportedOperationError, match="2 tensor-parallel rank"):
        SparseCache.load(only, model)


def test_a_rank_that_fails_ends_all(folder):
    run = _launch(RANKS, str(folder / "model"), str(folder), "fail", timeout=120)
    assert run.returncode != 0
    assert "this rank fails on purpose" in run.stderr + run.stdout


class _Mesh:
    mesh_dim_names = ("tp",)

    def __init__(self, rank):
        self.rank = rank

    def __getitem__(self, name):
        return self

    def get_local_rank(self):
        return self.rank

    def get_group(self):
        return None


def test_layers_on_disk(folder):
    """A `device_map` that leaves layers on disk: every tensor of a cache lies where its layer computes."""
    placed = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu", "model.layers.0": "cpu"}
    layers = build("llama-gqa2").config.num_hidden_layers
    placed |= {f"model.layers.{layer}": "disk" for layer in range(1, layers)}
    model = AutoModelForCausalLM.from_pretrained(folder / "model", device_map=placed, offload_folder=folder / "offload")
    whole = AutoModelForCausalLM.from_pretrained(folder / "model")
    want = generate(whole, tokens(30), dense(whole), 8)
    for case in (ALL["full"], ALL["quest"], ALL["h2o"]):
        cache = case.make(model, AMPLE)
        assert torch.equal(generate(model, tokens(30), cache, 8), want)
        assert {t.device.type for layer in cache.sparse_layers for t in layer.tensors().values()} == {"cpu"}


def test_fewer_heads_than_ranks_are_refused():
    model = build("llama-gqa2")  # two key/value heads
    model._tp_size, model._device_mesh = 4, _Mesh(0)
    with pytest.raises(UnsupportedModelError, match="2 key/value heads, which 4 tensor-parallel ranks"):
        kvsparse_hf.FullCache(model)


def test_shares_cover_all_heads():
    for size in (1, 2, 4, 8):
        dealt = [head for rank in range(size) for head in list(range(8))[Ranks(rank, size).share(8)]]
        assert dealt == list(range(8))


@pytest.mark.slow
def test_the_benchmark_runs_on_two_ranks(tmp_path):
    """Its rows say what one rank holds: half of what one process does."""
    shape, names = "llama-4-layers", ["snapkv/eager", "quest/eager", "transformers-dynamic/eager"]
    cases = [decode.Case.parse(f"{name}:1:200:64") for name in names]
    parallel.run(cases, RANKS, shape, tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "multi_gpu.jsonl").read_text().splitlines()]
    assert [row["case"] for row in rows if row["metric"] == "ms_per_token"] == names
    assert all(row["shape"]["gpus"] == RANKS for row in rows)
    held = {row["case"]: row["value"] for row in rows if row["metric"] == "device_bytes"}
    model = models.random_model(shape, "cpu", torch.float32)
    for case in cases[:2]:
        alone = decode.make_cache(case, model, 1)
        models.fill(alone, model, 1, 200)
        assert RANKS * held[case.name] == pytest.approx(alone.report().device_bytes, rel=0.01)


def test_the_benchmark_refuses_what_it_cannot_divide(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(KVSparseError, match="2 GPUs are wanted, 1 are here"):
        parallel.run([], 2, "llama-3.1-8b", tmp_path)
