"""Prints which model families work with the running version of Transformers: `python tests/models/table.py`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import transformers  # noqa: E402
from zoo import rows  # noqa: E402

if __name__ == "__main__":
    print(f"transformers {transformers.__version__}\n\n| model | status | note |\n|---|---|---|")
    for name, status, note in rows():
        print(f"| {name} | {status} | {note} |")
