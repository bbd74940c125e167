"""`kvsparse bench decode`: what can be checked of it without a GPU."""

import json

import pytest

from kvsparse_hf import KVSparseError
from kvsparse_hf.bench import decode
from kvsparse_hf.bench.timing import Results

MODEL = {"model": "llama-3.1-8b", "budget": 2048}


def row(case: str, batch: int, context: int, value: float, **shape) -> dict:
    return {"metric": "ms_per_token", "case": case, "value": value, "gpu": "a GPU", "shape": {**MODEL, "batch": batch, "context": context, **shape}}


def test_the_picture_shows_the_newest_row_of_each_case(tmp_path, monkeypatch):
    figure = pytest.importorskip("matplotlib.figure")
    rows = [
        row("quest/fast_decode", 8, 32768, 9.5),
        row("quest/fast_decode", 1, 32768, 7.5),
        row("transformers-static/compiled", 8, 32768, 85.6),
        row("adakv/fast_decode", 8, 32768, 6.97, spread=8.0),
        row("quest/fast_decode", 8, 32768, 9.25),
    ]
    (tmp_path / "decode.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    drawn = []
    monkeypatch.setattr(figure.Figure, "savefig", lambda self, *_, **__: drawn.append(self))
    decode.plot(Results(tmp_path, "decode").newest("ms_per_token"), tmp_path / "decode.png")
    panels = {
        axes.get_title(): dict(zip((label.get_text() for label in axes.get_yticklabels()), (bar.get_width() for bar in axes.patches), strict=True))
        for axes in drawn[0].axes
    }
    assert panels == {
        "1 x 32K": {"quest/fast_decode": 7.5},
        "8 x 32K": {"transformers-static/compiled": 85.6, "quest/fast_decode": 9.25, "adakv/fast_decode, unequal heads": 6.97},
    }


@pytest.mark.parametrize("text", ["snapkv", "snapkv:1:32768", "snapkv/fast_decode:one:32768", "snapkv/fast_decode:1:2:3:4:5"])
def test_a_case_that_is_none(text):
    with pytest.raises(KVSparseError, match="is not system/how:batch:context"):
        decode.Case.parse(text)


def test_a_case_is_read():
    assert decode.Case.parse("quest/fast_decode-joined:8:32768") == decode.Case("quest", "fast_decode-joined", 8, 32768, 2048)
