"""Every test starts from the same seed, on one thread and without gradients."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _isolated():
    torch.manual_seed(0)
    with torch.no_grad():
        yield
