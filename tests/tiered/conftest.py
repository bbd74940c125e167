"""The tests of the tiers drive single layers with the driver of the token-level methods."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "methods_token"))
