"""Data that are damaged, empty or not there."""

import json

import pytest
from eval_tools import LONGBENCH_ROW, questions, write

from kvsparse_hf import KVSparseError
from kvsparse_hf.eval import get_task

READERS = [
    ("gsm8k", "answer"),
    ("kv", "value"),
    ("lines", "expected_number"),
    ("longgen", "answer"),
    ("longbench", "answers"),
    ("ruler", "outputs"),
]
GOOD = {
    "gsm8k": questions(1)[0],
    "longgen": questions(1)[0],
    "kv": {"ordered_kv_records": [["a", "1"]], "key": "a", "value": "1"},
    "lines": {"prompt": "x", "expected_number": 1},
    "longbench": LONGBENCH_ROW,
    "ruler": {"input": "x", "outputs": ["y"]},
}


@pytest.mark.parametrize("name, field", READERS)
def test_bad_files_are_refused_with_the_line(setting, tmp_path, name, field):
    file, good = tmp_path / "hotpotqa.jsonl", GOOD[name]
    write(file, [good, good, {key: value for key, value in good.items() if key != field}])
    with pytest.raises(KVSparseError, match=f"line 3: lacks {field}"):
        get_task(name).examples(setting(data=file))
    write(file, [{**good, field: {"a": "dictionary"}}])
    with pytest.raises(KVSparseError, match=f"line 1: {field} may not be of type dict"):
        get_task(name).examples(setting(data=file))
    file.write_text(json.dumps(good) + "\n\n{broken\n", encoding="utf-8")
    with pytest.raises(KVSparseError, match="line 3: not JSON"):
        get_task(name).examples(setting(data=file))
    file.write_text("[1]\n", encoding="utf-8")
    with pytest.raises(KVSparseError, match="line 1: must be a JSON object"):
        get_task(name).examples(setting(data=file))
    file.write_text("\n", encoding="utf-8")
    with pytest.raises(KVSparseError, match="is empty"):
        get_task(name).examples(setting(data=file))
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(KVSparseError, match="cannot be read"):
        get_task(name).examples(setting(data=file))


def test_a_key_that_is_not_among_the_records_is_refused(setting, tmp_path):
    file = write(tmp_path / "kv.jsonl", [GOOD["kv"], {**GOOD["kv"], "key": "b"}])
    with pytest.raises(KVSparseError, match="row 2 asks for the key 'b'"):
        get_task("kv").examples(setting(data=file))


def test_data_that_is_not_there(setting, tmp_path, monkeypatch):
    with pytest.raises(KVSparseError, match="no such file or folder"):
        get_task("gsm8k").examples(setting(data=tmp_path / "none"))
    with pytest.raises(KVSparseError, match="holds no test.jsonl"):
        get_task("gsm8k").examples(setting(data=tmp_path))
    with pytest.raises(KVSparseError, match="no .txt"):
        get_task("ppl").examples(setting(data=tmp_path))

    class Offline:
        @staticmethod
        def load_dataset(*args, **kwargs):
            raise ConnectionError("no route to the Hub")

    monkeypatch.setattr("kvsparse_hf.eval.data.need", lambda *args: Offline)
    with pytest.raises(KVSparseError, match="openai/gsm8k cannot be had from the Hub .no route.*--data"):
        get_task("gsm8k").examples(setting())


def test_longbench_is_read_from_the_zip_of_the_hub(setting, tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    import zipfile

    with zipfile.ZipFile(tmp_path / "data.zip", "w") as archive:
        archive.writestr("data/lcc.jsonl", json.dumps({**LONGBENCH_ROW, "all_classes": []}) + "\n")
    monkeypatch.setattr("kvsparse_hf.eval.tasks.longbench._FILE", f"zip://data/{{name}}.jsonl::{tmp_path}/data.zip")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (example,) = get_task("longbench", tasks="lcc").examples(setting())
    assert example.subset == "lcc" and example.references == [["me"], []]


def test_a_missing_package_names_the_extra(monkeypatch):
    from kvsparse_hf.eval.extras import need

    monkeypatch.setitem(__import__("sys").modules, "rapidfuzz.fuzz", None)
    with pytest.raises(KVSparseError, match=r"code_similarity needs the package rapidfuzz: .*kvsparse_hf\[eval\]"):
        need("rapidfuzz.fuzz", "the metric code_similarity")
