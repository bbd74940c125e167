"""`kvsparse methods` and `kvsparse presets`: what there is, read from the registry and the shipped files."""

from rich import box
from rich.console import Console
from rich.table import Table

from ..presets import list_presets, read_preset
from ..registry import get_method, list_methods

_WIDE = 120


def methods() -> None:
    """List the registered methods."""
    console = _console()
    wide = console.width >= _WIDE  # otherwise the class stands below the name
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("name" if wide else "name\nclass", no_wrap=True)
    if wide:
        table.add_column("class", no_wrap=True)
    for header in ("paper", "action", "needs", "prefix-safe"):
        table.add_column(header, no_wrap=wide)
    for name in list_methods():
        cls = get_method(name)
        names = (name, cls.__name__) if wide else (f"{name}\n{cls.__name__}",)
        table.add_row(*names, cls.paper or "-", cls.action, cls.needs, "yes" if cls.prefix_safe else "no")
    console.print(table)


def presets() -> None:
    """List the shipped presets and where each differs from its method's defaults."""
    table = Table("preset", "method", "differs from the method's defaults", box=box.SIMPLE_HEAD)
    for name in list_presets():
        content = read_preset(name)
        fields = get_method(content["method"]).Options.model_fields
        options = [(key, value) for key, value in content.items() if key != "method"]
        changed = [f"{key}={value}" for key, value in options if value != fields[key].default]
        table.add_row(name, content["method"], ", ".join(changed) or "-")
    _console().print(table)


def _console() -> Console:
    console = Console(highlight=False)
    # Into a file or a pipe, one row is one line.
    return console if console.is_terminal else Console(highlight=False, width=max(console.width, 200))
