"""lm-eval's model type `kvsparse`, on a local task file and without a network."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'kvsparse_hf[eval]'")

import lm_eval
from lm_eval.tasks import TaskManager
from transformers import AutoModelForCausalLM

from kvsparse_hf import FullCache, KVSparseError, OptionError, SnapKVCache
from kvsparse_hf.eval.lm_eval import KVSparseLM
from kvsparse_hf.recall import make_questions
from kvsparse_hf.recall.model import FOLDER

ROOT = Path(__file__).parents[2]
STORY = "The ferry leaves at noon. " * 6
TASKS = {
    "tiny_generate": """
task: tiny_generate
dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
test_split: test
output_type: generate_until
doc_to_text: "{{{{text}}}}"
doc_to_target: "{{{{choices[0]}}}}"
generation_kwargs:
  until: ["zz"]
  max_gen_toks: 8
metric_list:
  - metric: exact_match
""",
    "tiny_choice": """
task: tiny_choice
dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{text}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: 0
metric_list:
  - metric: acc
""",
}


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    """A folder with two task files and their data; nothing is looked up elsewhere."""
    folder = tmp_path_factory.mktemp("tasks")
    data = folder / "data.jsonl"
    docs = [
        {"text": f"{number}. {STORY}When?", "choices": [" at noon", " at night", f" {number}"]} for number in range(4)
    ]
    data.write_text("".join(json.dumps(doc) + "\n" for doc in docs), encoding="utf-8")
    for name, text in TASKS.items():
        (folder / f"{name}.yaml").write_text(text.format(file=data), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def manager(local):
    return TaskManager(include_path=str(local), include_defaults=False)


@pytest.fixture(autouse=True)
def _offline(monkeypatch, tmp_path):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "datasets"))


def evaluate(folder, manager, model, tasks=tuple(TASKS), **arguments):
    found = lm_eval.simple_evaluate(
        model=model,
        model_args={"pretrained": str(folder), "dtype": "float32", **arguments},
        tasks=list(tasks),
        task_manager=manager,
        batch_size=3,
        device="cpu",
        bootstrap_iters=0,
    )
    return {name: [sample["filtered_resps"] for sample in found["samples"][name]] for name in tasks}, found["results"]


def test_a_budget_that_holds_everything_scores_as_the_plain_model(folder, manager):
    plain, scores = evaluate(folder, manager, "hf")
    for preset in ({"preset": "full"}, {"preset": "snapkv-512", "budget": 4096}):
        mine, mine_scores = evaluate(folder, manager, "kvsparse", **preset)
        assert mine["tiny_generate"] == plain["tiny_generate"] and len(set(map(str, plain["tiny_generate"]))) > 1
        for one, other in zip(mine["tiny_choice"], plain["tiny_choice"], strict=True):
            assert [x[0] for x in one] == pytest.approx([x[0] for x in other], abs=1e-4)
            assert [x[1] for x in one] == [x[1] for x in other]
        for task in TASKS:
            keys = [key for key in scores[task] if key.partition(",")[0] in ("acc", "exact_match")]
            assert keys and [mine_scores[task][key] for key in keys] == [scores[task][key] for key in keys]


def test_a_small_budget_changes_what_follows_the_prompt(folder, manager):
    plain, _ = evaluate(folder, manager, "kvsparse", preset="full")
    small, _ = evaluate(folder, manager, "kvsparse", preset="snapkv-512", budget=16, window=8)
    assert small["tiny_generate"] != plain["tiny_generate"]
    moved = [
        abs(a[0] - b[0])
        for x, y in zip(small["tiny_choice"], plain["tiny_choice"], strict=True)
        for a, b in zip(x, y, strict=True)
    ]
    assert max(moved) > 0.05


def test_facts_for_the_recall_model(tmp_path):
    """A budget that holds everything scores as the full cache; a window loses what is old."""
    data = tmp_path / "facts.jsonl"
    asked = make_questions("facts", 24, 400)
    docs = [{"text": question.prompt, "choices": [question.answer]} for question in asked]
    data.write_text("".join(json.dumps(doc) + "\n" for doc in docs), encoding="utf-8")
    text = TASKS["tiny_generate"].format(file=data).replace("tiny_generate", "facts")
    (tmp_path / "facts.yaml").write_text(text.replace("max_gen_toks: 8", "max_gen_toks: 2"), encoding="utf-8")
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    scores = {}
    for preset, budget in (("full", None), ("snapkv-512", 512), ("streaming-llm-512", 50)):
        options = {"preset": preset, "add_bos_token": True} | ({"budget": budget} if budget else {})
        _, results = evaluate(FOLDER, manager, "kvsparse", ("facts",), **options)
        scores[preset] = results["facts"]["exact_match,none"]
    assert scores["full"] >= 0.95 and scores["snapkv-512"] == scores["full"]
    assert scores["streaming-llm-512"] <= 0.4


def model(folder, **options):
    return KVSparseLM(str(folder), dtype="float32", device="cpu", batch_size=2, **options)


def tokens_of(lm, *pairs):
    return [((a, b), lm.tok_encode(a), lm.tok_encode(b)) for a, b in pairs]


def test_the_context_is_compressed_and_the_continuation_fed_after_it(folder):
    lm = model(folder, preset="snapkv-512", budget=20, window=8)
    (found,) = lm._loglikelihood_tokens(tokens_of(lm, (STORY, " at noon")), disable_tqdm=True)
    context, more = torch.tensor([lm.tok_encode(STORY)]), lm.tok_encode(" at noon")
    from helpers import decode, prefill

    cache = SnapKVCache(lm.model, budget=20, window=8)
    logits = torch.cat(
        (prefill(lm.model, cache, context)[:, -1:], decode(lm.model, cache, torch.tensor([more[:-1]]))), dim=1
    )
    expected = logits[0].log_softmax(-1).gather(1, torch.tensor(more)[:, None]).sum()
    assert found[0] == pytest.approx(float(expected), abs=1e-4)


def test_one_token_scores_as_dense_unless_some_of_the_context_is_held_back(folder):
    pair = (STORY, "x")
    answers = {}
    for name, options in {
        "full": dict(preset="full"),
        "small": dict(preset="snapkv-512", budget=16, window=8),
        "held": dict(preset="snapkv-512", budget=16, window=8, hold_back=4),
        "full-held": dict(preset="full", hold_back=4),
    }.items():
        lm = model(folder, **options)
        ((answers[name], _),) = lm._loglikelihood_tokens(tokens_of(lm, pair), disable_tqdm=True)
    assert answers["small"] == pytest.approx(answers["full"], abs=1e-5)
    assert answers["full-held"] == pytest.approx(answers["full"], abs=1e-4)
    assert abs(answers["held"] - answers["full"]) > 1e-3


def test_rows_of_a_batch_score_as_alone_and_long_contexts_are_cut_from_the_left(folder):
    lm = model(folder, preset="h2o-1024", budget=24, max_length=120)
    requests = tokens_of(lm, (STORY, " at noon"), ("Noon?", " at night or later"), (STORY[:50], " x"))
    together = lm._loglikelihood_tokens(requests, disable_tqdm=True)
    alone = [lm._loglikelihood_tokens([request], disable_tqdm=True)[0] for request in requests]
    assert [x[0] for x in together] == pytest.approx([x[0] for x in alone], abs=1e-4)
    (cut,) = lm._loglikelihood_tokens([(("", ""), requests[0][1][-113:], requests[0][2])], disable_tqdm=True)
    assert together[0][0] == pytest.approx(cut[0], abs=1e-4)


def test_rolling_windows_equal_the_plain_model_with_the_full_cache(folder):
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    request = Instance("loglikelihood_rolling", {}, (STORY[:90],), 0)
    plain = HFLM(str(folder), dtype="float32", device="cpu", max_length=40)
    expected = plain.loglikelihood_rolling([request], disable_tqdm=True)
    assert model(folder, preset="full", max_length=40).loglikelihood_rolling(
        [request], disable_tqdm=True
    ) == pytest.approx(expected, abs=1e-3)


def test_bad_arguments(folder):
    with pytest.raises(KVSparseError, match="Did you mean 'snapkv-512'"):
        model(folder, preset="snapkv-51")
    with pytest.raises(OptionError, match="no option 'budgett'. Did you mean 'budget'"):
        model(folder, preset="snapkv-512", budgett=3)
    with pytest.raises(KVSparseError, match="budget=0"):
        model(folder, preset="snapkv-512", budget=0)
    with pytest.raises(OptionError, match="hold_back=-1"):
        model(folder, hold_back=-1)
    lm = KVSparseLM(AutoModelForCausalLM.from_pretrained(folder), tokenizer=str(folder), preset="full")
    assert isinstance(lm._make_cache(), FullCache)
    assert model(folder, preset="snapkv-512", budget=9, window=4).get_model_info()["cache"]["budget"] == 9


@pytest.mark.slow
def test_the_command_runs_offline(folder, local, tmp_path):
    command = [sys.executable, "-m", "kvsparse_hf.eval.lm_eval", "--model", "kvsparse", "--model_args",
               f"pretrained={folder},preset=snapkv-512,budget=4096,dtype=float32", "--tasks", "tiny_generate,tiny_choice",
               "--include_path", str(local), "--device", "cpu", "--batch_size", "2", "--output_path", str(tmp_path)]  # fmt: skip
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "tiny_choice" in done.stdout and "kvsparse" in done.stdout
