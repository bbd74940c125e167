"""`python -m kvsparse_hf.cli`, and with it `accelerate launch -m kvsparse_hf.cli`."""

from . import app

app()
