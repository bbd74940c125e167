"""`kvsparse eval --tensor-parallel`: two processes with half of the heads each give what one gives. On CPUs, and where there are
two GPUs on those."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from eval_tools import KV, SMALL, answers, refused, rows, run
from tiny_folder import save_tiny_folder
from transformers import GPT2Config

from kvsparse_hf import KVSparseError, UnsupportedModelError
from kvsparse_hf.cli.loading import load_model
from kvsparse_hf.eval.parallel import World

RANKS = 2
FAILING = str(Path(__file__).with_name("failing_rank.py"))
ADAKV = "adakv-1024:budget=24,window=8"
ASKED = (*KV, "-b", 2, "--dtype", "float32", "-p", SMALL, "-p", ADAKV)
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason="needs two GPUs")


def _launch(device: str, *arguments) -> subprocess.CompletedProcess:
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={RANKS}"]
    return subprocess.run(
        [*start, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=200,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | hidden,
    )


def _command(model: Path, output: Path) -> tuple:
    task, *asked = ASKED
    return ("eval", task, "--model", model, *asked, "--tensor-parallel", "-o", output)


def _facts(output: Path) -> dict[str, dict]:
    """What each run was made of, by method."""
    found = [json.loads(path.read_text()) for path in output.glob("runs/*/facts.json")]
    return {facts["cache"]["method"]: facts for facts in found}


@pytest.fixture(scope="module")
def divisible(tmp_path_factory):
    """A model whose heads and words two ranks can divide."""
    folder = tmp_path_factory.mktemp("divisible")
    return save_tiny_folder(folder, vocab_size=260, num_attention_heads=8, num_key_value_heads=4)


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, two_gpus])])
def found(request, divisible, tmp_path_factory):
    """What one process wrote, what two did, and what these printed."""
    one, two = tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("two")
    assert run(divisible, *ASKED, "--device", request.param, "-o", one).exit_code == 0
    done = _launch(request.param, "-m", "kvsparse_hf.cli", *_command(divisible, two))
    assert done.returncode == 0, done.stderr[-3000:]
    return one, two, done.stdout


def test_two_ranks_answer_and_hold_what_one_process_does(found):
    one, two, _ = found
    for case in ("full", "snapkv", "adakv"):
        assert answers(one, case) == answers(two, case)
    for alone, divided in zip(rows(one), rows(two), strict=True):
        assert all(alone[name] == divided[name] for name in ("case", "value", "n", "scores", "minus_full", "bytes"))
        assert alone["shape"] | {"ranks": RANKS} == divided["shape"] and alone["shape"]["ranks"] == 1


def test_only_the_number_of_ranks_tells_the_runs_apart(found):
    one, two, _ = found
    assert {name: facts | {"ranks": RANKS} for name, facts in _facts(one).items()} == _facts(two)
    assert not {path.name for path in one.glob("runs/*")} & {path.name for path in two.glob("runs/*")}


@pytest.mark.slow  # so that only one of two test processes starts ranks
def test_one_rank_prints_and_writes(found):
    _, two, printed = found
    assert printed.count("divided among 2 ranks") == printed.count("answers:") == 1
    assert {path.name for path in two.glob("runs/*/*.jsonl")} == {"answers-0.jsonl"}


@pytest.mark.slow
def test_a_rank_that_fails_ends_all_and_the_next_run_goes_on(divisible, tmp_path):
    failed = _launch("cpu", FAILING, *_command(divisible, tmp_path))
    assert failed.returncode != 0 and "this rank fails on purpose" in failed.stderr
    (file,) = tmp_path.rglob("*.jsonl")  # no row is written
    kept = file.read_bytes()
    assert kept.count(b"\n") == 2, "one batch was answered"
    done = _launch("cpu", "-m", "kvsparse_hf.cli", *_command(divisible, tmp_path))
    assert done.returncode == 0, done.stderr[-3000:]
    assert file.read_bytes().startswith(kept) and file.read_bytes().count(b"\n") == 5
    assert [row["n"] for row in rows(tmp_path)] == [5, 5, 5]


def test_one_process_has_nothing_to_divide(folder, tmp_path, monkeypatch):
    for size in (None, "1"):
        monkeypatch.delenv("WORLD_SIZE", raising=False)
        if size is not None:
            monkeypatch.setenv("WORLD_SIZE", size)
        refused(run(folder, *KV, "--tensor-parallel", "-o", tmp_path / "out"), "--tensor-parallel", "torchrun")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("gpus", "device", "words"), [(0, "cuda", "the CPU"), (2, "cpu", "its own GPU"), (2, "cuda:0", "its own GPU"), (1, "auto", "(1)")]
)
def test_a_device_that_is_not_the_ranks_own_is_refused(folder, tmp_path, monkeypatch, gpus, device, words):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    refused(run(folder, *KV, "--tensor-parallel", "--device", device, "-o", tmp_path / "out"), "--tensor-parallel", words)
    assert not dist.is_initialized() and not (tmp_path / "out").exists()


def test_a_model_that_no_plan_divides_is_refused(tmp_path):
    folder = save_tiny_folder(tmp_path)
    GPT2Config().save_pretrained(folder)
    with pytest.raises(UnsupportedModelError, match="gpt2.*no plan that divides"):
        load_model(folder, torch.device("cpu"), torch.float32, divided=True)


def test_ranks_that_would_ask_different_questions_end(monkeypatch):
    """The other rank is played: it found the same, or something else."""
    asked, ranks = [], World(0, RANKS, tensor_parallel=True)

    def gather(found, mine):
        asked.append(mine)
        found[:] = [mine, asked[0]]

    monkeypatch.setattr(dist, "all_gather_object", gather)
    ranks.agree(["a", "b"], "the examples")
    with pytest.raises(KVSparseError, match="differ in the examples"):
        ranks.agree(["b", "a"], "the examples")
    World(1, RANKS).agree(["c"], "the examples")  # each has a whole model: they need not agree
    assert len(asked) == 2
