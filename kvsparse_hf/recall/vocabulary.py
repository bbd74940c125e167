"""The words of the recall model: one token each, separated by spaces."""

from itertools import product

from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

SPECIAL = ("<pad>", "<s>", "</s>", "<unk>")
MARKS = (".", "?", "=>", "let", "none", "+", "-", ":", "=", "solve")
NUMBERS = tuple(map(str, range(100)))
NAMES = tuple(a + b + c + d for a, b, c, d in product("bdfglmnprt", "aeio", "klmnst", "ao"))[:400]
FILLER = tuple(
    "the of and to in that was his it with as had for at on be by not from which this but they all one so when out up into "
    "them then like now over some more upon other what only down old these before though such been any two long after here "
    "about there where while through every under most sea ship day night wind water land house road tree stone hand eye head "
    "voice light dark cold warm first last never still again away back far near round great little good new same own men".split()
)
WORDS = (*SPECIAL, *MARKS, *NUMBERS, *NAMES, *FILLER)
IDS = {word: index for index, word in enumerate(WORDS)}


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token for each word; every text begins with <s>."""
    tokenizer = Tokenizer(models.WordLevel(IDS, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", IDS["<s>"])])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
