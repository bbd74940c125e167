"""Preset files: the shipped ones load, and everything else is refused with a word about what would do."""

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from tiny_models import FAMILIES

import kvsparse_hf
from kvsparse_hf import KVSparseError, PresetError
from kvsparse_hf.presets import read_preset

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "configs"
OURS = ["full", "snapkv-512", "snapkv-1024", "snapkv-2048", "streaming-llm-512", "streaming-llm-2048"]


@pytest.fixture(scope="module")
def model():
    return FAMILIES["llama-gqa2"].build()


def write(folder: Path, text: str) -> Path:
    path = folder / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_the_shipped_presets_are_the_files():
    assert kvsparse_hf.list_presets() == sorted(path.stem for path in CONFIGS.glob("*.yaml"))
    assert set(OURS) <= set(kvsparse_hf.list_presets())


@pytest.mark.parametrize("name", OURS)
def test_preset_loads(model, name):
    cache = kvsparse_hf.load_preset(name, model)
    content = read_preset(name)
    assert cache.method == content.pop("method") and name.startswith(cache.method)
    assert content.items() <= cache.option_dict().items()
    if name != "full":
        assert cache.options.budget == int(name.rpartition("-")[2])


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_preset_is_valid_and_commented(path):
    read_preset(path.stem)
    lines = path.read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith("# "), "the first line says what the preset is"
    for line in lines:
        assert line.startswith("#") or re.fullmatch(r"\w+:\s+\S.*?\s+# \S.*", line), f"no comment: {line!r}"


def test_overrides_win_and_paths_work(model, tmp_path):
    assert kvsparse_hf.load_preset("snapkv-512", model, budget=96, window=8).options.budget == 96
    path = write(tmp_path, "method: snapkv\nbudget: 25%\n".replace("25%", "0.25"))
    assert kvsparse_hf.load_preset(path, model).options.budget == 0.25
    assert kvsparse_hf.load_preset(str(path), model, budget="1MiB").options.budget == "1MiB"


@pytest.mark.parametrize(
    ("name", "nearest"), [("snapkv-1O24", "snapkv-1024"), ("streamingllm-512", "streaming-llm-512"), ("ful", "full")]
)
def test_unknown_preset_names_the_nearest(model, name, nearest):
    with pytest.raises(PresetError, match=rf"Did you mean '{nearest}'\?.*Known: .*snapkv-512"):
        kvsparse_hf.load_preset(name, model)


BAD = {
    "unknown key": ("method: snapkv\nwindows: 3\n", "no option 'windows'. Did you mean 'window'"),
    "key of another method": ("method: full\nwindow: 3\n", "no option 'window'"),
    "unknown method": ("method: snapvk\n", "Did you mean 'snapkv'"),
    "no method": ("budget: 64\n", "does not name a 'method'"),
    "list": ("- method: snapkv\n", "must hold a mapping"),
    "scalar": ("snapkv\n", "must hold a mapping"),
    "empty": ("", "must hold a mapping"),
    "not YAML": ("method: [snapkv\n", "not readable YAML"),
    "python object": ("method: !!python/object/apply:os.getcwd []\n", "not readable YAML"),
    "python name": ("method: snapkv\nbudget: !!python/name:os.getcwd\n", "not readable YAML"),
    "numeric key": ("method: snapkv\n3: 4\n", "no option 3"),
}


@pytest.mark.parametrize(("text", "message"), BAD.values(), ids=BAD.keys())
def test_bad_file_is_refused(model, tmp_path, text, message):
    with pytest.raises(PresetError, match=re.escape(message)):
        kvsparse_hf.load_preset(write(tmp_path, text), model)


def test_not_text_and_not_a_file(model, tmp_path):
    path = tmp_path / "binary.yaml"
    path.write_bytes(b"\xff\xfe\x00\x81")
    with pytest.raises(PresetError, match="not readable YAML"):
        kvsparse_hf.load_preset(path, model)
    with pytest.raises(PresetError, match="no preset or file"):
        kvsparse_hf.load_preset(tmp_path, model)


@pytest.mark.parametrize("override", [{"budget": 0}, {"budget": 16}, {"window": 0}, {"windows": 8}])
def test_bad_override_is_refused(model, override):
    with pytest.raises(KVSparseError, match=next(iter(override))):
        kvsparse_hf.load_preset("snapkv-512", model, **override)


def test_a_refused_preset_leaves_the_model_alone(tmp_path):
    model = FAMILIES["llama-gqa2"].build()
    with pytest.raises(PresetError):
        kvsparse_hf.load_preset(write(tmp_path, "method: snapkv\nwindows: 3\n"), model)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.slow  # builds the wheel: about ten seconds
def test_wheel_holds_presets_types_and_text(tmp_path):
    pytest.importorskip("hatchling")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)], cwd=ROOT, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name == f"kvsparse_hf-{kvsparse_hf.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = archive.read(next(name for name in names if name.endswith("METADATA"))).decode()
    assert {f"kvsparse_hf/configs/{path.name}" for path in CONFIGS.glob("*.yaml")} <= names
    assert {"kvsparse_hf/py.typed", "kvsparse_hf/demo/haystack.txt", "kvsparse_hf/cli/__init__.py"} <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not {name.split("/")[0] for name in names} - {"kvsparse_hf", f"kvsparse_hf-{kvsparse_hf.__version__}.dist-info"}
    assert "License-Expression: Apache-2.0" in metadata and "Requires-Python: >=3.10" in metadata
