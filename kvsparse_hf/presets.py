"""Presets: a method and its options in YAML."""

import importlib.resources
from pathlib import Path
from typing import Any

from .errors import KVSparseError, PresetError, suggest
from .registry import get_method
from .texts import brief, read_yaml


def _shipped() -> dict[str, Path]:
    """Presets inside the installed package, or in `configs/` beside it in a checkout."""
    package = Path(str(importlib.resources.files("kvsparse_hf")))
    for folder in (package / "configs", package.parent / "configs"):
        files = {path.stem: path for path in folder.glob("*.yaml")}
        if files:
            return files
    return {}


def list_presets() -> list[str]:
    """The names of the shipped presets."""
    return sorted(_shipped())


def read_preset(name_or_path: str | Path) -> dict[str, Any]:
    """The mapping a preset file holds: `method` and the method's options.

    Raises:
        PresetError: no such preset, unreadable YAML, not a mapping, no or unknown method, or unknown keys.
    """
    path = Path(name_or_path)
    shipped = _shipped()
    if str(name_or_path) in shipped:
        path = shipped[str(name_or_path)]
    elif not _is_file(path):
        raise PresetError(f"no preset or file {brief(str(name_or_path))}.{suggest(str(name_or_path), shipped)}")
    try:
        content = read_yaml(path.read_text(encoding="utf-8"))
    except (KVSparseError, UnicodeDecodeError, OSError) as error:
        raise PresetError(f"{path} is not readable YAML: {error}") from error
    if not isinstance(content, dict):
        raise PresetError(f"{path} must hold a mapping of 'method' and options, got {type(content).__name__}.")
    if "method" not in content:
        raise PresetError(f"{path} does not name a 'method'.")
    try:
        fields = get_method(str(content["method"])).options_for(content).model_fields
    except KVSparseError as error:
        raise PresetError(f"{path}: {error}") from error
    for key in content:
        if key != "method" and key not in fields:
            raise PresetError(f"{path}: {content['method']} has no option {brief(key)}.{suggest(str(key), fields)}")
    return content


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # no name that a file can have
        return False


def load_preset(name_or_path: str | Path, model, **overrides: Any):
    """A cache as a preset describes it.

    Args:
        name_or_path: a shipped preset (`list_presets()`) or a YAML file.
        model: the model, or its config.
        overrides: options that replace the preset's.

    Raises:
        PresetError: see `read_preset`.
    """
    content = read_preset(name_or_path)
    method = content.pop("method")
    return get_method(method)(model, **{**content, **overrides})
