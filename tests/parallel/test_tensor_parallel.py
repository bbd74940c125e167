"""Tensor parallelism: two processes with half of the heads each do what one process does with all of them. On CPUs, and where
there are two GPUs on those."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import dense, generate, kept_in_all_layers, tokens
from methods import ALL, AMPLE, METHODS
from tiny_models import build
from transformers import AutoModelForCausalLM

import kvsparse_hf
from kvsparse_hf import KVSparseError, SparseCache, UnsupportedModelError, UnsupportedOperationError
from kvsparse_hf.bench import decode, models, parallel
from kvsparse_hf.hf import compat
from kvsparse_hf.ranks import Ranks

WORKER = Path(__file__).with_name("tp_worker.py")
RANKS = 2
CASES = [case.id for case in METHODS]
SHAPE = dict(num_attention_heads=8, num_key_value_heads=4, vocab_size=98)  # what two ranks can divide
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason="needs two GPUs")
MOVING = ["adakv, offload", "tova, offload", "tiered by the last query"]
TURNS = [case.id + ", second turn" for case in METHODS if case.uneven and case.evicts]


def _launch(ranks: int, *arguments: str, device: str = "cpu", timeout: int = 300) -> subprocess.CompletedProcess:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | ({"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {})
    start = [sys.executable] if ranks == 1 else [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={ranks}"]
    command = [*start, *(["--standalone"] if ranks > 1 else []), str(WORKER), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment)


def _model(**options):
    return build("llama-gqa2", **SHAPE, **options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parallel")
    for layers in {case.layers for case in METHODS}:
        _model(num_hidden_layers=layers).save_pretrained(folder / f"model-{layers}")
    model = _model()
    with torch.no_grad():
        cache = kvsparse_hf.SnapKVCache(model, budget=12, window=4, kernel=3)
        model(input_ids=torch.arange(3, 40)[None], **{kvsparse_hf.hf.compat.CACHE_ARGUMENT: cache})
    cache.save(folder / "saved-by-one")
    return folder


def _found(folder, device: str, dtype: str, new: int):
    """What one process found, what each of two did, and the folder of what they saved."""
    output = folder / f"{device}-{dtype}"
    output.mkdir()
    shutil.copytree(folder / "saved-by-one", output / "saved-by-one")
    for ranks in (1, RANKS):
        run = _launch(ranks, str(folder / "model"), str(output), dtype, str(new), device=device)
        assert run.returncode == 0, run.stderr[-3000:]
    many = [torch.load(output / f"found-{rank}-of-{RANKS}.pt") for rank in range(RANKS)]
    return torch.load(output / "found-0-of-1.pt"), many, output


def _together(ranks: list[dict], layer: int) -> list:
    """Kept entries of a layer by row and head, over all ranks."""
    return [sum((rank["kept"][layer][row] for rank in ranks), []) for row in range(2)]


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, two_gpus])])
def found(folder, request):
    return _found(folder, request.param, "float32", 12)


@pytest.fixture(scope="module")
def found_in_half(folder):
    return _found(folder, "cuda", "bfloat16", 1)


@pytest.mark.parametrize("name", [*CASES, *TURNS, *MOVING, "bytes", "kvzip, compressed"])
def test_same_tokens_same_entries_half_the_bytes(found, name):
    one, many = found[0][name], [rank[name] for rank in found[1]]
    assert all(torch.equal(rank["tokens"], one["tokens"]) for rank in many)
    assert [_together(many, layer) for layer in range(len(one["kept"]))] == one["kept"]
    total = sum(rank["bytes"] for rank in many)
    even = not any(word in name for word in ("adakv", "headkv", "duo", "kvzip, compressed"))
    # Tables that count rows, not heads, are on every rank; unequal heads fill the buffers of an earlier prompt less well.
    assert one["bytes"] <= total <= one["bytes"] * (1.02 if even else 1.1)
    assert not even or max(rank["bytes"] for rank in many) <= total / RANKS * 1.001


@pytest.mark.gpu
@two_gpus
@pytest.mark.parametrize("name", [*CASES, *MOVING, "bytes", "kvzip, compressed"])
def test_bfloat16_keeps_the_same_entries(found_in_half, name):
    """After the prompt. Partial sums of two ranks are rounded before they are added, so from the second layer on two entries of
    nearly the same score may change places."""
    one, many = found_in_half[0][name], [rank[name] for rank in found_in_half[1]]
    if len(one["kept"]) > 1:  # else the first layer is read by the second, and hears its queries
        assert _together(many, 0) == one["kept"][0]
    pairs = [
        (set(mine), set(theirs))
        for layer, rows in enumerate(one["kept"])
        for row, heads in enumerate(rows)
        for mine, theirs in zip(heads, _together(many, layer)[row], strict=True)
    ]
    assert sum(len(mine & theirs) for mine, theirs in pairs) >= 0.98 * sum(len(mine) for mine, _ in pairs)


def test_a_byte_budget_counts_all_ranks(found):
    assert found[0]["bytes"]["kept"] != [] and sum(rank["bytes"]["bytes"] for rank in found[1]) <= found[0]["bytes"]["bytes"] * 1.02


def test_saved_by_every_rank(found):
    for rank in found[1]:
        assert rank["saved"]["kept"]
        assert "1 tensor-parallel rank" in rank["saved"]["refusal"]
    assert sorted(path.name for path in (found[2] / "saved").glob("rank-*")) == ["rank-0-of-2", "rank-1-of-2"]


def test_a_config_does_not_tell_of_ranks(found):
    assert found[0]["from a config"] == ""
    assert all("divided among processes" in rank["from a config"] for rank in found[1])


def test_loading_on_another_number_of_ranks_is_refused(found, tmp_path):
    only = tmp_path / "saved"
    only.mkdir()
    shutil.copytree(found[2] / "saved" / "rank-0-of-2", only / "rank-0-of-2")
    model = _model()
    with pytest.raises(UnsupportedOperationError, match="2 tensor-parallel rank"):
        SparseCache.load(only, model)


def test_saving_over_what_other_ranks_saved(found, tmp_path):
    """The folder then holds the new cache alone."""
    model, saved = _model(), tmp_path / "saved"
    shutil.copytree(found[2] / "saved", saved)
    cache = kvsparse_hf.FullCache(model)
    generate(model, tokens(20), cache, 3)
    cache.save(saved)
    assert sorted(path.name for path in saved.iterdir()) == ["cache.json", "cache.safetensors"]
    assert kept_in_all_layers(SparseCache.load(saved, model)) == kept_in_all_layers(cache)


def test_a_rank_that_fails_ends_all(folder):
    run = _launch(RANKS, str(folder / "model"), str(folder), "fail", "1", timeout=120)
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


def divided(model, size: int):
    """The model as the first of `size` processes sees it, without the others."""
    model._tp_size, model._device_mesh = size, _Mesh(0)
    return model


def test_layers_on_disk(folder):
    """A `device_map` that leaves layers on disk: every tensor of a cache lies where its layer computes."""
    placed = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu", "model.layers.0": "cpu"}
    layers = build("llama-gqa2").config.num_hidden_layers
    placed |= {f"model.layers.{layer}": "disk" for layer in range(1, layers)}
    model = AutoModelForCausalLM.from_pretrained(folder / "model-2", device_map=placed, offload_folder=folder / "offload")
    whole = AutoModelForCausalLM.from_pretrained(folder / "model-2")
    want = generate(whole, tokens(30), dense(whole), 8)
    for case in (ALL["full"], ALL["quest"], ALL["h2o"]):
        cache = case.make(model, AMPLE)
        assert torch.equal(generate(model, tokens(30), cache, 8), want)
        assert {t.device.type for layer in cache.sparse_layers for t in layer.tensors().values()} == {"cpu"}


def test_fewer_heads_than_ranks_are_refused():
    model = divided(build("llama-gqa2"), 4)  # two key/value heads
    with pytest.raises(UnsupportedModelError, match="2 key/value heads, which 4 tensor-parallel ranks"):
        kvsparse_hf.FullCache(model)


def test_shares_cover_all_heads():
    for size in (1, 2, 4, 8):
        dealt = [head for rank in range(size) for head in list(range(8))[Ranks(rank, size).share(8)]]
        assert dealt == list(range(8))


@pytest.mark.slow
@pytest.mark.skipif(
    not torch.cuda.is_available() and "tp_plan" in compat.tensor_parallel(),
    reason="older Transformers put the weights that a checkpoint lacks on an accelerator",
)
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
