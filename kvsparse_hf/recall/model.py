"""The recall model itself. Its weights are part of the package, so that no test or example waits for a network."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

FOLDER = Path(__file__).with_name("weights")
NAME = "recall"  # what rows and tables call it
LENGTH, STEPS = 2048, 40  # the longest texts of facts and chains that it was trained on


def load_model(
    device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The recall model and its tokenizer; the weights are stored in bfloat16.

    Example:
        >>> model, tokenizer = load_model()
        >>> inputs = tokenizer("the bako 37 . old road ? bako =>", return_tensors="pt")
        >>> tokenizer.decode(model.generate(**inputs, max_new_tokens=2)[0, -2:])
        'bako 37'
    """
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # it takes no time
    try:
        model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=dtype)
    finally:
        if shown:
            logging.enable_progress_bar()
    return model.to(device).eval(), AutoTokenizer.from_pretrained(FOLDER)
