"""`kvsparse inspect`: what a preset keeps, moves and reads of one prompt, as pictures."""

from pathlib import Path
from typing import Annotated

from rich.console import Console
from typer import Option

from ..hf.compat import CACHE_ARGUMENT
from ..pictures import Decisions, Recorder, page, plot
from ..presets import load_preset, read_preset
from .arguments import Chat, Device, Dtype, Model, Options, Preset, Prompt, PromptFile
from .generate import read_prompt
from .loading import choose_device, choose_dtype, load_model, parse_options, tokenize


def inspect(
    model: Model,
    preset: Preset = "snapkv-1024",
    prompt: Prompt = None,
    file: PromptFile = None,
    max_new_tokens: Annotated[int, Option(min=1, help="Tokens to decode; what these steps read is recorded.")] = 32,
    output: Annotated[Path, Option(help="Where the pictures go, without ending: writes .png and .html.")] = Path("inspect"),
    chat: Chat = None,
    option: Options = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Show which tokens of a prompt were kept, moved or read: a PNG, and one HTML page with the text below the map."""
    text = read_prompt(prompt, file)
    options = parse_options(option or [])
    read_preset(preset)  # a wrong name is refused before the model is loaded
    where = choose_device(device)
    loaded, tokenizer = load_model(model, where, choose_dtype(dtype, where))
    cache = load_preset(preset, loaded, **options)
    inputs = tokenize(tokenizer, text, chat).to(where)
    with Recorder(cache) as recorder:
        ids = loaded.generate(
            **inputs,
            **{CACHE_ARGUMENT: cache},
            max_new_tokens=max_new_tokens,
            do_sample=False,
            disable_compile=True,
        )
    pieces = [tokenizer.decode([token]) for token in ids[0].tolist()]
    decisions = Decisions.of(cache, tokens=pieces, recorder=recorder)
    output.parent.mkdir(parents=True, exist_ok=True)
    pictures = [output.with_name(output.name + ending) for ending in (".png", ".html")]
    plot.save(decisions, pictures[0])
    page.save(decisions, pictures[1])
    console = Console(highlight=False)
    console.print(str(cache.report()), markup=False)
    console.print(f"wrote {pictures[0]} and {pictures[1]}", markup=False)
