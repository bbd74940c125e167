"""What the command refuses, and what it says."""

import importlib
import sys

import pytest
from eval_tools import KV, refused, rows, run
from typer.testing import CliRunner

from kvsparse_hf import KVSparseError
from kvsparse_hf.cli import app
from kvsparse_hf.eval.contenders import Contender, parse_contenders
from kvsparse_hf.eval.results import draw
from kvsparse_hf.eval.tasks import get_task


def test_presets_with_options():
    assert [c.label for c in parse_contenders(["snapkv-512", "full", "snapkv-512"])] == ["full", "snapkv-512"]
    found = Contender.parse("adakv-1024:budget=512MiB,window=16")
    assert found.preset == "adakv-1024" and found.overrides == {"budget": "512MiB", "window": 16}
    assert Contender.parse("knorm-1024:skip_layers=[0,1],budget=9").overrides == {"skip_layers": [0, 1], "budget": 9}
    with pytest.raises(KVSparseError, match="Did you mean 'snapkv-1024'"):
        parse_contenders(["snapkv-1O24"])
    with pytest.raises(KVSparseError, match="is empty"):
        parse_contenders([""])


def test_errors_are_one_line_and_come_before_anything_runs(folder, tmp_path):
    out = ("-o", tmp_path / "out")
    refused(run(folder, "passkeys", *out), "Did you mean 'passkey'")
    refused(run(folder, "kv", "-t", "pear=3", *out), "no option 'pear'")
    refused(run(folder, "kv", "-t", "pairs", *out), "key=value")
    refused(run(folder, "kv", "-p", "snapkv-512:budget=0", *out), "budget=0")
    refused(run(folder, "kv", "-p", "snapkv-512:windows=3", *out), "Did you mean 'window'")
    refused(run(folder, "kv", "--device", "toaster", *out), "toaster")
    refused(run(folder, "gsm8k", "--data", tmp_path / "none", *out), "no such file or folder")
    refused(run(tmp_path, "kv", *out), "cannot be loaded")
    assert not (tmp_path / "out").exists()


def test_a_model_without_a_chat_template_gets_plain_text_and_a_note(tmp_path):
    from tiny_folder import save_tiny_folder

    bare = save_tiny_folder(tmp_path / "bare", chat=False)
    result = run(bare, *KV, "-o", tmp_path)
    assert result.exit_code == 0 and "no chat template, so prompts are given as plain text" in result.stdout
    assert rows(tmp_path)[0]["shape"]["chat"] is False
    refused(run(bare, *KV, "--chat", "-o", tmp_path), "no chat template", "--chat")
    result = run(bare, "ppl", "-t", "prompt=40", "-t", "tokens=8", "--limit", 1, "--data", __file__, "-o", tmp_path)
    assert "chat template" not in result.stdout


def test_a_prompt_beyond_the_models_positions_is_noted(folder, tmp_path):
    result = run(folder, "lines", "-t", "lines=80", "--limit", 1, "--max-new-tokens", 2, "-o", tmp_path)
    assert result.exit_code == 0 and "the model has 2,048 positions" in result.stdout


def test_a_figure_without_matplotlib_is_one_line(folder, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = run(folder, *KV, "-o", tmp_path)
    assert (
        result.exit_code == 0 and "no figure: the plot of an evaluation needs the package matplotlib" in result.stdout
    )
    with pytest.raises(KVSparseError, match="matplotlib"):
        draw(tmp_path, get_task("kv"), [])


def test_help_names_every_task():
    from kvsparse_hf.eval import list_tasks

    text = " ".join(CliRunner().invoke(app, ["eval", "--help"], env={"COLUMNS": "200"}).stdout.split())
    assert all(name in text for name in list_tasks())


def test_tasks_are_listed_with_their_options():
    from kvsparse_hf.eval import get_task, list_tasks

    result = CliRunner().invoke(app, ["tasks"])
    assert result.exit_code == 0
    for name in list_tasks():
        assert f"{name}: " in result.stdout
        for option, field in type(get_task(name)).Options.model_fields.items():
            assert f"    -t {option}=" in result.stdout and field.description in result.stdout
    assert "-t depths=[0.0,0.25,0.5,0.75,1.0]:" in result.stdout


def test_labels_with_brackets_are_shown_whole(folder, tmp_path):
    assert Contender.parse("knorm-1024:skip_layers=[0],budget=24").label == "knorm-1024:skip_layers=[0],budget=24"
    result = run(folder, *KV, "-p", "knorm-1024:skip_layers=[0],budget=24", "-o", tmp_path)
    assert result.exit_code == 0 and "[0]" in result.stdout, result.output
    refused(run(folder, *KV, "-p", "snapkv-512:budget=24,window=[8][0]", "-o", tmp_path), "[8][0]")


def test_what_needs_a_package_of_the_extra_names_it(folder, tmp_path, monkeypatch):
    for name in ("datasets", "evaluate", "lm_eval", "matplotlib", "rapidfuzz", "rouge"):
        monkeypatch.setitem(sys.modules, name, None)  # importing it now raises ModuleNotFoundError
    monkeypatch.delitem(sys.modules, "kvsparse_hf.eval.lm_eval", raising=False)
    result = run(folder, *KV, "-o", tmp_path)
    assert result.exit_code == 0 and "no figure" in result.stdout
    refused(
        run(folder, "gsm8k", "-o", tmp_path), "needs the package datasets: pip install datasets", "kvsparse_hf[eval]"
    )
    with pytest.raises(
        KVSparseError, match="the model type kvsparse needs the package lm-eval: pip install lm-eval, or the extra"
    ):
        importlib.import_module("kvsparse_hf.eval.lm_eval")
