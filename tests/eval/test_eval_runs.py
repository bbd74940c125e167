"""Runs of `kvsparse eval` on a tiny model: what they score and write."""

import json
import math
import re
from pathlib import Path

import pytest
import torch
from eval_tools import AMPLE, KV, SMALL, answers, rows, run

import kvsparse_hf as kv
from kvsparse_hf.eval.summary import Mean, summarise


def test_row_table_and_figure_of_a_run(folder, tmp_path):
    pytest.importorskip("matplotlib")
    result = run(folder, *KV, "-p", SMALL, "-p", "full", "-o", tmp_path)
    assert result.exit_code == 0, result.output
    full, small = rows(tmp_path)
    assert (
        (full["case"], small["case"]) == ("full", SMALL)
        and full["suite"] == "eval"
        and full["metric"] == "kv/accuracy"
    )
    assert full["n"] == 5 and full["value"] == 0.0 and full["se"] == 0.0 and full["unit"] == "%"
    assert full["shape"]["model"] == folder.name and small["shape"]["budget"] == 24 and full["shape"]["chat"] is True
    assert full["versions"]["torch"] == torch.__version__ and full["versions"]["kvsparse_hf"] == kv.__version__
    entry = 2 * 16 * 4 + 4  # key and value of 16 floats, and a position, in each of 2 layers and 2 heads
    kept = answers(tmp_path, "full").values()
    dense_bytes = sum(row["prompt_tokens"] + 5 for row in kept) / 5 * 4 * 2 * 16 * 4
    assert full["bytes"]["dense"] == pytest.approx(dense_bytes, rel=0.02)  # all rows go on to the longest answer
    assert full["bytes"]["held"] == pytest.approx(full["bytes"]["dense"], rel=0.10)
    assert 4 * 24 * entry <= small["bytes"]["held"] <= 4 * (24 + 6) * entry * 1.3 < full["bytes"]["held"] / 3
    assert "accuracy" in result.stdout and "5 examples" in result.stdout
    assert (tmp_path / f"kv-{folder.name}.png").stat().st_size > 5000


