"""The brute-force page choice of the selection tests and the driver of the token-level ones serve these too."""

import sys
from pathlib import Path

for folder in ("methods_select", "methods_token"):
    sys.path.insert(0, str(Path(__file__).parent.parent / folder))
