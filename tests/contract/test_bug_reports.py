"""Every public report has a test, and the test exists."""

import ast
from functools import cache
from pathlib import Path

import bug_reports
import peer_reports
import pytest

TESTS = Path(__file__).parents[1]
TABLES = {
    f"{module.__name__}.{name}": table
    for module in (bug_reports, peer_reports) for name, table in vars(module).items() if isinstance(table, list)
}  # fmt: skip
REPORTS = [report for table in TABLES.values() for report in table]


@cache
def _functions(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


@pytest.mark.parametrize("report", REPORTS, ids=lambda report: report.names.replace(" ", "-"))
def test_the_test_of_a_report_exists(report):
    assert bool(report.tests) != bool(report.not_ours) and report.right
    for node in report.tests:
        file, _, function = node.partition("::")
        assert function in _functions(TESTS / file), node


def test_the_tables_are_whole():
    """Few reports do not apply, and none is listed twice in one table."""
    for table in TABLES.values():
        names = [report.names for report in table]
        assert len(names) == len(set(names))
    assert len(REPORTS) > 110 and sum(bool(report.not_ours) for report in REPORTS) <= 6
