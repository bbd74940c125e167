"""The command line, `kvsparse`. Every command has a file of its own; this one only lists them."""

from typing import Annotated

import typer

from .. import __version__
from ..calibrate import cli as calibrate
from . import bench, demo, eval, generate, inspect, listing
from .errors import ErrorsInOneLine

app = typer.Typer(
    name="kvsparse",
    cls=ErrorsInOneLine,
    help="Sparse key/value caches for Hugging Face Transformers.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_show_locals=False,
)

app.command()(listing.methods)
app.command()(listing.presets)
app.command()(listing.tasks)
app.command()(generate.generate)
app.command()(demo.demo)
app.command()(inspect.inspect)
app.command(name="eval")(eval.evaluate)

for _name, _sub_app in (("bench", bench.app), ("calibrate", calibrate.app)):
    app.add_typer(_sub_app, name=_name)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit()


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Sparse key/value caches for Hugging Face Transformers."""
