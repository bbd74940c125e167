"""KVzip: the model repeats the prompt, and the tokens it needed for that stay."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from pydantic import Field, field_validator
from torch import Tensor
from transformers import PreTrainedModel

from ..errors import BudgetError, UnsupportedOperationError
from ..hf import compat
from ..hf.binding import unwrap
from ..layers.replaying import Replay, ReplayingLayer
from ..options import CommonOptions
from ..policy.base import Policy
from ..policy.budgets import Budget
from ..policy.replay import keep_best
from ..registry import register_method
from .evicting import EvictingCache

_REPEAT = "\n\nRepeat the previous context exactly."
_REPEAT_FROM = "\n\nRepeat the part of the previous context exactly, starting with "


class KVzipOptions(CommonOptions):
    """Options of `KVzipCache`. Defaults: the published code's."""

    budget: Any = Field(
        0.3, description="kept by compress(): entries per key/value head on average (int), share of the prompt, or size ('512MiB')"
    )
    sinks: int = Field(4, ge=0, description="first tokens that every head keeps (system_tokens of compress() raises it)")
    chunk_size: int = Field(2000, ge=1, description="prompt tokens repeated per forward")
    lead: int = Field(8, ge=0, description="tokens of the chunk before, from which the model is asked to go on")

    @field_validator("budget")
    @classmethod
    def _plain_budget(cls, value: Any) -> Any:
        budget = Budget.parse(value)
        return next(part for part in (budget.tokens, budget.share, value) if part is not None)


