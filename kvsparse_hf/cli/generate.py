"""`kvsparse generate`: one prompt through one preset."""

import sys
from pathlib import Path
from typing import Annotated

from rich.console import Console
from transformers import TextStreamer
from typer import Option

from ..errors import KVSparseError
from ..hf.compat import CACHE_ARGUMENT
from ..presets import load_preset, read_preset
from .arguments import Chat, Device, Dtype, Model, Options, Preset, Prompt, PromptFile
from .loading import choose_device, choose_dtype, load_model, parse_options, tokenize


def generate(
    model: Model,
    preset: Preset = "snapkv-1024",
    prompt: Prompt = None,
    file: PromptFile = None,
    max_new_tokens: Annotated[int, Option(min=1, help="Tokens to generate at most.")] = 256,
    chat: Chat = None,
    option: Options = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Generate greedily with a sparse cache. Text goes to standard output, the cache's report to standard error."""
    text = read_prompt(prompt, file)
    options = parse_options(option or [])
    read_preset(preset)  # a wrong name is refused before the model is loaded
    where = choose_device(device)
    loaded, tokenizer = load_model(model, where, choose_dtype(dtype, where))
    cache = load_preset(preset, loaded, **options)
    inputs = tokenize(tokenizer, text, chat).to(where)
    loaded.generate(
        **inputs,
        **{CACHE_ARGUMENT: cache},
        max_new_tokens=max_new_tokens,
        do_sample=False,
        streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
    )
    sys.stdout.flush()
    Console(stderr=True, highlight=False).print(f"\n{cache.report()}", markup=False)


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """The prompt itself, or that of a file; exactly one of them must be given."""
    if (prompt is None) == (file is None):
        raise KVSparseError("give either --prompt or --file.")
    if prompt is None:
        try:
            prompt = sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise KVSparseError(f"{file} cannot be read: {error}") from error
    if not prompt.strip():
        raise KVSparseError("the prompt is empty.")
    return prompt
