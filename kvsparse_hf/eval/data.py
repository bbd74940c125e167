"""Reading data sets: JSON lines from a file or folder, or a set of the Hub through `datasets`."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import KVSparseError
from .extras import need

Fields = Mapping[str, type | tuple[type, ...]]


def read_rows(path: Path, fields: Fields) -> list[dict[str, Any]]:
    """All rows of a JSON lines file.

    Args:
        path: the file; blank lines are passed over.
        fields: keys that every row must have, and the types that their values may be of.

    Raises:
        KVSparseError: no such file, not UTF-8, no row at all, a line that is no JSON object, one that lacks a field, or one
            whose field is of another type. The line is named.
    """
    rows = []
    for number, line in _lines(path):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise KVSparseError(f"{path}, line {number}: not JSON ({error.msg} at column {error.colno}).") from error
        if not isinstance(row, dict):
            raise KVSparseError(f"{path}, line {number}: must be a JSON object, is {type(row).__name__}.")
        missing = [field for field in fields if field not in row]
        if missing:
            raise KVSparseError(
                f"{path}, line {number}: lacks {', '.join(missing)}; it has {', '.join(row) or 'no field'}."
            )
        for field, kinds in fields.items():
            if not isinstance(row[field], kinds):
                raise KVSparseError(f"{path}, line {number}: {field} may not be of type {type(row[field]).__name__}.")
        rows.append(row)
    if not rows:
        raise KVSparseError(f"{path} is empty.")
    return rows


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if line.strip():
            yield number, line


def read_text(path: Path) -> str:
    """A text file as a string.

    Raises:
        KVSparseError: it cannot be read, or is no UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise KVSparseError(f"{path} cannot be read: {error}") from error


def find_file(data: Path, *names: str) -> Path:
    """The data file: `data` itself, or the first of `names` that lies in the folder `data`.

    Raises:
        KVSparseError: there is none.
    """
    if data.is_file():
        return data
    if not data.is_dir():
        raise KVSparseError(f"--data {data}: no such file or folder.")
    for name in names:
        if (data / name).is_file():
            return data / name
    raise KVSparseError(f"--data {data}: the folder holds no {' or '.join(names)}.")


def load_hub(path: str, name: str | None, split: str, fields: Fields, **kwargs: Any) -> list[dict[str, Any]]:
    """One split of a data set of the Hub (or of its local cache), all rows.

    Raises:
        KVSparseError: `datasets` is missing, the set cannot be had, or lacks a field.
    """
    datasets = need("datasets", "loading data from the Hub (without --data)")
    try:
        loaded = datasets.load_dataset(path, name, split=split, **kwargs)
    except Exception as error:  # of several HTTP clients and file formats, by version
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise KVSparseError(
            f"the data set {path} cannot be had from the Hub ({reason}); give a local file or folder with --data."
        ) from error
    missing = set(fields) - set(loaded.column_names)
    if missing:
        raise KVSparseError(
            f"the data set {path} lacks {', '.join(sorted(missing))}; it has {', '.join(loaded.column_names)}."
        )
    if not len(loaded):
        raise KVSparseError(f"the data set {path} is empty.")
    return list(loaded)
