"""The recall model's texts: every answer must follow from the text, by a solver that reads words alone. And its weights, which
are part of the package."""

import json
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from kvsparse_hf.recall import TASKS, load_model, make_questions, make_tokenizer
from kvsparse_hf.recall.model import FOLDER
from kvsparse_hf.recall.tasks import IGNORED, STEP, chains_batch, facts_batch
from kvsparse_hf.recall.vocabulary import IDS, WORDS


@pytest.mark.parametrize("size", [60, 400, 2048])
def test_facts_can_be_found(size):
    for question in make_questions("facts", 8, size, seed=size):
        words = question.prompt.split()
        assert len(words) + 3 <= size
        name, number = question.answer.split()
        assert words[-3:] == ["?", name, "=>"]
        at = words.index(name)
        assert words[at : at + 3] == [name, number, "."] and words.count(name) == 2
        assert abs(question.depth - at / len(words)) < 0.1


@pytest.mark.parametrize("steps", [3, 8, 40])
def test_chains_can_be_solved(steps):
    for question in make_questions("chains", 6, steps, seed=steps):
        words = question.prompt.split()
        value, solution = {"none": 0}, []
        for at in (i for i, word in enumerate(words) if word == "let"):
            name, operand, sign, change = words[at + 1 : at + 5]
            base = value[operand]
            value[name] = (base + (int(change) if sign == "+" else -int(change))) % 10
            solution += [name, operand, sign, change, ":", str(base), "=", name, str(value[name]), "."]
        assert words[-1] == "solve" and question.answer.split() == solution
        assert len(value) == steps + 1


def test_later_steps_reach_back():
    """Steps lean on any earlier one, so that old results are needed late."""
    distances = []
    for question in make_questions("chains", 20, 30):
        answer = question.answer.split()
        steps = [answer[i : i + STEP] for i in range(0, len(answer), STEP)]
        order = {step[0]: index for index, step in enumerate(steps)}
        distances += [index - order[step[1]] for index, step in enumerate(steps) if step[1] != "none"]
    assert min(distances) == 1 and max(distances) > 20 and sum(distances) / len(distances) > 5


@pytest.mark.parametrize("task", TASKS)
def test_tokenizer_reads_its_own_texts(task):
    tokenizer = make_tokenizer()
    for question in make_questions(task, 4, 60 if task == "facts" else 5):
        text = f"{question.prompt} {question.answer}"
        ids = tokenizer(text).input_ids
        assert ids[0] == tokenizer.bos_token_id and tokenizer.unk_token_id not in ids
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert len(tokenizer) == len(WORDS) == len(set(WORDS))


def test_labels_stand_on_answers_alone():
    generator = torch.Generator().manual_seed(0)
    facts = facts_batch(4, 120, 10, 3, generator)
    assert ((facts.labels >= 0).sum(1) == 2 * 3).all()
    chains = chains_batch(4, 6, 2, generator)
    assert ((chains.labels >= 0).sum(1) == STEP * 6).all()
    for batch in (facts, chains):
        chosen = batch.labels != IGNORED
        assert torch.equal(batch.labels[chosen], batch.ids[chosen])
        assert (batch.ids[:, 0] == IDS["<s>"]).all() and batch.ids.max() < len(WORDS)


def test_seeds():
    assert make_questions("facts", 3, 90, seed=1) == make_questions("facts", 3, 90, seed=1)
    assert make_questions("facts", 3, 90, seed=1) != make_questions("facts", 3, 90, seed=2)
    with pytest.raises(ValueError, match="facts, chains"):
        make_questions("sums", 1, 10)


# --- the model in the package


def test_weights_are_small_and_plain():
    (weights,) = FOLDER.glob("*.safetensors")
    assert weights.stat().st_size <= 8 * 10**6
    assert {tensor.dtype for tensor in load_file(weights).values()} == {torch.bfloat16}
    assert {file.suffix for file in FOLDER.iterdir()} == {".json", ".safetensors"}


def test_shipped_tokenizer_is_the_one_of_this_version():
    model, shipped = load_model()
    made = make_tokenizer()
    assert json.loads(shipped.backend_tokenizer.to_str()) == json.loads(made.backend_tokenizer.to_str())
    assert shipped.special_tokens_map == made.special_tokens_map and shipped.padding_side == "left"
    assert model.config.vocab_size >= len(WORDS) and model.dtype is torch.float32 and not model.training


def test_it_loads_without_a_network(monkeypatch):
    def no(*args, **kwargs):
        raise OSError("no network")

    monkeypatch.setattr("socket.socket.connect", no)
    model, tokenizer = load_model(dtype=torch.bfloat16)
    inputs = tokenizer("the bako 37 . old road ? bako =>", return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=2, do_sample=False)
    assert tokenizer.decode(output[0, -2:]) == "bako 37"  # as the docstring says


def test_wheel_and_sdist_hold_it(tmp_path):
    pytest.importorskip("hatchling")
    root = Path(__file__).parents[1]
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-d", str(tmp_path)], cwd=root, check=True, capture_output=True
    )
    (wheel,), (sdist,) = tmp_path.glob("*.whl"), tmp_path.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive, tarfile.open(sdist) as other:
        packed, source = set(archive.namelist()), {name.partition("/")[2] for name in other.getnames()}
    shipped = {f"kvsparse_hf/recall/weights/{file.name}" for file in FOLDER.iterdir()}
    assert shipped <= packed and shipped <= source and "kvsparse_hf/configs/full.yaml" in packed
