"""Asking a model: prompts to tokens, a batch through `generate()` with a cache, tokens to answers."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..cache import SparseCache
from ..cli.loading import tokenize
from ..decoding import fast_decode
from ..errors import KVSparseError
from ..hf.compat import CACHE_ARGUMENT, ranks_of, text_config
from .forced import left_pad
from .tasks.base import Answer, Example

_PLACE = "PLACE-OF-THE-ANSWER"


class Engine:
    """A model and its tokenizer, decoding greedily without penalties, whatever the model's own generation config says.

    Args:
        chat: whether chat prompts go through the chat template; None: where there is one.
        fast: decode with `fast_decode`, which stops at end-of-sequence tokens alone: stop strings are then cut off
            afterwards. The answers are the same.

    Attributes:
        chat: whether the chat template is used.
        end_ids: tokens that end an answer.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, chat: bool | None = None, fast: bool = False
    ):
        if chat and not tokenizer.chat_template:
            raise KVSparseError("the tokenizer has no chat template; leave --chat out to give prompts as plain text.")
        self.model = model
        self.tokenizer = tokenizer
        self.chat = bool(tokenizer.chat_template) if chat is None else chat
        self.fast = fast
        eos = model.generation_config.eos_token_id
        eos = tokenizer.eos_token_id if eos is None else eos
        self._lengths: dict[str, int] = {}
        self.end_ids: list[int] = [] if eos is None else list(eos) if isinstance(eos, (list, tuple)) else [eos]

    @property
    def device(self) -> torch.device:
        return self.model.get_input_embeddings().weight.device

    @property
    def positions(self) -> int:
        """Tokens that the model was made for."""
        return getattr(text_config(self.model.config), "max_position_embeddings", None) or 2**31

    def encode(self, example: Example) -> list[int]:
        """Token ids of an example's (first) prompt."""
        if example.ids:
            return list(example.ids)
        chat = self.chat and example.chat
        return tokenize(self.tokenizer, example.prompt, chat, example.answer_begins).input_ids[0].tolist()

    def length(self, example: Example) -> int:
        """Tokens of an example's prompt; counted once."""
        mark = example.mark()
        if mark not in self._lengths:
            self._lengths[mark] = len(self.encode(example))
        return self._lengths[mark]

    def answer(self, examples: Sequence[Example], cache: SparseCache) -> list[Answer]:
        """One answer each, generated as one left-padded batch. All examples have the same `max_new_tokens`, `stop` and
        `end_text`."""
        rows = [self.encode(example) for example in examples]
        first = examples[0]
        new = self._generate(rows, cache, first.max_new_tokens, first.stop, first.end_text)
        held = self.held(cache, len(examples))
        return [Answer([self._text(ids, first)], len(row), len(ids), held) for row, ids in zip(rows, new, strict=True)]

    def converse(self, example: Example, cache: SparseCache) -> Answer:
        """The answers to all questions of a conversation, on one cache. Each answer stays in the conversation."""
        ids, texts, new_tokens = self.encode(example), [], 0
        for question, begins in (*example.turns, ("", "")):
            (new,) = self._generate([ids], cache, example.max_new_tokens, example.stop, example.end_text)
            texts.append(self._text(new, example))
            new_tokens += len(new)
            if len(texts) <= len(example.turns):
                following = self._next_turn(question, begins)
                if new and new[-1] == following[0] and new[-1] in self.end_ids:
                    new = new[:-1]  # the template writes the end of the answer too
                ids = [*ids, *new, *following]
        return Answer(texts, len(ids), new_tokens, self.held(cache, 1))

    def _next_turn(self, question: str, begins: str) -> list[int]:
        """Token ids that end one answer and lead to the next."""
        text = f"\n\n{question}\n{begins}"
        if self.chat:
            messages = [
                {"role": "user", "content": "A question."},
                {"role": "assistant", "content": _PLACE},
                {"role": "user", "content": question},
            ]
            rendered = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            _, place, following = rendered.rpartition(_PLACE)
            if not place:
                raise KVSparseError(
                    "the chat template leaves out earlier answers, so a conversation cannot go on; use --no-chat."
                )
            text = following + begins
        return self.tokenizer(text, add_special_tokens=False).input_ids

    def _generate(
        self, rows: list[list[int]], cache: SparseCache, max_new_tokens: int, stop: tuple[str, ...], end_text: str
    ) -> list[list[int]]:
        """New tokens of each row, up to and with the first that ends it."""
        ends = list(self.end_ids)
        more: dict[str, Any] = {}
        if end_text:
            ends.append(self.tokenizer(end_text, add_special_tokens=False).input_ids[-1])
            more["min_new_tokens"] = 1
        pad = self.tokenizer.pad_token_id
        config = GenerationConfig(
            do_sample=False,
            num_beams=1,
            temperature=None,
            top_p=None,
            top_k=None,
            repetition_penalty=1.0,
            no_repeat_ngram_size=0,
            max_new_tokens=max_new_tokens,
            eos_token_id=ends or None,
            pad_token_id=pad if pad is not None else (ends or [0])[0],
            disable_compile=True,  # each batch has its own shapes, and would be compiled for them
            **more,
        )
        arguments: dict[str, Any] = {CACHE_ARGUMENT: cache, "generation_config": config}
        if self.fast:
            arguments["custom_generate"] = fast_decode
        elif stop:
            config.stop_strings = list(stop)
            arguments["tokenizer"] = self.tokenizer
        ids, mask = left_pad(rows, config.pad_token_id, self.device)
        with torch.no_grad():
            out = self.model.generate(input_ids=ids, attention_mask=mask, **arguments)
        return [_until(row, ends, config.pad_token_id) for row in out[:, ids.shape[1] :].tolist()]

    def _text(self, ids: list[int], example: Example) -> str:
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        cuts = [at for at in (text.find(mark) for mark in example.stop) if at >= 0]
        return text[: min(cuts)] if cuts else text

    def held(self, cache: SparseCache, rows: int) -> dict[str, float]:
        """Bytes that the cache holds now, per row (see `Answer.bytes`), in all ranks that share the heads."""
        report = cache.report()
        held = {
            "held": report.device_bytes - report.reserve_bytes,
            "host": report.host_bytes,
            "dense": report.dense_bytes,
            "read": report.read_bytes,
        }
        whole = ranks_of(self.model).total(list(held.values()), self.device)
        return {name: value / rows for name, value in zip(held, whole, strict=True)}


def _until(ids: list[int], ends: list[int], pad: int) -> list[int]:
    """New tokens of a row without what fills it up after its end: an end token, or a stop string."""
    for place, token in enumerate(ids):
        if token in ends:
            return ids[: place + 1]
    last = len(ids)
    while last > 1 and ids[last - 1] == pad:
        last -= 1
    return ids[:last]
