"""Bad input: page sizes, budgets, a basis of another model, faiss missing."""

import importlib.util
import json

import pytest
import torch
from helpers import dense, generate, tokens
from safetensors.torch import save_file
from tiny_models import build
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from kvsparse_hf import (
    BudgetError,
    KVSparseError,
    LokiCache,
    OptionError,
    PresetError,
    QuestCache,
    RetrievalAttentionCache,
    SparQCache,
)
from kvsparse_hf.calibrate.cli import app
from kvsparse_hf.calibrate.loki import calibrate_loki, fingerprint


@pytest.mark.parametrize("page_size", [0, 3, 12, 24, 100])
def test_page_size_must_be_a_power_of_two(page_size):
    with pytest.raises(OptionError, match="page_size"):
        QuestCache(build(), page_size=page_size, budget=2048)


@pytest.mark.parametrize(
    "cache, options, least",
    [
        (QuestCache, {"sinks": 4, "recent": 16}, 64),  # a page of sinks, two of recents, one free
        (QuestCache, {"sinks": 0, "recent": 1}, 32),
        (QuestCache, {"sinks": 17, "recent": 18, "page_size": 16}, 96),
        (QuestCache, {"sinks": 4, "recent": 1, "page_size": 64}, 192),
        (LokiCache, {"sinks": 2, "recent": 5}, 8),
        (SparQCache, {"recent": 32}, 33),
        (RetrievalAttentionCache, {}, 641),
    ],
)
def test_budget_must_hold_what_is_always_read(cache, options, least):
    model = build()
    with pytest.raises(BudgetError, match=f"= {least}"):
        cache(model, budget=least - 1, **options)
    cache(model, budget=least, **options)


def test_more_channels_than_there_are():
    model = build()
    for make in (lambda: SparQCache(model, channels=17), lambda: LokiCache(model, d_f=17), lambda: LokiCache(model, d_f=1.5)):
        with pytest.raises(OptionError, match="head size 16"):
            make()


def test_hnsw_without_faiss(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "faiss" else find(name, *a))
    with pytest.raises(OptionError, match="pip install faiss-cpu"):
        RetrievalAttentionCache(build(), index="hnsw")


# --- the basis of Loki -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def basis(tmp_path_factory):
    path = tmp_path_factory.mktemp("loki") / "basis.safetensors"
    seen = []
    meta = calibrate_loki(build(), [tokens(100, seed=s)[0] for s in range(9)], path, max_tokens=450, progress=seen.append)
    assert seen == [100, 200, 300, 400, 450] and meta["tokens"] == 450
    assert 0.25 < meta["variance_in_quarter"] <= 1
    return str(path)


def test_calibrated_basis_is_used_as_it_is(basis):
    model = build()
    ids = tokens(60)
    ample = LokiCache(model, budget=500, basis=basis)
    assert torch.equal(generate(model, ids, ample, 20), generate(model, ids, dense(model), 20))
    held = ample.sparse_layers[1].selector.basis
    assert held.shape == (1, 2, 16, 16)
    few = LokiCache(model, budget=12, basis=basis)
    first = generate(model, ids, few, 20)
    few.reset()
    assert torch.equal(first, generate(model, ids, few, 20))
    assert torch.equal(few.sparse_layers[1].selector.basis, held)
    assert LokiCache(model.config, budget=12, basis=basis).options.basis == basis  # a config has no weights to compare


def test_basis_survives_rows_and_files(basis, tmp_path):
    model = build()
    cache = LokiCache(model, budget=12, basis=basis)
    answer = generate(model, tokens(40), cache, 6, num_beams=2)
    cache.save(tmp_path)
    loaded = LokiCache.load(tmp_path, model)
    for layer, other in zip(cache.sparse_layers, loaded.sparse_layers, strict=True):
        assert torch.equal(layer.selector.basis, other.selector.basis) and other.selector.basis.shape[0] == 1
    assert answer.shape == (1, 6)


def test_same_weights_in_another_precision_are_the_same_model(basis):
    LokiCache(build(dtype=torch.bfloat16), basis=basis)
    LokiCache(build(dtype=torch.float16), basis=basis)


@pytest.mark.parametrize(
    "other, match",
    [
        (lambda: build(seed=1), "other weights of the same shape"),
        (lambda: build("llama-mha"), "num_key_value_heads: calibrated on 2, here 4"),
        (lambda: build(num_hidden_layers=3), "num_hidden_layers"),
        (lambda: build("qwen3"), "model_type"),
    ],
)
def test_basis_of_another_model(basis, other, match):
    with pytest.raises(PresetError, match=match):
        LokiCache(other(), basis=basis)


def test_files_that_are_no_basis(basis, tmp_path):
    model = build()
    with pytest.raises(PresetError, match="not readable"):
        LokiCache(model, basis=str(tmp_path / "missing.safetensors"))
    (tmp_path / "text.safetensors").write_text("no tensors here, but long enough to look like a header")
    with pytest.raises(PresetError, match="not readable"):
        LokiCache(model, basis=str(tmp_path / "text.safetensors"))
    save_file({"x": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(PresetError, match="calibrate loki"):
        LokiCache(model, basis=str(tmp_path / "other.safetensors"))
    meta = {"kind": "kvsparse_hf loki basis", "model": fingerprint(model)}
    save_file({"basis.0": torch.zeros(2, 8, 8)}, tmp_path / "shape.safetensors", {"kvsparse": json.dumps(meta)})
    with pytest.raises(PresetError, match=r"shape \(2, 8, 8\)"):
        LokiCache(model, basis=str(tmp_path / "shape.safetensors"))


def test_command_line(tmp_path):
    """`kvsparse calibrate loki` on text files, with a model and tokenizer from a folder."""
    model = build()
    model.save_pretrained(tmp_path / "model")
    words = {f"w{i}": i for i in range(97)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w2"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w2").save_pretrained(tmp_path / "model")
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"w{3 + i * 7 % 90}" for i in range(300)))
    out = tmp_path / "basis.safetensors"
    options = ["--output", str(out), "--length", "64", "--tokens", "200", "--device", "cpu"]
    result = CliRunner().invoke(app, ["loki", str(tmp_path / "model"), str(text), *options])
    assert result.exit_code == 0, result.output
    assert "200 tokens" in result.output
    assert LokiCache(model, basis=str(out)).options.basis == str(out)


def test_nothing_to_calibrate_on(tmp_path):
    with pytest.raises(KVSparseError, match="no tokens"):
        calibrate_loki(build(), [], tmp_path / "none.safetensors")
