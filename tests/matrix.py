"""The table "What works with what" of README.md, made from the tests: `python tests/matrix.py` prints it, `--write` puts it there.

A test that shows a feature carries `@pytest.mark.feature(name, refused=…)` and has its method in the parameter `case`. Which methods
a feature works with is then what pytest collects; nothing is listed here.
"""

import contextlib
import importlib.util
import io
import re
import sys
import textwrap
from collections import defaultdict
from pathlib import Path

import pytest

HERE = Path(__file__).parent
README = HERE.parent / "README.md"
FOLDERS = ("conformance", "decoding")
WIDTH = 140
BEGIN, END = "<!-- made by tests/matrix.py -->", "<!-- end -->"

sys.path.insert(0, str(HERE))


class Collected:
    """What the collected tests show: feature -> method id -> the set of "yes" and "refused". Slow tests count too."""

    def __init__(self):
        self.shown: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items):
        for item in items:
            for marker in item.iter_markers("feature"):
                case, refused = item.callspec.params["case"], marker.kwargs.get("refused")
                self.shown[marker.args[0]][case.id].add("refused" if refused is not None and refused(case) else "yes")


def collect() -> dict[str, dict[str, set[str]]]:
    """Collects the tests without running them."""
    plugin, said = Collected(), io.StringIO()
    with contextlib.redirect_stdout(said):
        options = ["--collect-only", "-q", "-p", "no:cacheprovider", "--rootdir", str(HERE.parent)]
        code = pytest.main([*options, *(str(HERE / folder) for folder in FOLDERS)], plugins=[plugin])
    if code != 0:
        raise RuntimeError(f"the tests could not be collected:\n{said.getvalue()}")
    return plugin.shown


def _answers(shown: dict, case, features: list[str]) -> tuple[str, ...]:
    """ "yes", "refused", "in part" or "–" (no test) for each feature."""
    words = {frozenset(): "–", frozenset({"yes"}): "yes", frozenset({"refused"}): "refused"}
    return tuple(words.get(frozenset(shown[feature].get(case.id, ())), "in part") for feature in features)


def _label(case, main) -> str:
    """How a user writes it: the method's name, and the options by which a variant differs from the main entry."""
    name = f"`{case.cache.method}`"
    if case is main:
        return name
    differs = {key: value for key, value in case.options.items() if main.options.get(key) != value}
    texts = [f'`{key}="{value}"`' for key, value in differs.items() if isinstance(value, str)]
    words = texts or [f"`{key}`" for key in differs]
    return f"{name} ({', '.join(words) or case.id.removeprefix(case.cache.method + '-')})"


def table() -> str:
    """Markdown: what every method works with, and a table of the rest, methods that agree in one row."""
    from methods import METHODS

    shown = collect()
    features = sorted(shown)
    mains = {case.cache.method: case for case in reversed(METHODS)}
    answers = {case.id: _answers(shown, case, features) for case in METHODS}
    same = {feature: {row[index] for row in answers.values()} for index, feature in enumerate(features)}
    everywhere = [feature for feature in features if same[feature] == {"yes"}]
    nowhere = [feature for feature in features if same[feature] == {"refused"}]
    columns = [index for index, feature in enumerate(features) if len(same[feature]) > 1]
    groups = defaultdict(list)
    for case in METHODS:
        main = mains[case.cache.method]
        row = tuple(answers[case.id][index] for index in columns)
        if case is main or row != tuple(answers[main.id][index] for index in columns):
            label = _label(case, main)
            if label not in groups[row]:
                groups[row].append(label)
    lines = [textwrap.fill(f"Every method: {'; '.join(everywhere)}.", WIDTH, break_on_hyphens=False)]
    if nowhere:
        lines += ["", f"No method: {'; '.join(nowhere)}."]
    lines += ["", f"| | {' | '.join(features[index] for index in columns)} |", "|---" * (len(columns) + 1) + "|"]
    lines += [f"| {', '.join(labels)} | {' | '.join(row)} |" for row, labels in groups.items()]
    return "\n".join(lines)


def models_table() -> str:
    """Markdown: the model families, where the tests have a list of them. Differs between versions of Transformers."""
    if not (HERE / "models" / "zoo.py").is_file():
        return ""
    spec = importlib.util.spec_from_file_location("zoo", HERE / "models" / "zoo.py")
    zoo = sys.modules["zoo"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(zoo)
    groups = defaultdict(list)
    for model, status, note in zoo.rows():
        if status == "refused":  # the note is the error, which begins with the name of what it refuses
            groups[f"refused: {note.partition(' ')[2].rstrip('.')}"].append(model)
        else:
            groups[status].append(f"{model} ({note})" if note else model)
    rows = [f"| {status} | {', '.join(models)} |" for status, models in groups.items()]
    return "\n".join(["| model families | |", "|---|---|", *rows])


def made() -> str:
    """All of it."""
    return "\n\n".join(part for part in (table(), models_table()) if part)


def written(text: str, section: str) -> str:
    """`text` with `section` between the two markers."""
    parts = re.split(f"{re.escape(BEGIN)}.*{re.escape(END)}", text, flags=re.DOTALL)
    if len(parts) != 2:
        raise ValueError(f"README.md must hold {BEGIN} and {END} once.")
    return f"{BEGIN}\n\n{section}\n\n{END}".join(parts)


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        README.write_text(written(README.read_text(encoding="utf-8"), made()), encoding="utf-8")
    else:
        print(made())
