"""Recorded selections, their mapping onto another shape, the law, and the whole benchmark on a tiny shape."""

import json

import pytest
import torch
from helpers import decode, forward, tokens
from tiny_folder import save_tiny_folder
from tiny_models import build
from typer.testing import CliRunner

from kvsparse_hf import KVSparseError, QuestCache
from kvsparse_hf.bench import law, models, offload
from kvsparse_hf.bench.traces import Trace, record
from kvsparse_hf.cli import app

SETTING = offload.Setting(context=96, budget=16, page_size=2, new_tokens=6, warm_tokens=2)
SELECTION = dict(sinks=2, recent=2)


@pytest.fixture(scope="module")
def trace() -> Trace:
    with torch.no_grad():
        return record(build(), tokens(40 + 20, 2), 40, 8, 2, **SELECTION)


def test_a_trace_is_what_quest_chose(trace):
    model, ids = build(), tokens(60, 2)
    assert trace.pages.shape == (2, 2, 20, 2, 4) and (trace.context, trace.budget) == (40, 8)
    cache = QuestCache(model, budget=8, page_size=2, dense_layers=0, reserve=60, **SELECTION)
    forward(model, ids[:, :40], cache)
    chosen = []
    layer = cache.sparse_layers[1]
    select = layer.selector.select
    layer.selector.select = lambda *args: chosen.append(select(*args)) or chosen[-1]
    decode(model, cache, ids[:, 40:])
    assert torch.equal(trace.pages[1], torch.stack([c.pages for c in chosen], dim=1))


def test_a_trace_survives_its_file(trace, tmp_path):
    trace.save(tmp_path / "t.safetensors")
    loaded = Trace.load(tmp_path / "t.safetensors")
    assert torch.equal(loaded.pages, trace.pages)
    assert (loaded.context, loaded.page_size, loaded.budget, loaded.source) == (40, 2, 8, trace.source)
    (tmp_path / "no.safetensors").write_bytes(b"nothing")
    for name in ("no.safetensors", "missing.safetensors"):
        with pytest.raises(KVSparseError, match="no recorded trace"):
            Trace.load(tmp_path / name)


def test_mapping_keeps_who_is_who(trace):
    """Twice the budget: two pages for one of the prompt, the same two every time; written pages for themselves; the newest last."""
    mapped = trace.for_shape(128, 16)  # 64 pages for 20
    assert mapped.shape == (2, 2, 20, 2, 8)
    for step in range(20):
        before, after = trace.pages[0, 0, step, 0].tolist(), mapped[0, 0, step, 0].tolist()
        expected = []
        for page in before:
            if page >= 20:
                expected.append(page + 44)
            elif page == 0:
                expected += [0, 1]
            else:
                expected += [2 * page + 24, 2 * page + 25]
        assert after == expected + [-1] * (8 - len(expected))
        assert after[len(expected) - 1] == 64 + step // 2
    assert torch.equal(trace.for_shape(40, 8), trace.pages)


@pytest.mark.parametrize("context, budget", [(128, 12), (129, 16), (64, 32)])
def test_a_trace_that_does_not_fit(trace, context, budget):
    with pytest.raises(KVSparseError):
        trace.for_shape(context, budget)


def test_random_choices_are_distinct_and_valid():
    pages = Trace.random(64, 2, 16, 9, heads=2, layers=3).pages
    assert pages.shape == (3, 1, 9, 2, 8)
    for step in range(9):
        listed = pages[1, 0, step, 1].tolist()
        assert listed == sorted(set(listed)) and listed[0] == 0 and listed[-1] == 32 + step // 2


@pytest.mark.parametrize("arguments", [dict(context=41), dict(context=60), dict(budget=7), dict(budget=40)])
def test_what_cannot_be_recorded(arguments):
    with pytest.raises(KVSparseError, match="multiple"):
        record(build(), tokens(60), **{"context": 40, "budget": 8, "page_size": 2, **arguments})


