"""`kvsparse methods`, `presets` and `tasks`: what there is, read from the registries and the shipped files."""

import inspect
import sys

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
        fields = get_method(content["method"]).options_for(content).model_fields
        options = [(key, value) for key, value in content.items() if key != "method"]
        changed = [f"{key}={value}" for key, value in options if value != fields[key].default]
        table.add_row(name, content["method"], ", ".join(changed) or "-")
    _console().print(table)


def tasks() -> None:
    """List the tasks of `kvsparse eval` and their options."""
    from ..eval import get_task, list_tasks

    console = _console()
    for name in list_tasks():
        task = type(get_task(name))
        about = inspect.cleandoc(sys.modules[task.__module__].__doc__).split("\n\n")[0]
        console.print(f"{name}: {' '.join(about.split())}", markup=False, soft_wrap=True)
        for option, field in task.Options.model_fields.items():
            console.print(f"    -t {option}={_as_written(field.default)}: {field.description}", markup=False, soft_wrap=True)


def _as_written(value: object) -> str:
    """A default as it is written on the command line."""
    text = str(list(value)) if isinstance(value, tuple) else str(value)
    return text.replace(" ", "") if isinstance(value, tuple) else repr(text) if " " in text else text


def _console() -> Console:
    console = Console(highlight=False)
    # Into a file or a pipe, one row is one line.
    return console if console.is_terminal else Console(highlight=False, width=max(console.width, 200))
