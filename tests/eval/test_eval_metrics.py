"""The metrics: published scores, the traps that data sets set, and the modules of the `evaluate` library."""

import json

import pytest

from kvsparse_hf import KVSparseError
from kvsparse_hf.eval.metrics import get_metric, gsm8k, list_metrics, longbench, module, text

# Mistral-7B-Instruct-v0.2 with the full cache, as published with Ada-KV (arXiv 2407.11550).
PUBLISHED = {
    "narrativeqa": 26.63,
    "qasper": 32.99,
    "multifieldqa_en": 49.34,
    "hotpotqa": 42.77,
    "2wikimqa": 27.35,
    "musique": 18.77,
    "gov_report": 32.87,
    "qmsum": 24.24,
    "multi_news": 27.1,
    "trec": 71.0,
    "triviaqa": 86.23,
    "samsum": 42.96,
    "passage_count": 2.75,
    "passage_retrieval_en": 86.98,
    "lcc": 55.33,
    "repobench-p": 52.87,
}


# --- LongBench


# ROUGE of these long summaries takes a minute and a third of one.
_LONG = ("gov_report", "multi_news")


@pytest.mark.parametrize("dataset", [pytest.param(name, marks=[pytest.mark.slow] * (name in _LONG)) for name in PUBLISHED])
def test_published_scores_are_reproduced(data, dataset):
    if dataset in ("gov_report", "qmsum", "multi_news", "samsum"):
        pytest.importorskip("rouge")
    if dataset in ("lcc", "repobench-p"):
        pytest.importorskip("rapidfuzz")
    file = data / "longbench_golden" / "full" / f"{dataset}.jsonl"
    if not file.is_file():
        pytest.skip(f"{file.name} of longbench_golden is not among the data sets")
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    scores = [longbench.score(dataset, row["pred"], row["answers"], row["all_classes"] or ()) for row in rows]
    assert round(100 * sum(scores) / len(scores), 2) == PUBLISHED[dataset]


def test_all_english_tasks_have_a_metric():
    assert set(longbench.METRICS) == set(PUBLISHED)


def test_f1_counts_words_and_not_articles_or_punctuation():
    assert longbench.qa_f1("The cat, a dog!", "cat dog") == 1.0
    assert longbench.qa_f1("cat", "dog") == longbench.qa_f1("", "dog") == 0.0
    assert longbench.qa_f1("cat cat dog", "cat") == pytest.approx(2 * (1 / 3) / (4 / 3))


def test_only_some_tasks_are_cut_to_the_first_line():
    assert longbench.score("triviaqa", "\n\nParis\nQuestion: what", ["Paris"]) == 1.0
    assert longbench.score("hotpotqa", "Paris\nQuestion: what", ["Paris"]) < 1.0
    assert longbench.score("hotpotqa", "Rome", ["Paris", "Rome"]) == 1.0


def test_classes_that_are_part_of_the_right_one_do_not_count():
    classes = ["entity", "Other entity", "Date"]
    assert longbench.classification("Other entity", "Other entity", classes) == 1.0
    assert longbench.classification("Other entity or Date", "Other entity", classes) == 0.5
    assert longbench.classification("Date", "Other entity", classes) == 0.0


def test_numbers_of_paragraphs_are_whole():
    assert longbench.retrieval("Paragraph 12", "Paragraph 12") == 1.0
    assert longbench.retrieval("Paragraph 12 or 1", "Paragraph 1") == 0.5
    assert longbench.retrieval("none", "Paragraph 1") == 0.0
    assert longbench.count("7, no 8", "8") == 0.5


def test_code_is_the_first_line_that_is_code():
    pytest.importorskip("rapidfuzz")
    assert longbench.code_similarity("\n# a comment\n```\nreturn x\n", "return x") == 1.0
    assert longbench.code_similarity("# only this", "return x") == 0.0
    assert longbench.code_similarity("return y", "return x") == 0.88  # 87.5 in whole percent


def test_an_empty_summary_is_zero():
    pytest.importorskip("rouge")
    assert longbench.rouge_l("", "a summary") == longbench.rouge_l("...", "a summary") == 0.0
    assert longbench.rouge_l("a summary", "a summary") == pytest.approx(1.0, abs=1e-6)


# --- GSM8K: the traps of lm-eval's rules


