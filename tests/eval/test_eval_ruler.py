"""The generators of the task `ruler`."""

import re

import pytest
from eval_tools import answered, write

from kvsparse_hf import KVSparseError
from kvsparse_hf.eval import get_task


@pytest.mark.parametrize(
    "name, expected",
    [
        ("niah_single", 1),
        ("niah_multikey", 1),
        ("niah_multivalue", 4),
        ("niah_multiquery", 4),
        ("vt", 5),
        ("cwe", 10),
        ("fwe", 3),
    ],
)
def test_ruler_prompts_fill_their_length_and_hold_the_answer(setting, name, expected):
    task = get_task("ruler", tasks=name, lengths=[6000], depths=[0.5], samples=2)
    examples = task.examples(setting())
    assert len(examples) == 2
    for example in examples:
        assert len(example.references) == len(set(example.references)) == expected
        room = 6000 - example.max_new_tokens - 64
        assert 0.9 * room < len(example.prompt.encode()) <= room
        body = example.prompt.rpartition("\n\n")[0]
        assert all(reference in body for reference in example.references)
        assert task.score(example, answered(" and ".join(example.references))) == {"match": 1.0}


@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
def test_ruler_needle_stands_where_the_cell_says(setting, depth):
    (example,) = get_task("ruler", tasks="niah_multikey", lengths=[6000], depths=depth, samples=1).examples(setting())
    key = re.search(r"access number of (\S+) is", example.answer_begins).group(1)
    lines = example.prompt.split("\n\n")[1].splitlines()
    (at,) = [index for index, line in enumerate(lines) if key in line]
    assert abs(at / (len(lines) - 1) - depth) < 0.2 and example.group == {"length": 6000, "depth": depth}
    assert example.references[0] in lines[at] and sum("access numbers of" in line for line in lines) == 4


def test_ruler_variables_follow_from_each_other(setting):
    (example,) = get_task("ruler", tasks="vt", lengths=[4000], samples=1).examples(setting())
    assigned = dict(re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", example.prompt))
    value = re.search(r"value (\d+)", example.answer_begins).group(1)
    for name in example.references:
        while name in assigned:
            name = assigned[name]
        assert name == value


def test_ruler_counts_are_what_is_asked(setting):
    from collections import Counter

    cwe, fwe = (
        get_task("ruler", tasks=name, lengths=[9000], samples=1).examples(setting())[0] for name in ("cwe", "fwe")
    )
    counted = Counter(re.findall(r"\d+\. (\w+)", cwe.prompt)).most_common()
    assert (
        {word for word, times in counted[:10]} == set(cwe.references) and counted[9][1] == 30 and counted[10][1] == 3
    )
    counted = Counter(fwe.prompt.split("\n\n")[1].split()).most_common(4)
    assert [word for word, _ in counted[:3]] == fwe.references and counted[2][1] > counted[3][1]


def test_ruler_reads_published_rows_and_other_haystacks(setting, tmp_path):
    rows = write(tmp_path / "niah_multikey_3.first.jsonl", [{"input": "text", "outputs": ["a", "b"]}])
    (example,) = get_task("ruler").examples(setting(data=rows))
    assert example.subset == "niah_multikey_3" and get_task("ruler").score(example, answered("a")) == {"match": 0.5}
    book = tmp_path / "book.txt"
    book.write_text("Call me Ishmael.\n\nSome years ago.\n", encoding="utf-8")
    (example,) = get_task("ruler", tasks="niah_single", lengths=800, depths=0.5, samples=1).examples(
        setting(data=book)
    )
    assert example.prompt.count("Call me Ishmael.") > 3
    with pytest.raises(KVSparseError, match="choose a greater length"):
        get_task("ruler", tasks="niah_single", lengths=300).examples(setting())
