"""Errors that the user can do something about: one line on stderr and exit code 2, no traceback."""

from rich.console import Console
from typer import Exit
from typer.core import TyperGroup

from ..errors import KVSparseError
from ..ops import BackendError


class ErrorsInOneLine(TyperGroup):
    """The command group that turns the library's own errors into one line. Any other error is a fault and is shown whole."""

    def invoke(self, ctx):
        try:
            return super().invoke(ctx)
        except (KVSparseError, BackendError) as error:
            line = " ".join(str(error).split())
            Console(stderr=True).print(f"error: {line}", markup=False, highlight=False, soft_wrap=True)
            raise Exit(2) from error
