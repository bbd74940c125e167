"""Running `kvsparse eval` in the tests, and reading what it left; examples and answers made by hand."""

import json

from typer.testing import CliRunner

from kvsparse_hf.cli import app
from kvsparse_hf.eval.jsonl import JsonLines
from kvsparse_hf.eval.tasks import Answer

AMPLE = "snapkv-512:budget=4096,window=8"
SMALL = "snapkv-512:budget=24,window=8"
KV = ("kv", "-t", "pairs=2", "--limit", 5, "--max-new-tokens", 6)
LONGBENCH_ROW = {"input": "Who?", "context": "Some text.", "answers": ["me"], "all_classes": None}


def run(folder, *arguments):
    return CliRunner().invoke(app, ["eval", str(arguments[0]), "--model", str(folder), *map(str, arguments[1:])])


def rows(output):
    return [json.loads(line) for line in (output / "eval.jsonl").read_text(encoding="utf-8").splitlines()]


def answers(output, case):
    """Kept records of one case, by id."""
    (folder,) = [
        f for f in (output / "runs").iterdir() if json.loads((f / "facts.json").read_text())["cache"]["method"] == case
    ]
    return {row["id"]: row for file in folder.glob("answers-*.jsonl") for row in JsonLines(file).read()}


def refused(result, *words):
    lines = result.stderr.strip().splitlines()
    assert result.exit_code == 2, result.output
    assert len(lines) == 1 and lines[0].startswith("error: ") and "Traceback" not in result.output
    for word in words:
        assert word in lines[0]


def answered(*texts):
    return Answer(list(texts), 0, 0, {})


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def questions(count):
    return [
        {"question": f"What is {n} + 1?", "answer": f"{n} + 1 = <<{n}+1={n + 1}>>{n + 1}\n#### {n + 1}"}
        for n in range(count)
    ]