@register_method("kvzip")
class KVzipCache(EvictingCache):
    """KVzip (Kim et al., "Query-Agnostic KV Cache Compression with Context Reconstruction", NeurIPS 2025, arXiv 2505.23416).

    `compress(model, inputs)` lets the model repeat the prompt, chunk by chunk, on top of the full cache. A token's score in a
    head is the largest attention it gets from any repeated token. One threshold over all layers, heads and tokens decides
    what stays, so that heads and layers hold unequal numbers. The choice does not depend on a question: the compressed prefix
    serves any continuation, `fork()` copies it. Until `compress()` is called, and for tokens after it, everything is kept.

    Deviations from the published code: exactly the budget stays (ties go to the lower layer, head and position); the first
    `sinks` tokens stay in every head, as does the system prompt; rows of a batch are ranked one by one; the replayed tokens
    are never stored.

    Example:
        >>> cache = KVzipCache(model, budget=0.3)
        >>> cache.compress(model, tokenizer(document, return_tensors="pt"), tokenizer)
        >>> model.generate(**tokenizer(document + question, return_tensors="pt"), past_key_values=cache.fork())
    """

    paper = "arXiv 2505.23416"
    needs = "forwards that repeat the prompt"
    Options = KVzipOptions

    def make_layer(self, layer_idx: int) -> ReplayingLayer:
        return ReplayingLayer(layer_idx, self.session, Policy(), self.options.reserve, self.options.backend)

    def reset(self) -> None:
        for layer in self.sparse_layers:
            layer._settled = None  # wanted by the user, so nothing to warn of
        super().reset()

    @torch.no_grad()
    def compress(
        self, model: PreTrainedModel, inputs: Any, tokenizer=None, system_tokens: int = 0, progress: Callable[[int, int], None] | None = None
    ) -> None:
        """Reads the prompt, unless the cache has just done so, and drops what repeating it does not need.

        Args:
            model: the model of this cache.
            inputs: what a tokenizer returns (`input_ids`, `attention_mask`), or the ids `[B, N]` alone; left-padded.
            tokenizer: words the request to repeat; without one the text is repeated with no request.
            system_tokens: first tokens of each row that always stay and are not repeated.
            progress: called with chunks done and chunks in all.

        Raises:
            UnsupportedOperationError: the cache holds something else than the prompt, or is compressed already.
            BudgetError: the budget does not hold the tokens that always stay.
        """
        model = unwrap(model)
        self.binding.check_config(compat.text_config(model.config))
        ids = inputs if torch.is_tensor(inputs) else inputs["input_ids"]
        mask = None if torch.is_tensor(inputs) else inputs.get("attention_mask")
        mask = torch.ones_like(ids) if mask is None else mask
        self._read(model, ids, mask)
        rows = [row[kept.bool()] for row, kept in zip(ids, mask, strict=True)]
        averages = self._averages(rows, max(self.options.sinks, system_tokens))
        self._replay(model, mask, rows, _Request.of(tokenizer), system_tokens, progress)
        self._drop(rows, averages, max(self.options.sinks, system_tokens))

    def _read(self, model: PreTrainedModel, ids: Tensor, mask: Tensor) -> None:
        seen = int(self.get_seq_length())
        if seen == 0:
            positions = (mask.long().cumsum(-1) - 1).clamp(min=0)
            model(
                input_ids=ids, attention_mask=mask, position_ids=positions, logits_to_keep=1, use_cache=True,
                **{compat.CACHE_ARGUMENT: self},
            )  # fmt: skip
            return
        if any(layer.is_compressed for layer in self.sparse_layers):
            raise UnsupportedOperationError("this cache is compressed already; reset() it, or fork() it before compress().")
        if seen != ids.shape[1] or self.session.batch != len(ids):
            raise UnsupportedOperationError(
                f"this cache has seen {seen} tokens in {self.session.batch} rows, the inputs are {tuple(ids.shape)}: pass exactly what "
                "it has seen, or a fresh cache."
            )

    def _averages(self, rows: list[Tensor], protected: int) -> list[int]:
        """Entries per layer and head that stay of each row, on average."""
        layer = self.sparse_layers[0]
        like = [held.new_empty(1, layer.store.heads, 0, held.shape[-1]) for held in (layer.store.keys, layer.store.values)]
        lengths = torch.tensor([len(row) for row in rows])
        averages = Budget.parse(self.options.budget).per_head(lengths, layer._cost(*like)).tolist()
        for average, length in zip(averages, lengths.tolist(), strict=True):
            if average < min(protected, length):
                raise BudgetError(f"a budget of {average} entries per head is below the {protected} tokens that always stay; raise it.")
        return [min(average, length) for average, length in zip(averages, lengths.tolist(), strict=True)]

    def _replay(self, model, mask: Tensor, rows: list[Tensor], request: "_Request", system: int, progress) -> None:
        """Runs the repeating forwards. Whatever happens, the cache is left as it was."""
        seen, size = int(self.get_seq_length()), self.options.chunk_size
        others = {i: copy.deepcopy(layer) for i, layer in enumerate(self.layers) if not isinstance(layer, ReplayingLayer)}
        for layer in self.sparse_layers:
            layer.begin_replay()
        chunks = range(system, max(len(row) for row in rows), size)
        for done, start in enumerate(chunks, start=1):
            texts = [request.ask(row, system, start, size, self.options.lead) for row in rows]
            width = max(2, *map(len, texts))  # a single token would be taken for a decode step
            batch = torch.stack([torch.nn.functional.pad(text, (0, width - len(text))) for text in texts])
            grown = torch.cat((mask, mask.new_ones(len(rows), width)), dim=1)
            positions = (grown.long().cumsum(-1) - 1)[:, -width:]
            last = [min(start + size, len(row)) for row in rows]
            replay = Replay([min(start, end) for end in last], last, [len(text) for text in texts], max(system, self.options.sinks))
            try:
                for layer in self.sparse_layers:
                    layer.replay = replay
                model(
                    input_ids=batch, attention_mask=grown, position_ids=positions, logits_to_keep=1, use_cache=True,
                    **{compat.CACHE_ARGUMENT: self},
                )  # fmt: skip
            finally:
                for layer in self.sparse_layers:
                    layer.replay = None
                self.session.rewind(seen)
                self.forget_room()
                for index, layer in others.items():
                    self.layers[index] = copy.deepcopy(layer)
            if progress is not None:
                progress(done, len(chunks))

    def _drop(self, rows: list[Tensor], averages: list[int], protected: int) -> None:
        layers, ranks = self.sparse_layers, self.binding.ranks
        keep = []
        for row, average in enumerate(averages):
            mine = torch.stack([layer.needed[row] for layer in layers])
            scores = ranks.gather(mine).cpu()
            total = average * scores.shape[0] * scores.shape[1]
            keep.append(keep_best(scores, len(rows[row]), protected, total)[:, ranks.share(scores.shape[1])])
        for depth, layer in enumerate(layers):
            layer.keep(torch.stack([chosen[depth] for chosen in keep]).to(layer.device))


class _Request:
    """The tokens that ask the model to repeat a text.

    Attributes:
        whole, part: token ids of the request for the first chunk and for later ones; close: what begins the answer.
    """

    def __init__(self, whole: list[int], part: list[int], close: list[int]):
        self.whole, self.part, self.close = whole, part, close

    @classmethod
    def of(cls, tokenizer) -> "_Request":
        if tokenizer is None:
            return cls([], [], [])
        close = ""
        if getattr(tokenizer, "chat_template", None):
            marker = "\u2063"
            message = [{"role": "user", "content": marker}]
            close = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True).split(marker)[-1]
        return cls(*(tokenizer(text, add_special_tokens=False)["input_ids"] for text in (_REPEAT, _REPEAT_FROM, close)))

    def ask(self, row: Tensor, begin: int, start: int, size: int, lead: int) -> Tensor:
        """Request and teacher-forced answer for the part of `row` from `start` on; empty where the row has ended."""
        answer = row[start : start + size]
        if len(answer) == 0:
            return answer
        asked = row.new_tensor(self.whole)
        if start > begin:
            asked = torch.cat((row.new_tensor(self.part), row[max(begin, start - lead) : start]))
        return torch.cat((asked.to(row.dtype), row.new_tensor(self.close).to(row.dtype), answer))
