"""Arguments that several commands take."""

from pathlib import Path
from typing import Annotated

from typer import Option

Model = Annotated[str, Option("--model", "-m", help="Folder or Hub name of a causal language model.")]
Preset = Annotated[str, Option("--preset", "-p", help="Name of a shipped preset, or a YAML file.")]
Prompt = Annotated[str | None, Option("--prompt", help="The prompt.")]
PromptFile = Annotated[Path | None, Option("--file", help="A text file that holds the prompt; - reads standard input.")]
Chat = Annotated[
    bool | None, Option("--chat/--no-chat", help="Whether to use the chat template. Default: where there is one.")
]
Options = Annotated[
    list[str] | None, Option("--option", "-o", help="key=value, replaces an option of the preset; repeatable.")
]
Device = Annotated[str, Option("--device", help="auto, cpu, cuda, cuda:1, ...")]
Dtype = Annotated[str, Option("--dtype", help="auto, float32, bfloat16 or float16.")]
