"""The tasks: what they ask, in which words and lengths, and what they refuse."""

import json
import re

import pytest
from eval_tools import LONGBENCH_ROW, answered, questions, write

from kvsparse_hf import KVSparseError, OptionError
from kvsparse_hf.cli.loading import parse_options
from kvsparse_hf.eval import get_task, list_tasks
from kvsparse_hf.eval.tasks.gsm8k import score_answer
from kvsparse_hf.eval.tasks.longbench import without_middle
from kvsparse_hf.eval.tasks.longgen import split_answers
from kvsparse_hf.eval.tasks.words import made_up, pairs, spread

GENERATED = {
    "kv": {"pairs": 4},
    "lines": {"lines": 12},
    "multiturn": {"length": 2000, "questions": 3},
    "passkey": {"depths": 6},
    "ruler": {"tasks": ["niah_multikey", "vt"], "lengths": [2500], "depths": [0.0, 0.5], "samples": 2},
}


# --- all tasks


def test_unknown_names_come_with_the_nearest():
    with pytest.raises(KVSparseError, match="Did you mean 'gsm8k'"):
        get_task("gsmk8")
    with pytest.raises(OptionError, match="task kv has no option 'pair'. Did you mean 'pairs'"):
        get_task("kv", pair=3)
    with pytest.raises(OptionError, match="pairs=0"):
        get_task("kv", pairs=0)
    with pytest.raises(KVSparseError, match="Did you mean 'niah_single'"):
        get_task("ruler", tasks="niah_singel")
    with pytest.raises(KVSparseError, match="Did you mean 'hotpotqa'"):
        get_task("longbench", tasks=["hotpotq"])
    with pytest.raises(KVSparseError, match="between 0 and 1"):
        get_task("ruler", depths=[50])


@pytest.mark.parametrize("name", GENERATED)
def test_generated_examples_follow_from_the_seed_and_a_limit_takes_the_first(setting, name):
    task = get_task(name, **GENERATED[name])
    examples = task.examples(setting(limit=4))
    assert examples == task.examples(setting(limit=4)) != task.examples(setting(limit=4, seed=1))
    fewer = task.examples(setting(limit=1))
    assert fewer == examples[: len(fewer)] and 0 < len(fewer) < len(examples)
    assert len({example.id for example in examples}) == len({example.mark() for example in examples}) == len(examples)
    assert all(task.primary in task.score(example, answered(*[""] * (1 + len(example.turns)))) for example in examples)


def test_a_mark_tells_questions_apart(setting):
    (one,) = get_task("kv", pairs=3).examples(setting(limit=1))
    (other,) = get_task("kv", pairs=3).examples(setting(limit=1, max_new_tokens=5))
    assert one.id == other.id and one.mark() != other.mark() and other.max_new_tokens == 5


def test_generators_refuse_data_and_take_tasks_from_the_list(setting, tmp_path):
    assert set(GENERATED) < set(list_tasks())
    for name in ("passkey", "multiturn"):
        with pytest.raises(KVSparseError, match="reads no --data"):
            get_task(name).examples(setting(data=tmp_path))


def test_words_are_distinct_and_depths_spread():
    import random

    rng = random.Random(0)
    assert len(set(pairs(rng, 500))) == 500 and len(set(made_up(rng, 500))) == 500
    depths = [0.0, *sorted(spread(index) for index in range(10)), 1.0]
    assert max(after - before for before, after in zip(depths, depths[1:])) < 0.17  # noqa: B905


# --- one by one


def test_kv_asks_for_a_pair_that_is_there(setting):
    for example in get_task("kv", pairs=5).examples(setting(limit=8)):
        records = json.loads(re.search(r"\{.*\}", example.prompt, re.DOTALL).group())
        key = re.search(r'key "([^"]+)"', example.answer_begins).group(1)
        assert len(records) == 5 and records[key] == example.references
        assert list(records).index(key) == int(example.group["depth"] * 5)
        assert get_task("kv").score(example, answered(example.references.upper())) == {"accuracy": 1.0}


def test_kv_reads_published_rows(setting, tmp_path):
    row = {"ordered_kv_records": [["a", "1"], ["b", "2"]], "key": "b", "value": "2"}
    (example,) = get_task("kv").examples(setting(data=write(tmp_path / "some.jsonl", [row])))
    assert '"b": "2"' in example.prompt and example.references == "2" and example.group == {"depth": 0.75}


