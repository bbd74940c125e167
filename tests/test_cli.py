"""The command line: what it prints, where, and how it ends."""

import re

import pytest
import yaml
from tiny_folder import save_tiny_folder
from typer.testing import CliRunner

import kvsparse_hf
from kvsparse_hf import OptionError
from kvsparse_hf.cli import app
from kvsparse_hf.cli.loading import choose_device, choose_dtype, parse_options, parse_value
from kvsparse_hf.registry import _METHODS

PROMPT = "The quick brown fox jumps over the lazy dog, and then it sleeps. " * 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(save_tiny_folder(tmp_path_factory.mktemp("model")))


def run(*arguments, **kwargs):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], **kwargs)


def run_generate(folder, *arguments, **kwargs):
    return run("generate", "--model", folder, "--preset", "snapkv-512", "--max-new-tokens", 6, *arguments, **kwargs)


def refused(result, *words):
    """Exit code 2, one line on stderr that holds the words, nothing that looks like a traceback."""
    lines = result.stderr.strip().splitlines()
    assert result.exit_code == 2, result.output
    assert len(lines) == 1 and lines[0].startswith("error: "), result.stderr
    assert "Traceback" not in result.output
    for word in words:
        assert word in lines[0]


def test_help_names_every_command():
    result = run("--help")
    assert result.exit_code == 0
    for command in ("methods", "presets", "generate", "demo", "eval", "bench", "calibrate"):
        assert command in result.stdout


def test_version():
    assert run("--version").stdout.strip() == kvsparse_hf.__version__


def test_methods_come_from_the_registry(monkeypatch):
    class MineCache(kvsparse_hf.SnapKVCache):
        paper, needs, prefix_safe = "arXiv 0000.00000", "a hunch", True

    monkeypatch.setitem(_METHODS, "mine", MineCache)
    result = run("methods")
    assert result.exit_code == 0
    rows = {line.split()[0]: line for line in result.stdout.splitlines() if line.strip()}
    assert set(kvsparse_hf.list_methods()) <= rows.keys()
    assert re.search(r"mine +MineCache +arXiv 0000\.00000 +evict +a hunch +yes", rows["mine"])
    assert re.search(r"snapkv +SnapKVCache +arXiv 2404\.14469 +evict +.* +no", rows["snapkv"])


def test_methods_fit_a_narrow_terminal(monkeypatch):
    monkeypatch.setattr("kvsparse_hf.cli.listing._console", lambda: __import__("rich.console").console.Console(width=80))
    result = run("methods")
    assert all(len(line) <= 80 for line in result.stdout.splitlines())
    for name in kvsparse_hf.list_methods():
        assert name in result.stdout and kvsparse_hf.get_method(name).__name__ in result.stdout


def test_presets_show_what_differs():
    result = run("presets")
    assert result.exit_code == 0
    assert re.search(r"snapkv-512 +snapkv +budget=512 *$", result.stdout, re.MULTILINE)
    assert re.search(r"full +full +- *$", result.stdout, re.MULTILINE)


def test_generate_streams_text_and_reports(folder):
    result = run_generate(folder, "--prompt", PROMPT, "--option", "budget=64", "--option", "window=16")
    assert result.exit_code == 0, result.output
    assert result.stdout.strip()
    report = dict(re.split(r"\s{2,}", line, maxsplit=1) for line in result.stderr.splitlines() if "  " in line)
    assert report["method"] == "snapkv"
    assert report["kept per head"].startswith("69 / 69.0 / 69")  # 64, and the five tokens that were fed back


def test_generate_is_what_the_library_gives(folder):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from kvsparse_hf.hf.compat import CACHE_ARGUMENT

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(f"<s>{PROMPT}</s><s>", add_special_tokens=False, return_tensors="pt").input_ids
    cache = kvsparse_hf.load_preset("snapkv-512", model, budget=64)
    out = model.generate(ids, **{CACHE_ARGUMENT: cache}, max_new_tokens=6, do_sample=False)
    expected = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
    assert run_generate(folder, "--prompt", PROMPT, "-o", "budget=64").stdout.strip() == expected.strip()


def test_prompt_from_file_and_standard_input(folder, tmp_path):
    path = tmp_path / "prompt.txt"
    path.write_text(PROMPT, encoding="utf-8")
    expected = run_generate(folder, "--prompt", PROMPT).stdout
    assert run_generate(folder, "--file", path).stdout == expected
    assert run_generate(folder, "--file", "-", input=PROMPT).stdout == expected