@pytest.mark.parametrize(
    "answer, strict, flexible",
    [
        ("so 3 + 4 = 7\n#### 7", "7", "7"),
        ("#### 1,234", "1,234", "1,234"),
        ("#### -3", "-3", "-3"),
        ("#### $18", gsm8k.INVALID, "$18"),
        ("####18", gsm8k.INVALID, "18"),
        ("so 5... ok", gsm8k.INVALID, "5..."),
        ("10 dollars...", gsm8k.INVALID, "..."),
        ("#### 18.00", "18.00", "18.00"),
        ("#### 7\n\nQuestion: 5 apples", "7", "5"),
        ("#### 7 and #### 8", "7", "8"),
        ("no number", gsm8k.INVALID, gsm8k.INVALID),
        ("", gsm8k.INVALID, gsm8k.INVALID),
    ],
)
def test_extraction(answer, strict, flexible):
    assert gsm8k.extract_strict(answer) == strict
    assert gsm8k.extract_flexible(answer) == flexible
    assert gsm8k.is_invalid(answer) == float(strict == gsm8k.INVALID)


@pytest.mark.parametrize(
    "answer, gold, strict, flexible",
    [
        ("#### $18", "18", 0, 1),
        ("####18", "18", 0, 1),
        ("The answer is $1,234.", "1234", 0, 1),
        ("#### 1234.", "1,234", 1, 1),
        ("#### 18.00", "18", 0, 0),
        ("so 5... ok", "5", 0, 0),  # "5.." once one full stop is gone
        ("10 dollars...", "10", 0, 0),
        ("#### 7\n\nQuestion: Tom has 5", "7", 1, 0),
        ("so #### -3", "-3", 1, 1),
        ("#### 7", "3 + 4 = 7\n#### 7", 1, 1),
    ],
)
def test_match(answer, gold, strict, flexible):
    assert (gsm8k.strict_match(answer, gold), gsm8k.flexible_extract(answer, gold)) == (strict, flexible)


def test_every_gold_answer_is_its_own(data):
    file = data / "gsm8k" / "test.jsonl"
    if not file.is_file():
        pytest.skip("GSM8K is not among the data sets")
    answers = [json.loads(line)["answer"] for line in file.read_text(encoding="utf-8").splitlines()]
    golds = [answer.rpartition("#### ")[2] for answer in answers]
    assert (
        len(golds) == 1319 and sum("," in gold for gold in golds) == 14 and sum(gold[0] == "-" for gold in golds) == 2
    )
    for answer, gold in zip(answers, golds, strict=True):
        assert gsm8k.strict_match(answer, gold) == gsm8k.flexible_extract(answer, gold) == 1.0
        assert "<<" not in gsm8k.without_calculations(answer)


# --- strings and numbers


def test_matches_of_strings():
    assert text.match_all("It is ALPHA\tand beta", ["alpha", "beta", "gamma"]) == pytest.approx(2 / 3)
    assert text.match_part("beta", ["alpha", "beta"]) == 1.0 and text.match_part("", ["alpha"]) == 0.0
    assert text.contains("the value ABC.", "abc") == 1.0
    assert text.number_match(" 12345>", 12345) == 1.0 and text.number_match("12 34", "34") == 0.0


def test_unknown_names_come_with_the_nearest():
    with pytest.raises(KVSparseError, match="Did you mean 'qa_f1'"):
        get_metric("qaf1")
    with pytest.raises(KVSparseError, match="Did you mean 'longbench'"):
        module("longbensh")
    assert all(callable(get_metric(name)) for name in list_metrics())


# --- the evaluate library


def test_evaluate_modules_give_what_the_functions_give(tmp_path, monkeypatch):
    evaluate = pytest.importorskip("evaluate")
    monkeypatch.setattr("evaluate.config.HF_MODULES_CACHE", tmp_path / "modules")
    monkeypatch.setattr("evaluate.config.HF_METRICS_CACHE", tmp_path / "metrics")
    metric = evaluate.load(module("longbench"), "qa_f1", cache_dir=str(tmp_path))
    found = metric.compute(predictions=["in Paris", "Rome"], references=[["Paris", "in Paris"], ["Oslo"]])
    assert found == {"qa_f1": 50.0}
    classes = evaluate.load(module("longbench"), "classification", cache_dir=str(tmp_path))
    assert classes.compute(predictions=["a Date"], references=[["Date"]], classes=[["Date", "Time"]]) == {
        "classification": 100.0
    }
    with pytest.raises(KVSparseError, match="Did you mean 'rouge_l'"):
        evaluate.load(module("longbench"), "rouge", cache_dir=str(tmp_path))
    metric = evaluate.load(module("gsm8k"), cache_dir=str(tmp_path))
    found = metric.compute(predictions=["#### $18", "#### 4"], references=["18", "4"])
    assert found == {"strict_match": 50.0, "flexible_extract": 100.0, "invalid": 50.0}
