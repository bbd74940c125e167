"""Packages of the extra "eval", imported where they are used."""

import importlib
from types import ModuleType

from ..errors import KVSparseError

_PROJECTS = {"lm_eval": "lm-eval"}


def need(module: str, purpose: str) -> ModuleType:
    """The module of that name.

    Raises:
        KVSparseError: it is not installed; says what needs it and what to install.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        project = _PROJECTS.get(module, module).partition(".")[0]
        raise KVSparseError(
            f"{purpose} needs the package {project}: pip install {project}, or the extra: pip install 'kvsparse_hf[eval]'."
        ) from error