def test_chat_template_is_used_where_there_is_one(folder, tmp_path):
    chat, plain = (run_generate(folder, "--prompt", PROMPT, flag) for flag in ("--chat", "--no-chat"))
    assert run_generate(folder, "--prompt", PROMPT).stderr == chat.stderr != plain.stderr
    bare = save_tiny_folder(tmp_path, chat=False)
    assert run_generate(bare, "--prompt", PROMPT).stderr == plain.stderr
    refused(run_generate(bare, "--prompt", PROMPT, "--chat"), "no chat template", "--no-chat")


def test_errors_are_one_line(folder, tmp_path):
    refused(run("generate", "--model", folder, "--prompt", "x", "--preset", "snapkv-1O24"), "Did you mean 'snapkv-1024'")
    refused(run_generate(folder, "--prompt", "x", "-o", "windows=3"), "no option 'windows'", "Did you mean 'window'")
    refused(run_generate(folder, "--prompt", "x", "-o", "budget=0"), "budget=0")
    refused(run_generate(folder, "--prompt", "x", "-o", "budget=12 potatoes"), "12 potatoes")
    refused(run_generate(folder, "--prompt", "x", "-o", "budget"), "key=value")
    refused(run_generate(folder, "--prompt", "x", "-o", "budget=[3"), "no value")
    refused(run_generate(folder), "--prompt", "--file")
    refused(run_generate(folder, "--prompt", "x", "--file", "y"), "--prompt", "--file")
    refused(run_generate(folder, "--prompt", "  "), "empty")
    refused(run_generate(folder, "--file", tmp_path / "none.txt"), "cannot be read")
    refused(run_generate(tmp_path / "none", "--prompt", "x"), "no such folder")
    refused(run_generate(tmp_path, "--prompt", "x"), "cannot be loaded")
    refused(run_generate(folder, "--prompt", "x", "--device", "toaster"), "toaster")
    refused(run_generate(folder, "--prompt", "x", "--dtype", "int3"), "int3")
    path = tmp_path / "broken.yaml"
    path.write_text("method: [\n  snapkv\n", encoding="utf-8")
    refused(run("generate", "--model", folder, "--prompt", "x", "--preset", path), "not readable YAML")


def test_faults_are_not_hidden(folder, monkeypatch):
    monkeypatch.setattr("kvsparse_hf.cli.generate.load_preset", lambda *args, **kwargs: 1 / 0)
    result = run_generate(folder, "--prompt", "x")
    assert result.exit_code == 1 and isinstance(result.exception, ZeroDivisionError)


def test_bench_kernels_without_a_gpu(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    refused(run("bench", "kernels"), "CUDA")


def test_option_values_read_as_in_a_preset_file():
    pairs = ["a=512", "b=0.25", "c=512MiB", "d=true", "e=max", "f=x=y"]
    assert parse_options(pairs) == {"a": 512, "b": 0.25, "c": "512MiB", "d": True, "e": "max", "f": "x=y"}
    assert parse_value("512MiB") == yaml.safe_load("512MiB")
    assert parse_options(["a=", "b= ", "c=null", "d=''"]) == {"a": None, "b": None, "c": None, "d": ""}


@pytest.mark.parametrize("text", ["End with #### N", "#### N", "a #b", "a#b", "Answer # #### N.  Then stop"])
def test_a_number_sign_in_a_value_begins_no_comment(text):
    assert parse_value(text) == text and parse_value(f" {text} ") == text and parse_value(repr(text)) == text


def test_nothing_is_the_empty_string_where_an_option_is_a_string(folder):
    from kvsparse_hf.options import CommonOptions
    from kvsparse_hf.options import parse_options as validated

    class Options(CommonOptions):
        text: str = "some"
        name: str | None = "some"
        count: int = 1

    assert validated(Options, "method", parse_options(["text=", "name="])) == Options(text="", name=None)
    assert validated(Options, "method", parse_options(["text=''", "name=''"])) == Options(text="", name="")
    with pytest.raises(OptionError, match="count=None"):
        validated(Options, "method", parse_options(["count="]))
    refused(run_generate(folder, "--prompt", "x", "--preset", "cla-2", "--option", "inner="), "inner=None is not the name of a method")
    result = run_generate(folder, "--prompt", "x", "--preset", "h2o-1024", "--option", "heavy=", "--option", "recent=")
    assert result.exit_code == 0, result.output


def test_dtype_follows_the_device():
    import torch

    cpu = choose_device("cpu")
    assert choose_dtype("auto", cpu) is torch.float32
    assert choose_dtype("auto", torch.device("cuda")) is torch.bfloat16
    assert choose_dtype("float16", cpu) is torch.float16
