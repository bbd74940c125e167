"""`kvsparse inspect`: what a preset keeps, moves and reads of one prompt, as pictures."""

from pathlib import Path
from typing import Annotated

from rich.console import Console
from typer import Option

from ..hf.compat import CACHE_ARGUMENT
from ..pictures import Decisions, Recorder, page, plot
from ..presets import load_preset, read_preset
from .generate import read_prompt
from .loading import choose_device, choose_dtype, load_model, parse_options, tokenize


def inspect(
    model: Annotated[str, Option("--model", "-m", help="Folder or Hub name of a causal language model.")],
    preset: Annotated[str, Option("--preset", "-p", help="Name of a shipped preset, or a YAML file.")] = "snapkv-1024",
    prompt: Annotated[str | None, Option(help="The prompt.")] = None,
    file: Annotated[Path | None, Option(help="A text file that holds the prompt; - reads standard input.")] = None,
    max_new_tokens: Annotated[int, Option(min=1, help="Tokens to decode; what these steps read is recorded.")] = 32,
    chat: Annotated[
        bool | None, Option("--chat/--no-chat", help="Whether to use the chat template. Default: where there is one.")
    ] = None,
    option: Annotated[
        list[str] | None, Option("--option", "-o", help="key=value, replaces an option of the preset; repeatable.")
    ] = None,
    output: Annotated[Path, Option(help="Where the pictures go, without ending: writes .png and .html.")] = Path("inspect"),
    device: Annotated[str, Option(help="auto, cpu, cuda, cuda:1, ...")] = "auto",
    dtype: Annotated[str, Option(help="auto, float32, bfloat16 or float16.")] = "auto",
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
