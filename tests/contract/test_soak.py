"""`kvsparse bench soak` on a tiny model: its rows, its verdict, its time limit."""

import json

import pytest
import torch
from tiny_models import build
from typer.testing import CliRunner

from kvsparse_hf import KVSparseError, QuestCache
from kvsparse_hf.bench import models, soak
from kvsparse_hf.cli import app
from kvsparse_hf.layers.host import HostMemory

PLAN = soak.Plan(steps=24, calls=8, prompt=40, call_tokens=3, samples=8)
QUEST = "quest-1024:budget=16,page_size=2,sinks=2,recent=2,dense_layers=0"


@pytest.fixture(autouse=True)
def _tiny(monkeypatch):
    config = build(max_position_embeddings=65536).config
    monkeypatch.setattr(models, "SHAPES", {"tiny": (type(config), {**config.to_dict(), "eos_token_id": None})})


def test_every_preset_of_the_default_list_stays_flat(tmp_path):
    rows = soak.run(plan=PLAN, shape="tiny", device="cpu", output=tmp_path)
    assert rows == [json.loads(line) for line in (tmp_path / "soak.jsonl").read_text().splitlines()]
    assert {row["case"] for row in rows} == {
        f"{preset}/{phase}" for preset in soak.PRESETS for phase in ("decode", "call")
    }
    assert {row["metric"] for row in rows} >= {"host_registered_growth", "host_mapped_growth"}
    assert all(
        row["n"] == 8 and row["shape"]["steps" if row["case"].endswith("/decode") else "calls"] in (8, 24)
        for row in rows
    )


def test_host_memory_is_seen(tmp_path):
    presets = [
        "hisparse-2048:budget=16,hot_tokens=32,page_size=2,sinks=2,recent=2,dense_layers=0",
        "tiered-25:recent=4",
    ]
    rows = soak.run(presets, PLAN, "tiny", "cpu", tmp_path)
    host = {row["case"]: row["shape"]["last_quarter"] for row in rows if row["metric"] == "host_mapped_growth"}
    # Keys and values of two layers and heads, 16 floats each, for the prompt and what is decoded.
    assert all(host[f"{preset}/decode"] >= 0.7 * (40 + 24) * 2 * 2 * 2 * 16 * 4 for preset in presets)


def test_what_grows_is_named_after_its_row_was_written(tmp_path, monkeypatch):
    """A cache that loses a page of host memory at every reset."""
    lost, reset = [], QuestCache.reset
    monkeypatch.setattr(
        QuestCache, "reset",
        lambda self: (lost.append(HostMemory().zeros(64, dtype=torch.uint8, device=torch.device("cpu"))), reset(self)),
    )  # fmt: skip
    with pytest.raises(KVSparseError, match=r"memory grows: quest.*, call: host_mapped grew by \d+ bytes"):
        soak.run([QUEST], PLAN, "tiny", "cpu", tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "soak.jsonl").read_text().splitlines()]
    growth = {(row["case"].rpartition("/")[2], row["metric"]): row["value"] for row in rows}
    # Each call ends with a reset; 64 bytes are lost in it, so 64,000 per 1,000 calls.
    assert growth["call", "host_mapped_growth"] == 64000 and growth["decode", "host_mapped_growth"] == 0


def test_no_time_is_said(tmp_path):
    with pytest.raises(KVSparseError, match="only 1 samples"):
        soak.run([QUEST], soak.Plan(steps=24, calls=8, prompt=40, seconds=0), "tiny", "cpu", tmp_path)


def test_the_command(tmp_path):
    arguments = ["bench", "soak", "-p", QUEST, "--shape", "tiny", "--device", "cpu", "--output", str(tmp_path)]
    done = CliRunner().invoke(app, [*arguments, "--steps", "8", "--calls", "4"])
    assert done.exit_code == 0 and f"{QUEST}, 8 steps: " in done.output
    refused = CliRunner().invoke(app, [*arguments, "--seconds", "0"])
    assert refused.exit_code == 2 and "samples" in refused.output
