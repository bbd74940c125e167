"""The calibration of KVSharer: the order of the pairs, what is accepted, and that an interrupted run goes on."""

import json

import pytest
import torch
from helpers import CACHE, forward, tokens
from tiny_folder import save_tiny_folder
from tiny_models import build
from typer.testing import CliRunner

from kvsparse_hf import FullCache, KVSharerCache, KVSparseError
from kvsparse_hf.calibrate import kvsharer
from kvsparse_hf.calibrate.kvsharer import calibrate_kvsharer, layer_distances, rank_pairs
from kvsparse_hf.cli import app
from kvsparse_hf.plans import Plan

LAYERS = 5


def _model():
    return build(num_hidden_layers=LAYERS)


def _windows(count=5, length=12):
    return [tokens(length, seed=seed)[0] for seed in range(count)]


def test_distances_by_hand():
    model, windows = _model(), _windows()
    keys, values = [], []
    for window in windows:
        cache = FullCache(model)
        forward(model, window[None], cache)
        exported = [layer.store.export() for layer in cache.layers]
        keys.append(torch.stack([found[0][0] for found in exported]))
        values.append(torch.stack([found[1][0] for found in exported]))
    mean_keys, mean_values = torch.stack(keys).mean(0), torch.stack(values).mean(0)
    got = layer_distances(model, torch.stack(windows))
    assert set(got) == {(deep, shallow) for deep in range(LAYERS) for shallow in range(deep)}
    for (deep, shallow), distance in got.items():
        expected = sum((mean[deep] - mean[shallow]).norm(dim=-1).mean() for mean in (mean_keys, mean_values)) / 2
        assert distance == pytest.approx(float(expected), rel=1e-5)


def test_order_of_the_pairs():
    distances = {(1, 0): 1.0, (2, 0): 3.0, (2, 1): 2.0}
    assert rank_pairs(distances, "dissimilar", 0) == [(2, 0), (2, 1), (1, 0)]
    assert rank_pairs(distances, "similar", 0) == [(1, 0), (2, 1), (2, 0)]
    assert sorted(rank_pairs(distances, "random", 3)) == sorted(distances)
    assert len({tuple(rank_pairs(distances, "random", seed)) for seed in range(8)}) > 1


def test_accepts_while_the_model_bears_it(tmp_path):
    """Every accepted pair meets both limits on top of those before; what was measured can be measured again."""
    model, windows = _model(), _windows()
    plan = calibrate_kvsharer(model, windows, tmp_path / "plan.safetensors", shared=3, cosine=0.2, divergence=20.0)
    pairs = plan.tensors["pairs"].tolist()
    assert len(pairs) == 3 and len({reader for reader, _ in pairs}) == 3
    assert all(reader > source for reader, source in pairs)
    ids = torch.stack(windows)
    dense = model(ids, output_hidden_states=True, use_cache=False)
    for count in (1, 3):
        mine = KVSharerCache(model, plan=tmp_path / "plan.safetensors", shared=count)
        shared = model(ids, output_hidden_states=True, **{CACHE: mine})
        cosine = torch.cosine_similarity(dense.hidden_states[-1], shared.hidden_states[-1], dim=-1).mean()
        logs, theirs = dense.logits.log_softmax(-1), shared.logits.log_softmax(-1)
        assert plan.facts["cosine_reached"][count - 1] == pytest.approx(float(cosine), abs=1e-4)
        assert plan.facts["divergence_reached"][count - 1] == pytest.approx(float((logs.exp() * (logs - theirs)).sum(-1).mean()), rel=1e-3)
        assert cosine > 0.2 and plan.facts["divergence_reached"][count - 1] <= 20


def test_limits_refuse_pairs(tmp_path):
    model, windows, path = _model(), _windows(), tmp_path / "plan.yaml"
    with pytest.raises(KVSparseError, match="no two layers"):
        calibrate_kvsharer(model, windows, path, shared=2, cosine=0.9999)
    (tmp_path / "plan.yaml.partial").unlink()
    free = calibrate_kvsharer(model, windows, path, shared=2, cosine=-1.0)
    (limit,) = free.facts["divergence_reached"][:1]
    strict = calibrate_kvsharer(model, windows, path, shared=1, cosine=-1.0, divergence=limit * 0.999)
    assert strict.tensors["pairs"].tolist()[0] != free.tensors["pairs"].tolist()[0]
    with pytest.raises(KVSparseError, match="one length"):
        calibrate_kvsharer(model, [tokens(5)[0], tokens(6)[0]], path)
    with pytest.raises(KVSparseError, match="one length"):
        calibrate_kvsharer(model, [], path)


def test_an_interrupted_run_goes_on(tmp_path, monkeypatch):
    model, windows, path = _model(), _windows(), tmp_path / "plan.safetensors"
    options = dict(shared=3, cosine=0.0)
    whole = calibrate_kvsharer(model, windows, tmp_path / "other.safetensors", **options)
    judged, original = [], kvsharer._judge

    def judge(*args):
        if len(judged) == 1:
            raise KeyboardInterrupt
        judged.append(1)
        return original(*args)

    monkeypatch.setattr(kvsharer, "_judge", judge)
    with pytest.raises(KeyboardInterrupt):
        calibrate_kvsharer(model, windows, path, **options)
    left = json.loads((tmp_path / "plan.safetensors.partial").read_text())
    assert len(left["items"]) >= 1 and not path.exists()
    monkeypatch.setattr(kvsharer, "_judge", lambda *args: judged.append(1) or original(*args))
    seen = []
    resumed = calibrate_kvsharer(model, windows, path, **options, progress=lambda done, wanted: seen.append((done, wanted)))
    assert torch.equal(resumed.tensors["pairs"], whole.tensors["pairs"]) and resumed.facts == whole.facts
    assert seen[-1] == (3, 3) and not (tmp_path / "plan.safetensors.partial").exists()
    # Another setting starts anew.
    (tmp_path / "plan.safetensors.partial").write_text(json.dumps(left))
    judged.clear()
    calibrate_kvsharer(model, windows, path, shared=1, cosine=-1.0)
    assert judged


def test_the_command(tmp_path):
    folder, text = save_tiny_folder(tmp_path / "model"), tmp_path / "text.txt"
    text.write_text("A short text, repeated until there is enough of it to read. " * 20)
    plan = tmp_path / "plan.safetensors"
    arguments = ["calibrate", "kvsharer", str(folder), str(text), "-o", str(plan), "--shared", "1", "--windows", "3", "--length", "16",
                 "--cosine", "-1", "--device", "cpu"]  # fmt: skip
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "1 reads 0" in result.output
    assert Plan.load(plan, "kvsharer").tensors["pairs"].tolist() == [[1, 0]]
    assert CliRunner().invoke(app, [*arguments, "--order", "alphabetic"]).exit_code != 0