def test_lines_asks_for_a_line_that_is_there(setting, tmp_path):
    for example in get_task("lines", lines=9).examples(setting(limit=5)):
        name = re.search(r"line (\S+):", example.answer_begins).group(1)
        assert f"line {name}: the number is <{example.references}>" in example.prompt.splitlines()
    row = {"prompt": "line x: <7>. What is x?", "expected_number": 7}
    (example,) = get_task("lines").examples(setting(data=write(tmp_path / "lines.jsonl", [row])))
    assert get_task("lines").score(example, answered("7>")) == {"accuracy": 1.0}


def test_passkey_trials_stand_at_all_depths(setting):
    task = get_task("passkey", depths=10)
    depths = [example.group["depth"] for example in task.examples(setting())]
    assert sorted(depths) == [round((i + 0.5) / 10, 4) for i in range(10)] and max(depths[:4]) - min(depths[:4]) > 0.3
    example = task.examples(setting(limit=1))[0]
    assert task.score(example, answered(f'{example.references}".')) == {"found": 1.0}


def test_multiturn_asks_for_every_fact_once(setting):
    task = get_task("multiturn", length=2000, questions=3)
    for example in task.examples(setting(limit=3)):
        asked = [example.answer_begins, *(begins for _, begins in example.turns)]
        names = [re.search(r"of (\w+) is", text).group(1) for text in asked]
        assert len(set(names)) == 3
        for name, number in zip(names, example.references, strict=True):
            assert f"The locker number of {name} is {number}." in example.prompt
        assert len(example.prompt.rpartition("\n\n")[0]) <= 2000
    right = task.score(example, answered(*[f" {number}." for number in example.references]))
    assert right == {"accuracy": 1.0, "first": 1.0, "later": 1.0}
    assert task.score(example, answered(f" {example.references[0]}", "1", "2")) == {
        "accuracy": 1 / 3,
        "first": 1.0,
        "later": 0.0,
    }


def test_gsm8k_prompts(setting, tmp_path):
    write(tmp_path / "test.jsonl", questions(5))
    write(tmp_path / "train.jsonl", [{"question": f"Q{n}", "answer": f"<<1+1=2>>A{n}\n#### {n}"} for n in range(9)])
    zero = get_task("gsm8k").examples(setting(data=tmp_path))
    assert [example.references for example in zero] == ["1", "2", "3", "4", "5"]
    assert (
        zero[0].chat
        and zero[0].prompt.startswith("What is 0 + 1?\n\nThink")
        and "####" not in zero[0].prompt
        and zero[0].max_new_tokens == 400
    )
    (few,) = get_task("gsm8k", shots=8).examples(setting(data=tmp_path, limit=1))
    assert not few.chat and few.prompt.startswith("Question: Q0\nAnswer: A0\n#### 0\n\nQuestion: Q1\n")
    assert few.prompt.endswith("#### 7\n\nQuestion: What is 0 + 1?\nAnswer:") and "Question:" in few.stop
    with pytest.raises(KVSparseError, match="train.jsonl"):
        get_task("gsm8k", shots=8).examples(setting(data=tmp_path / "test.jsonl"))
    with pytest.raises(KVSparseError, match="has 9 rows, 10 shots"):
        get_task("gsm8k", shots=10).examples(setting(data=tmp_path))


@pytest.mark.parametrize(
    "written, asked",
    [
        ("instruction=", ""),
        ("instruction=''", ""),
        ("instruction=Think.", "\n\nThink."),
        ("instruction=End with #### N", "\n\nEnd with #### N"),
    ],
)
def test_gsm8k_instruction(setting, tmp_path, written, asked):
    task = get_task("gsm8k", **parse_options([written]))
    (example,) = task.examples(setting(data=write(tmp_path / "test.jsonl", questions(1))))
    assert example.prompt == f"What is 0 + 1?{asked}"


@pytest.mark.parametrize(
    "text, flexible, strict, invalid_zero_shot, invalid_few_shot",
    [
        ("#### 1", 1, 1, 0, 0),
        ("0 + 1 is\n1", 1, 0, 0, 1),
        ("#### $1", 1, 0, 0, 1),
        ("so it is one.", 0, 0, 1, 1),
        ("", 0, 0, 1, 1),
    ],
)
def test_gsm8k_answers_without_a_number(
    setting, tmp_path, text, flexible, strict, invalid_zero_shot, invalid_few_shot
):
    for name in ("test", "train"):
        write(tmp_path / f"{name}.jsonl", questions(1))
    for shots, invalid in ((0, invalid_zero_shot), (1, invalid_few_shot)):
        task = get_task("gsm8k", shots=shots)
        (example,) = task.examples(setting(data=tmp_path))
        found = task.score(example, answered(text))
        assert found == {"flexible_extract": flexible, "strict_match": strict, "invalid": invalid}
    assert score_answer(text, "1")["invalid"] == invalid_zero_shot, (
        "zero-shot is the default, as of examples/reasoning.py"
    )


