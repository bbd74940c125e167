"""The driver of the token-level tests serves these too."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "methods_token"))