@pytest.mark.parametrize(
    "arguments",
    [
        ("kv", "-t", "pairs=2", "--limit", 3, "--max-new-tokens", 6),
        ("lines", "-t", "lines=4", "--limit", 3, "--max-new-tokens", 6),
        ("passkey", "--limit", 2, "--max-new-tokens", 6),
        ("multiturn", "-t", "length=900", "-t", "questions=2", "--limit", 1, "--max-new-tokens", 6),
        (
            "ruler",
            "-t",
            "tasks=niah_single,vt",
            "-t",
            "lengths=[900,1300]",
            "-t",
            "depths=[0,1]",
            "--limit",
            1,
            "--max-new-tokens",
            6,
        ),
        ("ppl", "-t", "prompt=40", "-t", "tokens=12", "--limit", 2, "--data", Path(__file__)),
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_budget_that_holds_everything_changes_nothing(folder, tmp_path, arguments):
    result = run(folder, *arguments, "-p", AMPLE, "-b", 2, "-o", tmp_path)
    assert result.exit_code == 0, result.output
    full, ample = rows(tmp_path)
    assert full["minus_full"] is None and ample["minus_full"]["value"] == 0.0
    assert full["n"] == ample["n"] and full["scores"] == ample["scores"] and full["subsets"] == ample["subsets"]
    one, other = answers(tmp_path, "full"), answers(tmp_path, "snapkv")
    assert {name: row["answers"] for name, row in one.items()} == {name: row["answers"] for name, row in other.items()}
    if arguments[0] == "ruler":
        assert {tuple(cell[:2]) for cell in full["cells"]} == {(900, 0), (900, 1), (1300, 0), (1300, 1)}
        assert set(full["subsets"]) == {"niah_single", "vt"}
    if arguments[0] == "ppl":
        assert full["unit"] == "nats/token" and full["scores"]["ppl"]["value"] == pytest.approx(
            math.exp(full["value"]), rel=1e-3
        )


def test_a_grid_becomes_a_heat_map(folder, tmp_path):
    pytest.importorskip("matplotlib")
    common = (
        "-t",
        "tasks=niah_single",
        "-t",
        "lengths=[900,1300]",
        "-t",
        "depths=[0,1]",
        "--limit",
        1,
        "--max-new-tokens",
        3,
    )
    result = run(folder, "ruler", *common, "-p", SMALL, "-o", tmp_path)
    assert result.exit_code == 0 and "full cache scores 0" in result.stdout
    assert (tmp_path / f"ruler-{folder.name}-grid.png").stat().st_size > 5000


def test_gsm8k_and_longbench_run(folder, tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    (data / "test.jsonl").write_text(json.dumps({"question": "1 + 1?", "answer": "#### 2"}) + "\n")
    row = {"input": "", "context": "Text", "answers": ["words"], "all_classes": None}
    for name in ("hotpotqa", "samsum"):
        (data / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    pytest.importorskip("rouge")
    for task in ("gsm8k", "longbench"):
        result = run(folder, task, "--data", data, "--max-new-tokens", 4, "-o", tmp_path)
        assert result.exit_code == 0, result.output
    gsm8k, longbench = rows(tmp_path)
    (kept,) = (tmp_path / "runs").glob("gsm8k-*/answers-0.jsonl")
    (said,) = json.loads(kept.read_text())["answers"]
    without_number = 0 if re.search(r"\d|[$.,]{2}", said) else 100  # the flexible rule takes "$." for a number
    assert list(gsm8k["scores"]) == ["flexible_extract", "strict_match", "invalid"]
    assert gsm8k["scores"]["invalid"]["value"] == without_number
    assert set(longbench["subsets"]) == {"hotpotqa", "samsum"} and longbench["n"] == 2


def test_a_batch_gives_what_each_row_gives_alone(folder, tmp_path):
    for size in (1, 5):
        assert run(folder, *KV, "-p", SMALL, "-b", size, "-o", tmp_path / str(size)).exit_code == 0
    said = [[row["answers"] for row in answers(tmp_path / "1", case).values()] for case in ("full", "snapkv")]
    assert said[0] != said[1], "the budget matters"
    for case in ("full", "snapkv"):
        alone, together = (answers(tmp_path / size, case) for size in "15")
        assert len(alone) == 5
        assert {name: row["answers"] for name, row in alone.items()} == {
            name: row["answers"] for name, row in together.items()
        }


def test_fast_decode_gives_the_same_answers(folder, tmp_path):
    for flag in ("--fast", "--no-fast"):
        assert run(folder, *KV, "-p", SMALL, flag, "-o", tmp_path / flag).exit_code == 0
    for case in ("full", "snapkv"):
        fast, plain = (answers(tmp_path / flag, case) for flag in ("--fast", "--no-fast"))
        assert {name: row["answers"] for name, row in fast.items()} == {
            name: row["answers"] for name, row in plain.items()
        }


# --- sums


def test_means_and_their_errors():
    mean = Mean.of([0.0, 1.0, 1.0, 0.0])
    assert (mean.value, mean.n) == (0.5, 4) and mean.se == pytest.approx(math.sqrt(1 / 3) / 2)
    assert Mean.of([3.0]).se is None
    both = Mean.of_means([Mean(1.0, 0.3, 5), Mean(3.0, 0.4, 7)])
    assert (both.value, both.n) == (2.0, 12) and both.se == pytest.approx(0.25)


def test_the_score_is_the_mean_of_the_parts():
    def made(part, score):
        return {"subset": part, "group": {}, "scores": {"score": score}, "bytes": {"held": 5, "host": 1, "dense": 12, "read": 5},
                "prompt_tokens": 3, "new_tokens": 1}  # fmt: skip

    found = summarise([made("a", 1.0), made("a", 1.0), made("b", 0.0), made("b", 0.0), made("b", 0.0)], "score", "%")
    assert found.scores["score"].value == 50.0 and found.subsets["a"]["score"].value == 100.0 and found.share == 0.5


def test_the_difference_to_the_full_cache_is_paired():
    def made(name, score):
        return {
            "id": name,
            "subset": "",
            "group": {},
            "scores": {"nll": score},
            "bytes": {},
            "prompt_tokens": 3,
            "new_tokens": 1,
        }

    base, mine = ([made("a", 1.0 + d), made("b", 9.0 + d), made("c", 5.0 + d)] for d in (0.0, 0.5))
    mine.reverse()
    found = summarise(
        [{**row, "bytes": {"held": 1, "host": 0, "dense": 2}} for row in mine], "nll", "nats/token", base
    )
    assert found.difference == Mean(0.5, 0.0, 3) and found.scores["nll"].se > 1