def test_the_law():
    """Numbers worked out by hand for the 8B shape at 32K: 2048 selected, 4096 bytes a token and layer, 47 GB/s."""
    machine, selected = law.Machine(), 2048 * 4096 * 32
    far = law.Work(0, selected, 0, 0)
    assert law.throughput(far, 10**6, 0.9, law.Machine(memory=1e30)) == pytest.approx(1751, rel=1e-3)
    assert law.throughput(far, 10**6, 0.8, law.Machine(memory=1e30)) == pytest.approx(875, rel=1e-3)
    dense = law.Work(16.06e9, 32768 * 4096 * 32, 0, 0)
    assert law.throughput(dense, 27, 1.0, machine) == pytest.approx(818, rel=0.02)
    assert law.needed_hit_rate(818, selected, machine) == pytest.approx(0.786, abs=2e-3)
    work = law.Work(16.06e9, selected, 268e6, 32)
    serial, overlapped = (law.throughput(work, 64, 0.95, machine, how) for how in (False, True))
    assert serial < overlapped and law.throughput(work, 64, 1.0, machine) > serial


def test_the_benchmark_on_a_tiny_shape(trace, tmp_path, monkeypatch):
    """Every system at two batches; a third does not fit into the host memory that HiSparse is given."""
    monkeypatch.setattr(models, "SHAPES", {"tiny": (type(build().config), build().config.to_dict())})
    pool = 2 * 2 * (96 + 12) * 2 * 16 * 4
    setting = offload.Setting(**{**vars(SETTING), "host_bytes": 2 * pool})
    model = build(max_position_embeddings=4096)
    rows = offload.run(trace, setting, "tiny", batches=(1, 2, 3), output=tmp_path, model=model)
    assert rows == [json.loads(line) for line in (tmp_path / "offload.jsonl").read_text().splitlines()]
    value = {(row["case"], row["metric"], row["shape"].get("batch")): row["value"] for row in rows}
    assert [value[system, "largest_batch", None] for system in offload.SYSTEMS] == [3, 3, 2, 3, 2]
    assert 0 < value["hisparse-random", "hit_rate", 1] < value["hisparse", "hit_rate", 1] <= 1
    assert value["hisparse-random", "swapped_bytes_per_step", 2] > value["hisparse", "swapped_bytes_per_step", 2]
    assert value["hisparse", "device_bytes", 2] < value["quest", "device_bytes", 2]
    assert ("hisparse-resident", "hit_rate", 1) not in value
    for system in offload.SYSTEMS:
        assert value[system, "tokens_per_s", 1] > 0 and value[system, "law_serial", 1] <= value[system, "law_overlapped", 1]
    assert {row["case"] for row in rows if row["metric"] == "us_per_layer"} == {"plan", "fetch", "attention"}


def test_replayed_choices_are_read_as_recorded(trace):
    """What the benchmark's caches read is the trace, row by row and head by head."""
    model, pages = build(), trace.for_shape(96, 16)
    cache = offload.make_cache("hisparse", model, SETTING, pages)
    models.fill(cache, model, 3, 96)
    listed = []
    store = cache.sparse_layers[1].store
    bring = store.bring
    store.bring = lambda wanted, *rest: listed.append(wanted) or bring(wanted, *rest)
    decode(model, cache, tokens(7, 3))
    for step, wanted in enumerate(listed):
        for row in range(3):
            for head in range(2):
                assert torch.equal(wanted[row, head], pages[1, row % 2, step, (head + row // 2) % 2])


def test_a_short_trace_is_refused(trace):
    with pytest.raises(KVSparseError, match="20 steps"):
        offload.run(trace, offload.Setting(context=64, budget=16, page_size=2, new_tokens=20))
    with pytest.raises(KVSparseError, match="pages of 2"):
        offload.run(trace, offload.Setting(context=64, budget=16, page_size=4, new_tokens=6))


def test_recording_from_the_command_line(tmp_path):
    folder = save_tiny_folder(tmp_path / "model")
    text = tmp_path / "a.txt"
    text.write_text("The quick brown fox jumps over the lazy dog, and then it sleeps. " * 60)
    numbers = ["--context", 160, "--steps", 20, "--budget", 80]
    out = tmp_path / "t.safetensors"
    arguments = ["bench", "trace", "--model", folder, "--text", text, "--output", out, "--device", "cpu", *numbers]
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    assert Trace.load(out).steps == 20
    text.write_text("short")
    assert CliRunner().invoke(app, [str(argument) for argument in arguments]).exit_code == 2
