"""The reasoning experiment in small: what is evicted costs likelihood, what is moved or rounded to eight bits does not."""

import json
import sys
from pathlib import Path

import pytest
import torch
from helpers import tokens
from huggingface_hub import snapshot_download
from tiny_folder import save_tiny_folder
from tiny_models import build
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvsparse_hf.bench.timing import Results
from kvsparse_hf.demo.model import REPOSITORY, cache_folder

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import reasoning
from reasoning import answer, cell_shape, cells, prompts, score_texts

SHORT = dict(interval=8, sinks=2, recent=8)
QUESTION = "A farmer has 12 hens. Each hen lays 2 eggs a day. He sells the eggs for $3 a dozen. How much does he earn in 5 days?"
REASONING = (
    "The farmer has 12 hens and each hen lays 2 eggs a day, so he gets 12 * 2 = 24 eggs a day. A dozen is 12 eggs, so 24 eggs are "
    "24 / 12 = 2 dozen. He sells each dozen for $3, so he earns 2 * 3 = $6 a day. In 5 days he earns 5 * 6 = $30.\n#### 30"
)


def _local_model() -> Path:
    folder = cache_folder() / "SmolLM2-135M-Instruct-Q4_1"
    if folder.is_dir():
        return folder
    try:
        return Path(snapshot_download(REPOSITORY, local_files_only=True))
    except OSError:
        pytest.skip(f"{REPOSITORY} is in no local cache; `kvsparse demo` brings it there")


def test_names_of_cells():
    made = cells(16, 4, 16)
    assert list(made)[:3] == ["full", "evicted=0 hbm=1", "evicted=0 hbm=0.5"] and len(made) == 1 + 5 * 3 + 3
    assert cell_shape("evicted=0.03 hbm=0.25") == {"evicted": 0.03, "hbm": 0.25}
    assert cell_shape("quantized=0.75 bits=fp8") == {"quantized": 0.75, "bits": "fp8"} and cell_shape("full") == {}


def test_a_random_model_shows_that_nothing_is_lost_by_moving():
    model = build()
    pairs = [(tokens(length, seed=length)[0].tolist(), tokens(40, seed=length + 1)[0].tolist()) for length in (30, 17, 50)]
    made = cells(**SHORT, evicted=(0.0, 0.5), resident=(1.0, 0.25), bits=(8,), group=16)
    loss = score_texts(model, pairs, made, batch=2)
    assert loss["evicted=0 hbm=1"] == pytest.approx(loss["full"], abs=1e-5)
    assert loss["evicted=0 hbm=0.25"] == pytest.approx(loss["full"], abs=1e-5)
    assert loss["evicted=0.5 hbm=0.25"] == pytest.approx(loss["evicted=0.5 hbm=1"], abs=1e-5)
    assert abs(loss["evicted=0.5 hbm=1"] - loss["full"]) > 1e-4


def test_answers_end_where_the_model_ends_them():
    model = build()
    model.generation_config.eos_token_id = 7

    class Tokenizer:
        pad_token_id = 0

    ids = [tokens(20)[0].tolist(), tokens(11, seed=2)[0].tolist()]
    made = cells(**SHORT, evicted=(0.0,), resident=(0.5,), bits=())
    texts = [answer(model, Tokenizer, ids, make(model), 30) for make in made.values()]
    assert texts[0] == texts[1] and all(7 not in row and len(row) <= 30 for row in texts[0])


def test_answers_are_scored_as_those_of_the_task(tmp_path, monkeypatch):
    model, tokenizer = build(), AutoTokenizer.from_pretrained(save_tiny_folder(tmp_path / "model"))
    rows = [{"question": "1 and 1?", "answer": "#### 2"}, {"question": "2 and 1?", "answer": "#### 3"}]
    said = dict(zip(map(tuple, prompts(tokenizer, [row["question"] for row in rows])), ("It is\n2", "three"), strict=True))
    monkeypatch.setattr(
        reasoning, "answer",
        lambda model, tokenizer, ids, cache, new: [tokenizer(said[tuple(row)], add_special_tokens=False).input_ids for row in ids],
    )  # fmt: skip
    monkeypatch.setattr(reasoning, "shares_held", lambda cache: (1.0, 0.0))
    results = Results(tmp_path, "reasoning")
    reasoning.measure_accuracy(model, tokenizer, rows, {"full": lambda model: None}, 2, 4, results, {})
    found = {row["metric"]: row["value"] for row in map(json.loads, results.path.read_text().splitlines())}
    assert (found["flexible_extract"], found["strict_match"], found["invalid"]) == (0.5, 0.0, 0.5)


@pytest.mark.slow
def test_likelihood_falls_with_what_is_evicted_not_with_what_is_resident():
    folder = _local_model()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    pairs = [(prompts(tokenizer, [QUESTION])[0], tokenizer(REASONING, add_special_tokens=False).input_ids)]
    loss = score_texts(model, pairs, cells(**SHORT, evicted=(0.0, 0.5), resident=(1.0, 0.25), bits=(8,)), batch=1)
    assert loss["evicted=0 hbm=0.25"] == pytest.approx(loss["full"], abs=1e-4)
    assert loss["evicted=0.5 hbm=0.25"] == pytest.approx(loss["evicted=0.5 hbm=1"], abs=1e-4)
    gone, rounded = loss["evicted=0.5 hbm=1"] - loss["full"], loss["quantized=0.75 bits=8"] - loss["full"]
    assert gone > 0.02 and abs(rounded) < 0.5 * gone


@pytest.mark.parametrize("mode", [[], ["--nll"]], ids=["accuracy", "nll"])
def test_the_script_writes_rows_and_a_plot(tmp_path, monkeypatch, mode):
    pytest.importorskip("matplotlib", reason="the plot needs matplotlib (extra 'eval')")
    folder = save_tiny_folder(tmp_path / "model")
    data = tmp_path / "questions.jsonl"
    data.write_text("".join(json.dumps({"question": f"{n} and {n}?", "answer": f"#### {2 * n}"}) + "\n" for n in range(5)))
    arguments = [str(folder), "--data", str(data), "--questions", "3", "--batch", "2", "--new", "4", "--output", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["reasoning.py", *arguments, "--threads", "1", *mode])
    monkeypatch.setattr(reasoning, "cells", lambda **setting: cells(**setting, evicted=(0.0, 0.5), resident=(1.0, 0.25), bits=(8,), group=8))
    reasoning.main()
    rows = [json.loads(line) for line in (tmp_path / "reasoning.jsonl").read_text().splitlines()]
    metrics = {"nll", "nll_over_full"} if mode else {"flexible_extract", "strict_match", "invalid"}
    assert {row["metric"] for row in rows} == metrics | {"device_share", "host_share"}
    assert {row["case"] for row in rows} == set(reasoning.cells(**SHORT))
    shape = next(row["shape"] for row in rows if row["case"] == "evicted=0.5 hbm=0.25")
    assert shape["interval"] == 16 and shape["recent"] == 16 and shape["evicted"] == 0.5 and shape["questions"] == 3
    assert (tmp_path / f"reasoning{'_nll' if mode else ''}.png").stat().st_size > 10_000
