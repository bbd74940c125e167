"""README's "What works with what" is what the tests show."""

import subprocess
import sys

import pytest
from matrix import BEGIN, END, HERE, README, written

from kvsparse_hf.hf.compat import CACHE_ARGUMENT


@pytest.fixture(scope="module")
def made():
    """What the script prints; in a process of its own, since it runs pytest."""
    return subprocess.run(
        [sys.executable, str(HERE / "matrix.py")], capture_output=True, text=True, check=True
    ).stdout.strip()


def test_readme_holds_what_the_tests_show(made):
    """Model families are compared on the newest version alone, since others lack some of them."""
    text = README.read_text(encoding="utf-8")
    held = text.partition(BEGIN)[2].partition(END)[0].strip()
    assert written(text, held) == text
    if CACHE_ARGUMENT != "cache":
        made, held = (part.partition("| model families |")[0].strip() for part in (made, held))
    assert held == made, "run: python tests/matrix.py --write"


def test_every_feature_is_shown_of_every_method(made):
    """A method without a test for some feature would show as a dash."""
    assert made.startswith("Every method: ") and "| – " not in made and "in part" not in made


def test_markers_must_be_there():
    with pytest.raises(ValueError, match="once"):
        written("no markers", "anything")
