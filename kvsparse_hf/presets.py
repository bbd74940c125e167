"""Presets: a method and its options in YAML."""

import importlib.resources
from pathlib import Path
from typing import Any

import yaml

from .errors import KVSparseError, PresetError, suggest
from .registry import get_method


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
    elif not path.is_file():
        raise PresetError(f"no preset or file {str(name_or_path)!r}.{suggest(str(name_or_path), shipped)}")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
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
            raise PresetError(f"{path}: {content['method']} has no option {key!r}.{suggest(str(key), fields)}")
    return content


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
