"""The methods by name. A method registers itself with one decorator; nothing else lists them."""

from .cache import SparseCache
from .errors import KVSparseError, suggest
from .texts import brief

_METHODS: dict[str, type[SparseCache]] = {}


def register_method(name: str):
    """Class decorator: makes a `SparseCache` subclass known under `name` (lower case, with hyphens).

    Your own methods register the same way, and presets, the command line and `load_preset` then know them.
    """

    def register(cls: type[SparseCache]) -> type[SparseCache]:
        known = _METHODS.get(name)
        if known is not None and known.__qualname__ != cls.__qualname__:
            raise KVSparseError(f"method {name!r} is already registered by {known.__name__}.")
        cls.method = name
        _METHODS[name] = cls
        return cls

    return register


def list_methods() -> list[str]:
    """The names of all registered methods."""
    return sorted(_METHODS)


def get_method(name: str) -> type[SparseCache]:
    """The cache class registered under `name`.

    Raises:
        KVSparseError: an unknown name; the nearest known one is suggested.
    """
    if name not in _METHODS:
        raise KVSparseError(f"unknown method {brief(name)}.{suggest(name, _METHODS)}")
    return _METHODS[name]
