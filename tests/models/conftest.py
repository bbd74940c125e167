"""The brute-force page choice of the selection tests serves these too."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "methods_select"))
