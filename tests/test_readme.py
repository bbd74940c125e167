"""The README is true: its code runs as it stands, its table agrees with the registry, its commands exist."""

import re
from pathlib import Path

import pytest
import transformers
from tiny_folder import save_tiny_folder

import kvsparse_hf
from kvsparse_hf.hf.compat import CACHE_ARGUMENT
from kvsparse_hf.registry import _METHODS

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
PYTHON = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
SHELL = re.findall(r"```bash\n(.*?)```", TEXT.partition("## Methods")[0], re.DOTALL)


def test_two_commands_set_it_up():
    assert len(SHELL) == 2 and all(len(block.strip().splitlines()) == 1 for block in SHELL)
    demo, tests = (block.strip().split(" && ") for block in SHELL)
    assert demo[0].startswith("pip install ") and demo[1] == "kvsparse demo"
    assert tests[0].startswith("pip install ") and tests[1].startswith("pytest")


def test_code_runs_as_it_stands(tmp_path, monkeypatch, capsys):
    folder = save_tiny_folder(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "report.txt").write_text("The board met, and it rained. " * 60)
    for name in ("AutoModelForCausalLM", "AutoTokenizer"):
        kind = getattr(transformers, name)
        load = kind.from_pretrained
        monkeypatch.setattr(kind, "from_pretrained", lambda hub_name, *args, load=load, **kwargs: load(folder))
    monkeypatch.setattr("kvsparse_hf.registry._METHODS", dict(_METHODS))
    blocks = [block.replace("past_key_values=", f"{CACHE_ARGUMENT}=") for block in PYTHON]
    assert len(blocks[0].split("cache = ")[0].splitlines()) <= 7 and len(blocks[0].strip().splitlines()) <= 10
    namespace = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), namespace)
    out = capsys.readouterr().out
    assert re.search(r"method +snapkv", out) and re.search(r"kept per head +\d+ / ", out)
    assert "value-norm" in kvsparse_hf.registry.list_methods()


@pytest.mark.parametrize("row", re.findall(r"^\| `.*$", TEXT.partition("## Measured")[0], re.MULTILINE), ids=lambda row: row.split("`")[1])
def test_method_table_agrees_with_the_registry(row):
    name, cls, paper, _, action, frees, prefix_safe, _ = (cell.strip().strip("`") for cell in row.strip("|").split("|"))
    known = kvsparse_hf.get_method(name)
    assert (cls, action) == (known.__name__, known.action)
    assert prefix_safe == ("yes" if known.prefix_safe else "no")
    assert frees == ("yes" if known.action in ("evict", "offload", "quantize", "share") else "no")
    assert (re.search(r"\d{4}\.\d{5}", paper) or [""])[0] in known.paper


def test_presets_and_rows_it_names_exist():
    assert set(re.findall(r"(?:snapkv|streaming-llm)-\d+", TEXT)) <= set(kvsparse_hf.list_presets())
    assert (ROOT / "examples" / "results" / "demo.jsonl").is_file()
