"""A file of JSON lines that survives interruptions."""

import json
from pathlib import Path
from typing import Any

from ..errors import KVSparseError


class JsonLines:
    """Appends rows one line at a time. A line that an interrupted run left unfinished is removed when the file is read."""

    def __init__(self, path: Path):
        self.path = path

    def read(self, repair: bool = True) -> list[dict[str, Any]]:
        """All rows, oldest first.

        Args:
            repair: also remove an unfinished last line from the file; otherwise it is only passed over.

        Raises:
            KVSparseError: a line before the last is no JSON object.
        """
        if not self.path.is_file():
            return []
        content = self.path.read_bytes()
        rows, good = [], 0
        lines = content.split(b"\n")
        for number, line in enumerate(lines, start=1):
            end = min(good + len(line) + 1, len(content))
            row = _parse(line)
            if row is None and line.strip():
                if b"".join(lines[number:]).strip():
                    raise KVSparseError(f"{self.path}, line {number} is damaged; remove the line or the file.")
                break
            if row is not None:
                rows.append(row)
            good = end
        if repair and (good < len(content) or (content and not content.endswith(b"\n"))):
            self.path.write_bytes(content[:good].rstrip(b"\n") + b"\n" if rows else b"")
        return rows

    def append(self, row: dict[str, Any]) -> None:
        """Writes one row, in one write."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps(row, ensure_ascii=False) + "\n"
        with self.path.open("ab") as file:
            file.write(line.encode("utf-8"))


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None
