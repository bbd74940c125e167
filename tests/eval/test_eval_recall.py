"""The recall model tells methods apart: what is evicted is lost, what is skipped or moved is not. And the task's own rules."""

import io

import pytest
from eval_tools import answered, refused, rows
from rich.console import Console
from typer.testing import CliRunner

from kvsparse_hf import KVSparseError, OptionError
from kvsparse_hf.cli import app
from kvsparse_hf.eval import get_task, list_tasks
from kvsparse_hf.eval.command import Request, run
from kvsparse_hf.eval.results import show
from kvsparse_hf.eval.tasks import Setting
from kvsparse_hf.recall import LENGTH, STEPS, load_model, make_tokenizer

QUEST, SNAPKV, STREAMING = "quest-1024:budget=0.125", "snapkv-512:budget=0.125", "streaming-llm-512:budget=0.125"
OFFLOAD, H2O = "tiered-50:recent=16", "h2o-20:budget=0.5"
EVICT = "tiered-50:recent=16,hbm=0.5,host=0,evicted=0.5"


def scores(output, options, presets):
    """Summaries by preset, with nothing printed."""
    request = Request(presets=presets, task_options=options, batch_size=16, device="cpu", output=output)
    return {planned.contender.label: summary for planned, summary in run(request, Console(quiet=True))}


def test_facts_at_an_eighth_of_the_prompt(tmp_path):
    found = scores(tmp_path, ("tasks=facts", f"lengths={LENGTH // 2}", "samples=32"), (QUEST, SNAPKV, STREAMING))
    exact = {name: summary.scores["exact"].value for name, summary in found.items()}
    assert exact["full"] >= 98 and exact[QUEST] >= 95
    old = [score for (_, depth), score in found[STREAMING].cells.items() if depth < 0.75]
    assert len(old) == 3 and max(old) <= 30
    assert exact[STREAMING] <= exact[SNAPKV]
    for name in (SNAPKV, STREAMING):
        assert found[name].share < 0.16


def test_chains_with_half_of_the_tokens_elsewhere(tmp_path):
    found = scores(tmp_path, ("tasks=chains", f"steps={STEPS // 4}", "samples=32"), (OFFLOAD, EVICT, H2O))
    exact = {name: summary.scores["exact"].value for name, summary in found.items()}
    assert exact["full"] >= 98 and exact[OFFLOAD] == exact["full"]
    assert found[OFFLOAD].scores["words"] == found["full"].scores["words"]
    assert max(exact[EVICT], exact[H2O]) <= exact["full"] / 2


# --- the task


@pytest.fixture
def setting():
    tokenizer = make_tokenizer()
    return lambda **kwargs: Setting(tokenizer, 4096, **kwargs)


def test_examples_follow_from_the_seed_and_a_limit_takes_the_first(setting):
    task = get_task("recall", lengths=[60, 90], steps=4, samples=6)
    examples = task.examples(setting())
    assert examples == task.examples(setting()) != task.examples(setting(seed=1))
    assert task.examples(setting(limit=2)) == [e for e in examples if int(e.id.split("/")[-1]) < 2]
    assert len({e.id for e in examples}) == len({e.mark() for e in examples}) == len(examples) == 18
    assert {(e.subset, e.max_new_tokens) for e in examples} == {("facts", 2), ("chains", 40)}
    assert {e.group["depth"] for e in examples if e.subset == "facts"} <= {0.125, 0.375, 0.625, 0.875}


def test_an_answer_is_right_word_for_word(setting):
    task = get_task("recall", tasks="chains", steps=1, samples=1)
    (example,) = task.examples(setting())
    words = example.references.split()
    assert len(words) == 10 and task.score(example, answered(example.references)) == {"exact": 1.0, "words": 1.0}
    wrong = " ".join([*words[:-2], "100", "."])
    assert task.score(example, answered(wrong)) == {"exact": 0.0, "words": 0.9}
    assert task.score(example, answered(example.references + " so")) == {"exact": 0.0, "words": 1.0}
    assert task.score(example, answered("")) == {"exact": 0.0, "words": 0.0}


def test_bad_options(setting, tmp_path):
    with pytest.raises(KVSparseError, match="Did you mean 'chains'"):
        get_task("recall", tasks="chain")
    with pytest.raises(KVSparseError, match="24 tokens or more"):
        get_task("recall", lengths=[8])
    with pytest.raises(OptionError, match="steps=0"):
        get_task("recall", steps=0)
    with pytest.raises(KVSparseError, match="no --data"):
        get_task("recall").examples(setting(data=tmp_path))


def test_only_this_task_has_a_model_of_its_own(folder, tmp_path):
    for name in list_tasks():
        if name != "recall":
            refused(
                CliRunner().invoke(app, ["eval", name, "-o", str(tmp_path / "out")]), f"the task {name} needs --model"
            )
    other = CliRunner().invoke(app, ["eval", "recall", "--model", str(folder), "-o", str(tmp_path / "out")])
    refused(other, "words of the recall model", "leave --model out")
    assert not (tmp_path / "out").exists()


def test_it_is_the_default_of_the_command(tmp_path):
    options = ["-t", "lengths=60", "-t", "steps=3", "--limit", "3", "-p", "snapkv-512:budget=0.5", "-o", str(tmp_path)]
    result = CliRunner().invoke(app, ["eval", *options])
    assert result.exit_code == 0, result.output
    full, small = rows(tmp_path)
    assert full["metric"] == "recall/exact" and full["shape"]["model"] == "recall" and full["n"] == 6
    assert set(full["subsets"]) == {"facts", "chains"} and small["case"] == "snapkv-512:budget=0.5"
    assert "chat template" not in result.stdout


@pytest.mark.parametrize("width", [80, 200])
def test_long_labels_do_not_push_the_figures_out(tmp_path, width):
    presets = ("streaming-llm-512:budget=0.5", "retrieval-flat-2048:budget=0.5,sinks=4,recent=16")
    request = Request(
        presets=presets, task_options=("lengths=60", "steps=3", "samples=2"), batch_size=4, device="cpu", output=tmp_path
    )
    outcomes = run(request, Console(quiet=True))
    console = Console(width=width, record=True, file=io.StringIO())
    show(console, get_task("recall"), outcomes)
    text = console.export_text()
    assert all(label in text for label in presets) and "…" not in text
    figures = [line for line in text.splitlines() if line.count("±") >= 3]  # exact, its difference, words
    assert len(figures) >= 2


def test_a_batch_gives_what_each_row_gives_alone(tmp_path):
    from kvsparse_hf.eval.contenders import Contender
    from kvsparse_hf.eval.engine import Engine

    engine = Engine(*load_model())
    examples = get_task("recall", tasks="facts", lengths=[120, 200], samples=3).examples(
        Setting(engine.tokenizer, 4096)
    )
    make = Contender.parse("quest-1024:budget=0.5,page_size=4,recent=4").make
    together = engine.answer(examples, make(engine.model))
    alone = [engine.answer([example], make(engine.model))[0] for example in examples]
    assert [one.texts for one in together] == [one.texts for one in alone]
