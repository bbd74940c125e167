"""What the pictures show must be what the cache holds and what its steps read."""

import base64
import json
import re

import pytest
import torch
from helpers import generate, kept_in_all_layers, left_pad, tokens
from methods import ALL, METHODS
from tiny_folder import save_tiny_folder
from tiny_models import build
from typer.testing import CliRunner

from kvsparse_hf import KVSparseError, UnsupportedOperationError
from kvsparse_hf.cli import app
from kvsparse_hf.pictures import Decisions, Recorder, page, plot

PROMPT, STEPS = 40, 6


@pytest.fixture
def model():
    return build("llama-gqa2")


def _run(model, case, rows=(PROMPT,)):
    cache = case.make(model)
    ids, mask = left_pad([tokens(length, seed=length) for length in rows])
    with Recorder(cache) as recorder:
        generate(model, ids, cache, STEPS, attention_mask=mask, disable_compile=True)
    return cache, recorder


@pytest.mark.parametrize("case", METHODS, ids=lambda case: case.id)
def test_shows_what_is_held(model, case):
    cache, recorder = _run(model, case, (PROMPT, 25))
    for row, length in enumerate((PROMPT, 25)):
        decisions = Decisions.of(cache, row, recorder=recorder)
        seen = length + STEPS - 1
        held = [layer[row] for layer in kept_in_all_layers(cache)]
        assert decisions.layers == [layer.layer_idx for layer in cache.sparse_layers]
        assert decisions.held.tolist() == [[len(head) for head in layer] for layer in held]
        for layer, heads in enumerate(held):
            share = torch.zeros(seen)
            for head in heads:
                share[head] += 1 / len(heads)
            torch.testing.assert_close(decisions.kept[layer], share)


def test_reads_of_quest(model):
    """At page 2, sinks 2, recent 2 and budget 12 every step reads six pages a head, the forced ones among them."""
    cache, recorder = _run(model, ALL["quest"])
    read = Decisions.of(cache, recorder=recorder).read
    assert read.shape == (len(cache.sparse_layers), PROMPT + STEPS - 1)
    assert (read[:, :2] == 1).all()
    newest = range(PROMPT, PROMPT + STEPS - 1)
    per_step = read.clone()
    for age, token in enumerate(newest):  # token PROMPT + age exists for STEPS - 1 - age steps
        per_step[:, token] *= (STEPS - 1 - age) / (STEPS - 1)
    total = per_step.sum(1) * (STEPS - 1)
    assert ((11 * (STEPS - 1) <= total + 1e-4) & (total <= 12 * (STEPS - 1) + 1e-4)).all()


def test_recorder_leaves_nothing_behind(model):
    cache, _ = _run(model, ALL["quest"])
    assert all("select" not in vars(layer.selector) for layer in cache.sparse_layers)
    assert Decisions.of(cache).read is None


def test_evicting_methods_have_no_reads(model):
    cache, recorder = _run(model, ALL["snapkv"])
    assert Decisions.of(cache, recorder=recorder).read is None


def test_refusals(model):
    cache = ALL["snapkv"].make(model)
    with pytest.raises(UnsupportedOperationError, match="seen nothing"):
        cache.plot()
    generate(model, tokens(20), cache, 2)
    with pytest.raises(UnsupportedOperationError, match="row 1"):
        Decisions.of(cache, 1)


def test_figure(model, tmp_path):
    pytest.importorskip("matplotlib")
    cache, recorder = _run(model, ALL["quest"])
    figure = plot.draw(Decisions.of(cache, recorder=recorder))
    titles = [axes.get_title() for axes in figure.axes]
    assert any("where each token is" in title for title in titles) and any("read it" in title for title in titles)
    image = figure.axes[0].images[0].get_array()
    assert image.shape == (len(cache.sparse_layers), PROMPT + STEPS - 1, 3)
    cache.plot(tmp_path / "cache.png")
    assert (tmp_path / "cache.png").read_bytes().startswith(b"\x89PNG")


def test_colours_of_a_mixed_place():
    places = {"device": torch.tensor([[1.0, 0.0, 0.5]]), "host": torch.tensor([[0.0, 0.0, 0.5]])}
    image = plot.mixed(Decisions("any", [0], places, torch.ones(1, 1)))
    assert image[0, 1].tolist() == [1, 1, 1]  # evicted: white
    blue, orange = ([int(plot.COLOURS[place][i : i + 2], 16) / 255 for i in (1, 3, 5)] for place in ("device", "host"))
    torch.testing.assert_close(image[0, 0], torch.tensor(blue))
    torch.testing.assert_close(image[0, 2], (torch.tensor(blue) + torch.tensor(orange)) / 2)


def test_no_matplotlib(model, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    cache, _ = _run(model, ALL["snapkv"])
    with pytest.raises(KVSparseError, match="pip install matplotlib"):
        cache.plot()


def test_page_is_self_contained(model, tmp_path):
    cache, recorder = _run(model, ALL["snapkv"])
    pieces = ["</script>", "<b>", "$data", "é", *["x"] * (PROMPT - 4)]
    decisions = Decisions.of(cache, tokens=pieces, recorder=recorder)
    text = page.render(decisions)
    assert not re.search(r"(src|href)\s*=|https?://|@import|fetch\(", text)
    assert text.count("</script>") == 1
    data = json.loads(re.search(r"const data = (.*);\n", text).group(1))
    assert data["tokens"] == [*pieces, *[""] * (STEPS - 1)]
    share = torch.frombuffer(bytearray(base64.b64decode(data["places"]["device"])), dtype=torch.uint8)
    want = (decisions.places["device"] * 255).round().flatten()
    assert torch.equal(share.float(), want)
    cache.plot(tmp_path / "cache.html", tokens=pieces)
    assert "é" in (tmp_path / "cache.html").read_text(encoding="utf-8")


def test_command(tmp_path):
    pytest.importorskip("matplotlib")
    folder = save_tiny_folder(tmp_path / "model")
    arguments = ["inspect", "-m", str(folder), "-p", "quest-1024", "-o", "budget=64", "-o", "dense_layers=0"]
    run = CliRunner().invoke(app, [*arguments, "--prompt", "word " * 40, "--max-new-tokens", "4", "--output", str(tmp_path / "out" / "a.b")])
    assert run.exit_code == 0, run.output
    assert (tmp_path / "out" / "a.b.png").is_file() and (tmp_path / "out" / "a.b.html").is_file()
    assert "quest" in run.output
    refused = CliRunner().invoke(app, ["inspect", "-m", str(folder)])
    assert refused.exit_code == 2


