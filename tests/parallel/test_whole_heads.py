"""Tensor parallelism where every rank holds all heads: it does what a single process does. The plan of Phi-3 gathers queries, keys
and values on every rank; that of gpt-oss leaves the attention alone (old versions have none for it)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers import kept_in_all_layers, tokens
from test_tensor_parallel import RANKS, SHAPE, divided
from tiny_models import build
from whole_heads_worker import NAMES, find

import kvsparse_hf
from kvsparse_hf import SparseCache, UnsupportedOperationError
from kvsparse_hf.hf.compat import CACHE_ARGUMENT
from kvsparse_hf.ranks import Ranks

pytestmark = pytest.mark.slow  # two processes, for most of a minute
WORKER = Path(__file__).with_name("whole_heads_worker.py")
MODELS = ("phi3-partial", "gpt-oss")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """By model: the model, what this process finds, what each of two ranks found, and where these saved a cache."""
    folder = tmp_path_factory.mktemp("whole-heads")
    models = {name: build(name, **SHAPE) for name in MODELS}
    for name, model in models.items():
        model.save_pretrained(folder / name)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={RANKS}", str(WORKER), str(folder)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([*command, *MODELS], capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    ranks = [torch.load(folder / f"found-{rank}") for rank in range(RANKS)]
    with torch.no_grad():
        return {
            name: (model, find(model, folder / "saved-by-one" / name), [rank[name] for rank in ranks], folder / f"{name}-saved")
            for name, model in models.items()
        }


@pytest.mark.parametrize("method", [*NAMES, "adakv, second turn", "bytes", "kvzip, compressed", "saved"])
@pytest.mark.parametrize("name", MODELS)
def test_each_rank_keeps_what_one_process_does(found, name, method):
    _, one, ranks, _ = found[name]
    for rank in ranks:
        assert torch.equal(rank[method]["tokens"], one[method]["tokens"])
        assert rank[method]["kept"] == one[method]["kept"] and rank[method]["bytes"] == one[method]["bytes"]


@pytest.mark.parametrize("name", MODELS)
def test_the_ranks_save_as_one_process(found, name):
    """And one process loads it."""
    model, one, _, saved = found[name]
    assert sorted(path.name for path in saved.iterdir()) == ["cache.json", "cache.safetensors"]
    assert kept_in_all_layers(SparseCache.load(saved, model)) == one["saved"]["kept"]


@pytest.mark.parametrize("name", MODELS)
def test_the_ranks_name_the_model_alike(found, name):
    """Each has other weights: the first rank's name it, for an evaluation that all ranks write down as the same."""
    assert len({rank["weights"] for rank in found[name][2]}) == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_rank_acts_between_two_barriers(monkeypatch, rank):
    done = []
    monkeypatch.setattr(dist, "barrier", lambda group: done.append("barrier"))
    Ranks(rank, RANKS).only_first(lambda: done.append("act"))
    assert done == ["barrier", *["act"][rank:], "barrier"]


def test_the_others_do_not_wait_for_a_first_rank_that_failed(monkeypatch):
    def fail():
        raise OSError("disk full")

    done = []
    monkeypatch.setattr(dist, "barrier", lambda group: done.append("barrier"))
    with pytest.raises(OSError, match="disk full"):
        Ranks(0, RANKS).only_first(fail)
    assert done == ["barrier"] * 2


def test_heads_need_not_divide_where_each_rank_has_all():
    cache = kvsparse_hf.FullCache(divided(build("phi3-partial"), 4))  # two key/value heads
    assert cache.binding.ranks.size == 1 and cache.binding.processes.size == 4


def test_all_heads_where_a_share_is_expected_are_refused():
    """A plan that we would misread: shared budgets would be wrong."""
    model = divided(build("llama-gqa2", **SHAPE | {"num_key_value_heads": 2}), RANKS)
    cache = kvsparse_hf.AdaKVCache(model, budget=12, window=4)
    with torch.no_grad(), pytest.raises(UnsupportedOperationError, match="got keys with 2 on each of 2 ranks"):
        model(input_ids=tokens(20), **{CACHE_ARGUMENT: cache})
