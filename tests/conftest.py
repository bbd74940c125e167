"""Every test starts from the same seed, on one thread and without gradients."""

import gc
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

torch.set_num_threads(1)


def pytest_addoption(parser):
    parser.addoption("--core", action="store_true", help="of the methods under test, one for each kind of cache layer")


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--core"):
        return
    from methods import CORE, METHODS

    others = {case.id for case in METHODS} - {case.id for case in CORE}
    cases = [getattr(getattr(item, "callspec", None), "params", {}).get("case") for item in items]
    left_out = [getattr(case, "id", None) in others for case in cases]
    config.hook.pytest_deselected(items=[item for item, out in zip(items, left_out, strict=True) if out])
    items[:] = [item for item, out in zip(items, left_out, strict=True) if not out]


def pytest_collection_finish():
    """What is there before the first test stays: garbage collections, which many tests ask for, need not look at it."""
    import torch._dynamo
    import torch._inductor.compile_fx  # noqa: F401, as large as all else that is imported later

    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _isolated(request, monkeypatch):
    import tiny_models

    case = getattr(getattr(request.node, "callspec", None), "params", {}).get("case")
    if hasattr(case, "layers"):  # a method that needs more than two of them to show what it does
        monkeypatch.setitem(tiny_models.DEFAULTS, "num_hidden_layers", case.layers)
    torch.manual_seed(0)
    with torch.no_grad():
        yield
