"""Interrupted runs, and runs in several processes."""

import os
import subprocess
import sys

import pytest
from eval_tools import KV, SMALL, answers, rows, run

from kvsparse_hf import KVSparseError
from kvsparse_hf.eval.contenders import Contender
from kvsparse_hf.eval.engine import Engine
from kvsparse_hf.eval.jsonl import JsonLines
from kvsparse_hf.eval.runner import Run, fingerprint
from kvsparse_hf.eval.tasks import get_task


def test_an_interrupted_run_goes_on_and_no_row_stands_twice(folder, tmp_path, monkeypatch):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert run(folder, *KV, "-b", 2, "-o", whole).exit_code == 0
    asked, answer = [], Engine.answer

    def interrupted(self, examples, cache):
        asked.extend(example.id for example in examples)
        if len(asked) > 4:
            raise KeyboardInterrupt
        return answer(self, examples, cache)

    monkeypatch.setattr(Engine, "answer", interrupted)
    assert run(folder, *KV, "-b", 2, "-o", broken).exit_code != 0
    (file,) = broken.glob("runs/*/answers-0.jsonl")
    content = file.read_bytes()
    assert content.count(b"\n") == 4 and not (broken / "eval.jsonl").exists()
    file.write_bytes(content[:-40])  # in the middle of the fourth line
    asked.clear()
    monkeypatch.setattr(
        Engine,
        "answer",
        lambda self, examples, cache: asked.extend(e.id for e in examples) or answer(self, examples, cache),
    )
    assert run(folder, *KV, "-b", 2, "-o", broken).exit_code == 0
    assert len(asked) == 2, "three answers were kept"
    assert len({row["id"] for row in JsonLines(file).read()}) == len(file.read_bytes().splitlines()) == 5
    assert answers(broken, "full") == answers(whole, "full") and rows(broken)[0]["value"] == rows(whole)[0]["value"]
    asked.clear()
    assert run(folder, *KV, "-b", 2, "-o", broken).exit_code == 0
    assert not asked and len(rows(broken)) == 1


def test_a_higher_limit_asks_only_what_is_new(folder, tmp_path, monkeypatch):
    asked, answer = [], Engine.answer
    monkeypatch.setattr(
        Engine,
        "answer",
        lambda self, examples, cache: asked.extend(e.id for e in examples) or answer(self, examples, cache),
    )
    for limit, expected in ((2, ["0", "1"]), (4, ["2", "3"]), (3, [])):
        asked.clear()
        result = run(folder, "kv", "-t", "pairs=2", "--limit", limit, "--max-new-tokens", 4, "-o", tmp_path)
        assert result.exit_code == 0 and sorted(asked) == expected
    assert [row["n"] for row in rows(tmp_path)] == [2, 4, 3]


def test_another_question_or_model_is_asked_anew(folder, tmp_path, engine):
    task = get_task("kv", pairs=2)
    first = Run.plan(task, Contender.parse("full"), engine, "m", 0, tmp_path)
    assert Run.plan(task, Contender.parse("full"), engine, "m", 0, tmp_path).key == first.key
    assert Run.plan(task, Contender.parse("full"), engine, "m", 1, tmp_path).key != first.key
    assert Run.plan(get_task("kv", pairs=3), Contender.parse("full"), engine, "m", 0, tmp_path).key != first.key
    before = fingerprint(engine.model)
    weight = next(engine.model.parameters())
    kept = weight.detach().flatten()[0].clone()
    weight.data.view(-1)[0] += 1
    assert fingerprint(engine.model) != before
    weight.data.view(-1)[0] = kept


@pytest.mark.parametrize("tail", [b'{"id": "2", "sc', b'{"id": "2"', b"\x00\x00", b"{}x\n"])
def test_an_unfinished_line_is_removed(tmp_path, tail):
    file = JsonLines(tmp_path / "rows.jsonl")
    file.append({"id": "1"})
    good = file.path.read_bytes()
    file.path.write_bytes(good + tail)
    assert file.read(repair=False) == [{"id": "1"}] and file.path.read_bytes() == good + tail
    assert file.read() == [{"id": "1"}] and file.path.read_bytes() == good
    file.append({"id": "2"})
    assert file.read() == [{"id": "1"}, {"id": "2"}]


def test_a_whole_line_without_its_end_is_kept(tmp_path):
    file = JsonLines(tmp_path / "rows.jsonl")
    file.path.write_bytes(b'{"id": "1"}')
    assert file.read() == [{"id": "1"}]
    file.append({"id": "2"})
    assert file.read() == [{"id": "1"}, {"id": "2"}]


def test_a_damaged_line_before_the_last_is_named(tmp_path):
    file = JsonLines(tmp_path / "rows.jsonl")
    file.path.write_bytes(b'{"id": "1"}\n{"id"\n{"id": "3"}\n')
    with pytest.raises(KVSparseError, match="line 2 is damaged"):
        file.read()


# --- several processes


def test_one_process_instead_of_several_is_noted(monkeypatch):
    from kvsparse_hf.eval.parallel import World

    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert World.current("auto").size == 1 and World().note() is None
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    monkeypatch.setenv("MASTER_PORT", "29500")  # accelerate sets it for more than one process
    assert "one process only" in World().note()


@pytest.mark.slow
@pytest.mark.parametrize("task", ["kv", "recall"])
def test_two_processes_give_what_one_gives(folder, tmp_path, task):
    asked = {
        "kv": ("--model", folder, "-t", "pairs=2", "--limit", 7, "--max-new-tokens", 6),
        "recall": ("-t", "lengths=400", "-t", "steps=6", "--limit", 5),
    }[task]
    arguments = ["eval", task, *map(str, asked), "--device", "cpu", "-b", "2", "-p", SMALL]
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1",
              "--mixed_precision", "no", "--dynamo_backend", "no", "-m", "kvsparse_hf.cli"]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    # accelerate starts processes on a CPU as it does on GPUs; with --cpu it starts one, whatever the number.
    for name, start in (("one", [sys.executable, "-m", "kvsparse_hf.cli"]), ("two", launch)):
        done = subprocess.run(
            [*start, *arguments, "-o", str(tmp_path / name)],
            capture_output=True,
            text=True,
            env=environment,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "two").glob("runs/*/answers-1.jsonl"))) == 2, "both processes answered"
    for case in ("full", "snapkv"):
        assert answers(tmp_path / "one", case) == answers(tmp_path / "two", case)
    one, two = rows(tmp_path / "one"), rows(tmp_path / "two")
    assert [row["scores"] for row in one] == [row["scores"] for row in two] and len(two) == 2
    if task == "recall":
        assert one[0]["value"] >= 90
