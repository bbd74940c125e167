"""Presets that nobody should have written: our own error, at once, and the model as it was."""

import string
import time

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_models import build

import kvsparse_hf
from kvsparse_hf import KVSparseError, PresetError, SparseCache
from kvsparse_hf.registry import get_method, list_methods
from kvsparse_hf.texts import brief, read_json, read_yaml

MODEL = build()
NUMBERS = st.one_of(
    st.integers(-5, 5), st.integers(), st.sampled_from([10**30, -(10**30), 2**31, 2**63, 1e308, 1e-320, -0.0]),
    st.floats(allow_nan=True, allow_infinity=True),
)  # fmt: skip
SCALARS = st.one_of(
    NUMBERS,
    st.booleans(),
    st.none(),
    st.text(max_size=12),
    st.sampled_from(["512MiB", "9" * 400 + "TiB", "max", "../x"]),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
FIELDS = {name: sorted(get_method(name).Options.model_fields) for name in list_methods()}
COMMON = dict(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])


def _loads_or_refuses(path) -> None:
    before = MODEL.config._attn_implementation
    try:
        cache = kvsparse_hf.load_preset(path, MODEL)
    except KVSparseError as error:
        assert len(str(error)) < 4000
        assert MODEL.config._attn_implementation == before
    else:
        assert isinstance(cache, SparseCache)
        kvsparse_hf.detach(MODEL)


@settings(max_examples=300, **COMMON)
@given(data=st.data())
def test_any_value_in_any_option(data, tmp_path):
    method = data.draw(st.sampled_from(sorted(FIELDS)))
    names = data.draw(
        st.lists(st.sampled_from([*FIELDS[method], "model", "self", "__class__"]), max_size=3, unique=True)
    )
    content = {"method": method, **{name: data.draw(VALUES) for name in names}}
    path = tmp_path / "preset.yaml"
    path.write_text(yaml.safe_dump(content, allow_unicode=True), encoding="utf-8")
    _loads_or_refuses(path)


@settings(max_examples=300, **COMMON)
@given(
    text=st.text(alphabet=string.printable + "é\u2028\x00", max_size=60),
    where=st.integers(0, 40),
    cut=st.integers(0, 80),
)
def test_any_text(text, where, cut, tmp_path):
    """Broken into a good preset, at any place; and the preset cut off."""
    good = "method: snapkv\nbudget: 512\nwindow: 8\npooling: max\n"
    path = tmp_path / "preset.yaml"
    path.write_text((good[:where] + text + good[where:])[: len(text) + cut], encoding="utf-8")
    _loads_or_refuses(path)


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)
HOSTILE = {
    "alias bomb": f"method: snapkv\n{BOMB}budget: *i\n",
    "alias": "method: snapkv\nbudget: &b 512\nwindow: *b\n",
    "recursive alias": "method: snapkv\nbudget: &b [*b]\n",
    "key twice": "method: snapkv\nbudget: 64\nbudget: 128\n",
    "python tag": "method: snapkv\nbudget: !!python/object/apply:os.system ['touch /tmp/executed']\n",
    "python name": "!!python/name:os.system ''\n",
    "own tag": "method: !x snapkv\n",
    "impossible date": "method: snapkv\nbudget: 2001-99-99\n",
    "wrong int": "method: snapkv\nbudget: !!int x\n",
    "empty int": "method: snapkv\nbudget: !!int ''\n",
    "wrong bool": "method: snapkv\nbudget: !!bool x\n",
    "wrong float": "method: snapkv\nbudget: !!float x\n",
    "wrong timestamp": "method: snapkv\nbudget: !!timestamp x\n",
    "wrong binary": "method: snapkv\nbudget: !!binary 'x'\n",
    "many digits": f"method: snapkv\nbudget: {'9' * 5000}\n",
    "deep": f"method: snapkv\nbudget: {'[' * 5000}\n",
    "deep and closed": f"method: snapkv\nbudget: {'[' * 3000}{']' * 3000}\n",
    "list as a key": "? [a, b]\n: 1\nmethod: snapkv\n",
    "two documents": "method: snapkv\n---\nmethod: full\n",
    "long key": f"method: snapkv\n{'k' * 1000}: 1\n",
    "long method": f"method: {'k' * 100000}\n",
    "nan budget": "method: snapkv\nbudget: .nan\n",
    "infinite budget": "method: snapkv\nbudget: .inf\n",
    "endless reserve": "method: full\nreserve: 1000000000000000000000\n",
    "plan out of the folder": "method: headkv\ntable: ../../../../etc/passwd\n",
    "plan that is no name": 'method: moa\nrules: "a\\0b"\n',
    "model as an option": "method: snapkv\nmodel: x\n",
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_presets_are_refused_at_once(text, tmp_path):
    path = tmp_path / "preset.yaml"
    path.write_text(text, encoding="utf-8")
    begun = time.perf_counter()
    with pytest.raises(KVSparseError) as caught:
        kvsparse_hf.load_preset(path, MODEL)
    assert time.perf_counter() - begun < 5 and len(str(caught.value)) < 4000


@pytest.mark.parametrize("name", ["x" * 100000, "a\0b", "", ".", "../configs/full", "/dev/null", "\ud800"])
def test_names_that_no_preset_can_have(name):
    with pytest.raises(PresetError) as caught:
        kvsparse_hf.load_preset(name, MODEL)
    assert len(str(caught.value)) < 4000


@settings(max_examples=200, **COMMON)
@given(text=st.text(max_size=40))
def test_readers_raise_nothing_else(text):
    for read in (read_yaml, read_json):
        try:
            read(text)
        except KVSparseError as error:
            assert "not readable" in str(error)


def test_quotes_are_short():
    nested = ["x"] * 9
    for _ in range(8):
        nested = [nested] * 9
    assert (
        len(brief(nested)) < 1000 and brief(512) == "512" and brief("max") == "'max'" and len(brief("x" * 10**6)) < 100
    )