def test_longgen_numbers_questions_and_reads_answers(setting, tmp_path):
    file = write(tmp_path / "test.jsonl", questions(7))
    task = get_task("longgen", questions=3)
    first, second = task.examples(setting(data=file))
    assert (
        "Question_3:\nWhat is 2 + 1?" in first.prompt
        and first.references == ["1", "2", "3"]
        and second.references[0] == "4"
    )
    assert first.answer_begins == "Answer_1:"
    text = " 0 + 1 is 1. The answer is 1.\n\nAnswer_2: The answer is $2,000.\n\nAnswer_3: so 3"
    assert task.score(first, answered(text)) == {"accuracy": 2 / 3, "answered": 1.0}
    assert task.score(first, answered("")) == {"accuracy": 0.0, "answered": 0.0}
    assert split_answers("Answer_9: The answer is **12**. Question_10: 5") == {9: "12"}


def test_longgen_reads_published_rows(setting, tmp_path):
    row = {
        "prompt": "Question_9:\nA?\nQuestion_10:\nB?",
        "questions": ["A?", "B?"],
        "answers": ["x\n#### 1", "y\n#### 2"],
    }
    task = get_task("longgen")
    (example,) = task.examples(setting(data=write(tmp_path / "gsm8k_30.jsonl", [row])))
    assert example.answer_begins == "Answer_9:" and example.max_new_tokens == 272
    assert task.score(example, answered(" The answer is 1.\nAnswer_10: The answer is 3.")) == {
        "accuracy": 0.5,
        "answered": 1.0,
    }


def test_longbench_prompts_lengths_and_templates(setting, tmp_path):
    from kvsparse_hf.eval.metrics.longbench import METRICS

    for name in METRICS:
        write(tmp_path / f"{name}.jsonl", [LONGBENCH_ROW])
    examples = {example.subset: example for example in get_task("longbench").examples(setting(data=tmp_path))}
    assert list(examples) == list(METRICS)
    assert {name for name, example in examples.items() if not example.chat} == {
        "trec",
        "triviaqa",
        "samsum",
        "lcc",
        "repobench-p",
    }
    assert examples["samsum"].end_text == "\n" and not any(e.end_text for n, e in examples.items() if n != "samsum")
    lengths = {name: example.max_new_tokens for name, example in examples.items()}
    assert (
        lengths["hotpotqa"] == 32
        and lengths["trec"] == 64
        and lengths["samsum"] == 128
        and lengths["gov_report"] == 512
    )
    assert examples["hotpotqa"].prompt.endswith("Question: Who?\nAnswer:") and "Some text." in examples["lcc"].prompt
    chosen = get_task("longbench", tasks="lcc,trec").examples(setting(data=tmp_path))
    assert [example.subset for example in chosen] == ["lcc", "trec"]


def test_longbench_leaves_out_the_middle(setting, loaded, tmp_path):
    text = "".join(map(str, range(100)))
    assert without_middle(loaded[1], text, 500) == text
    assert without_middle(loaded[1], text, 21) == text[:10] + text[-10:]
    file = write(tmp_path / "hotpotqa.jsonl", [{**LONGBENCH_ROW, "context": "x" * 5000}])
    (example,) = get_task("longbench").examples(setting(data=file))
    assert len(example.prompt) == (2048 - 32 - 100) // 2 * 2
    (example,) = get_task("longbench", max_length=100).examples(setting(data=file))
    assert len(example.prompt) == 100 and example.prompt.endswith("Answer:")


def test_longbench_files_are_named_after_their_task(setting, tmp_path):
    file = write(tmp_path / "mine.jsonl", [LONGBENCH_ROW])
    with pytest.raises(KVSparseError, match="named after its task"):
        get_task("longbench").examples(setting(data=file))
    assert get_task("longbench", tasks="qasper").examples(setting(data=file))[0].subset == "qasper"
    with pytest.raises(KVSparseError, match="holds no TASK.jsonl"):
        get_task("longbench").examples(setting(data=tmp_path))
    with pytest.raises(KVSparseError, match="holds no lcc.jsonl"):
        get_task("longbench", tasks="lcc").examples(setting(data=tmp_path))


def test_perplexity_windows_score_every_token_once(setting, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("0123456789" * 10, encoding="utf-8")
    examples = get_task("ppl", prompt=30, tokens=20).examples(setting(data=text))
    assert len(examples) == 3 and all(len(example.ids) == 50 for example in examples)
    assert examples[1].ids[:30] == examples[0].ids[20:]
    with pytest.raises(KVSparseError, match="100 tokens; a window needs 200"):
        get_task("ppl", prompt=100, tokens=100).examples(setting(data=text))
