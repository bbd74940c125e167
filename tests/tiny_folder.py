"""A tiny random chat model as a folder, as `from_pretrained` reads it: the command line takes nothing else."""

from pathlib import Path

from tiny_models import FAMILIES
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TEMPLATE = "{% for m in messages %}<s>{{ m['content'] }}</s>{% endfor %}{% if add_generation_prompt %}<s>{% endif %}"


def save_tiny_folder(folder: Path, chat: bool = True, family: str = "llama-gqa2", **shape) -> Path:
    """Writes model and byte-level tokenizer (no merges: one token a byte) to `folder`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<s>", "</s>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    fast.chat_template = TEMPLATE if chat else None
    fast.save_pretrained(folder)
    FAMILIES[family].build(**{"vocab_size": len(vocabulary), "eos_token_id": 2, **shape}).save_pretrained(folder)
    return folder
