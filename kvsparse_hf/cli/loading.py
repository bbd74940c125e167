"""What the commands share: reading option values, choosing a device, loading a model."""

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from ..errors import KVSparseError, UnsupportedModelError
from ..hf.compat import tensor_parallel, text_config
from ..texts import brief, read_yaml

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def parse_value(text: str) -> Any:
    """A value as a preset file would hold it: `512` is an int, `0.25` a float, `512MiB` a string, nothing at all is None."""
    try:
        value = read_yaml(text)
    except KVSparseError as error:
        raise KVSparseError(f"{brief(text)} is no value.") from error
    # Plain text with a "#" in it, such as "End with #### N": YAML takes the rest for a comment, which no value is meant to have.
    if (value is None or isinstance(value, str)) and text.strip().removeprefix(value or "").lstrip().startswith("#"):
        return text.strip()
    return value


def parse_options(pairs: list[str]) -> dict[str, Any]:
    """`["budget=512", …]` as a dictionary."""
    options = {}
    for pair in pairs:
        key, separator, value = pair.partition("=")
        if not separator or not key.strip():
            raise KVSparseError(f"--option {pair!r}: write key=value.")
        options[key.strip()] = parse_value(value)
    return options


def choose_device(name: str) -> torch.device:
    """The device of that name; "auto" is the first CUDA device, else the CPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise KVSparseError(f"device {name!r} cannot be used: {_first_line(error)}") from error


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype of that name; "auto" is bfloat16 on an accelerator and float32 on the CPU."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if name not in DTYPES:
        raise KVSparseError(f"dtype {name!r} is not one of auto, {', '.join(DTYPES)}.")
    return DTYPES[name]


def load_model(
    model: str | Path, device: torch.device, dtype: torch.dtype, divided: bool = False
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A causal language model and its tokenizer, from a folder or the Hub.

    Args:
        divided: load this process's share of the model, to the device of the process; all processes of torchrun must do so.

    Raises:
        KVSparseError: there is no such model, or it is none that generates text, or one that cannot be divided.
    """
    if str(model).startswith(("/", ".", "~")) and not Path(model).is_dir():
        raise KVSparseError(f"model {str(model)!r}: no such folder.")
    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    tokenizer = _load(AutoTokenizer, model)
    if divided:
        _check_divisible(_load(AutoConfig, model))
        loaded = _load(AutoModelForCausalLM, model, dtype=dtype, **tensor_parallel())
    else:
        loaded = _load(AutoModelForCausalLM, model, dtype=dtype).to(device)
    return loaded.eval(), tokenizer


def _load(kind: type, model: str | Path, **options: Any) -> Any:
    try:
        return kind.from_pretrained(model, **options)
    except (OSError, ValueError, ImportError) as error:
        raise KVSparseError(f"model {str(model)!r} cannot be loaded: {_first_line(error)}") from error


def _check_divisible(config: PretrainedConfig) -> None:
    """Refuses models without a plan for tensor parallelism: some versions of Transformers give each process all of it, without a
    word."""
    if not getattr(text_config(config), "base_model_tp_plan", None):
        raise UnsupportedModelError(
            f"{config.model_type}: Transformers has no plan that divides this model among processes; use accelerate launch, which "
            "divides the examples."
        )


def tokenize(tokenizer: PreTrainedTokenizerBase, text: str, chat: bool | None, answer: str = ""):
    """Model inputs for one user message.

    Args:
        chat: whether to use the chat template; None: where the tokenizer has one.
        answer: text the answer begins with.
    """
    if chat is None:
        chat = bool(tokenizer.chat_template)
    if not chat:
        return tokenizer(f"{text}\n{answer}" if answer else text, return_tensors="pt")
    if not tokenizer.chat_template:
        raise KVSparseError("the tokenizer has no chat template; use --no-chat.")
    messages = [{"role": "user", "content": text}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    # The template writes the special tokens itself.
    return tokenizer(rendered + answer, return_tensors="pt", add_special_tokens=False)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
