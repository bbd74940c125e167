"""Reading text that anyone may have written, and quoting it in errors."""

import json
import reprlib
from typing import Any

import yaml

from .errors import KVSparseError

# What PyYAML's and JSON's constructors raise besides their own errors: an impossible date, `!!int x`, thousands of brackets.
_BROKEN = (yaml.YAMLError, ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError, RecursionError)

_quoting = reprlib.Repr()
_quoting.maxstring = _quoting.maxother = _quoting.maxlong = 80
_quoting.maxlist = _quoting.maxdict = _quoting.maxtuple = 6
_quoting.maxlevel = 2


def brief(value: Any) -> str:
    """`repr` of a value of any size and depth, in a few words."""
    return _quoting.repr(value)


class _PlainLoader(yaml.SafeLoader):
    """YAML without aliases, which can make a few lines into gigabytes, and without keys that are given twice."""

    def compose_node(self, parent, index):
        if self.check_event(yaml.AliasEvent):
            raise yaml.composer.ComposerError(
                None, None, "aliases (*name) are not allowed here", self.peek_event().start_mark
            )
        return super().compose_node(parent, index)

    def construct_mapping(self, node, deep=False):
        mapping = super().construct_mapping(node, deep=deep)
        if len(mapping) < len(node.value):
            raise yaml.constructor.ConstructorError(None, None, "a key is given twice", node.start_mark)
        return mapping


def read_yaml(text: str) -> Any:
    """The plain values that YAML text holds: no tags of Python, no aliases, no key twice.

    Raises:
        KVSparseError: for anything else.
    """
    try:
        return yaml.load(text, _PlainLoader)
    except _BROKEN as error:
        raise KVSparseError(f"not readable YAML: {brief_error(error)}") from error


def read_json(text: str) -> Any:
    """The values that JSON text holds.

    Raises:
        KVSparseError: what is no JSON.
    """
    try:
        return json.loads(text)
    except _BROKEN as error:
        raise KVSparseError(f"not readable JSON: {brief_error(error)}") from error


def brief_error(error: Exception) -> str:
    """An error's message, cut where it quotes at length."""
    text = str(error) or type(error).__name__
    return text if len(text) <= 400 else f"{text[:400]} …"
