"""A tiny chat model as a folder, and where the public data sets lie."""

import os
from pathlib import Path

import pytest
import torch
from tiny_folder import save_tiny_folder

from kvsparse_hf.cli.loading import load_model
from kvsparse_hf.eval.engine import Engine
from kvsparse_hf.eval.tasks import Setting

DATA = Path(os.environ.get("KVSPARSE_DATA", Path(__file__).parents[3] / "shared" / "data"))


@pytest.fixture(scope="session")
def data():
    """The folder of data sets; tests that need it are skipped where there is none."""
    if not DATA.is_dir():
        pytest.skip("no data sets: set KVSPARSE_DATA to their folder")
    return DATA


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return save_tiny_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def loaded(folder):
    return load_model(folder, torch.device("cpu"), torch.float32)


@pytest.fixture
def engine(loaded):
    return Engine(*loaded)


@pytest.fixture
def setting(loaded):
    """Makes a `Setting` of the tiny tokenizer, which has one token per byte."""
    return lambda **kwargs: Setting(loaded[1], kwargs.pop("positions", 2048), **kwargs)
