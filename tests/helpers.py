"""Small tools of the conformance tests: feeding models, reading what a cache kept, finding every tensor it holds."""

import functools
import weakref
from collections.abc import Iterable

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerFast
from transformers.cache_utils import Cache

from kvsparse_hf.hf.compat import CACHE_ARGUMENT as CACHE  # noqa: F401 "cache" or "past_key_values", by version


def tokens(length: int, batch: int = 1, seed: int = 1) -> Tensor:
    """Random token ids, none of them special. `[batch, length]`."""
    return torch.randint(3, 97, (batch, length), generator=torch.Generator().manual_seed(seed))


def left_pad(rows: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
    """Rows of different length as `(input_ids, attention_mask)`, padded in front. Padding holds a token that would matter."""
    rows = [row.flatten() for row in rows]
    width = max(len(row) for row in rows)
    ids = torch.full((len(rows), width), 5)
    mask = torch.zeros(len(rows), width, dtype=torch.long)
    for index, row in enumerate(rows):
        ids[index, width - len(row):] = row
        mask[index, width - len(row):] = 1
    return ids, mask


_TEMPLATE = "{% for m in messages %}{{ 'w10 ' if m.role == 'user' else 'w11 ' }}{{ m.content }} w12 {% endfor %}{% if add_generation_prompt %}w11 {% endif %}"


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Writes token 7 as "w7", with words between blanks, a left padding side and a chat template."""
    words = {"<pad>": 0, "<s>": 1, "<unk>": 2, "abcdef": 97} | {f"w{index}": index for index in range(3, 97)}  # (stop strings need a word)
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = dict(pad_token="<pad>", bos_token="<s>", unk_token="<unk>", padding_side="left")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=_TEMPLATE, **special)


def dense(model: PreTrainedModel) -> DynamicCache:
    """Transformers' own cache for this model."""
    return DynamicCache(config=model.config)


class SharingDense(DynamicCache):
    """Transformers' own cache with the plainest sharing there is: a layer gets what its source has stored.

    Args:
        sources: the layer whose keys and values each layer reads.
    """

    def __init__(self, model: PreTrainedModel, sources: list[int]):
        super().__init__(config=model.config)
        self.sources = sources

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *args, **kwargs) -> tuple[Tensor, Tensor]:
        source = self.sources[layer_idx]
        if source == layer_idx:
            return super().update(keys, values, layer_idx, *args, **kwargs)
        return self.layers[source].keys, self.layers[source].values


class WindowedDense(SharingDense):
    """Such a cache for a model whose attention is full, and some layers of which are to see a window: in forwards with this cache
    their masks are narrowed. A module hook does it, on the decoder layers.

    Args:
        windows: tokens that each layer sees, 0 for all.
    """

    def __init__(self, model: PreTrainedModel, sources: list[int], windows: list[int]):
        super().__init__(model, sources)
        for index, (layer, window) in enumerate(zip(model.get_decoder().layers, windows, strict=True)):
            if window:
                hook = functools.partial(_narrow_mask, weakref.ref(self), index, window)
                weakref.finalize(self, layer.register_forward_pre_hook(hook, with_kwargs=True).remove)


def _narrow_mask(cache: weakref.ref, index: int, window: int, layer, args: tuple, kwargs: dict):
    mine = cache()
    if mine is None or not any(value is mine for value in kwargs.values()):
        return None
    hidden, mask = args[0] if args else kwargs["hidden_states"], kwargs.get("attention_mask")
    new = hidden.shape[1]
    length = int(mine.get_seq_length(index)) + new
    if length <= window:
        return None
    row, column = torch.arange(length - new, length).unsqueeze(1), torch.arange(length)
    seen = ((column <= row) & (column > row - window))[None, None]
    if mask is None:
        mask = seen
    else:
        mask = mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, torch.finfo(mask.dtype).min)
    return args, {**kwargs, "attention_mask": mask}


def full_layers(model: PreTrainedModel) -> list[int]:
    """The layers with full attention."""
    types = getattr(model.config, "layer_types", None) or ["full_attention"] * model.config.num_hidden_layers
    sliding = getattr(model.config, "sliding_window", None) if not getattr(model.config, "layer_types", None) else None
    return [] if sliding else [index for index, kind in enumerate(types) if kind == "full_attention"]


def forward(model: PreTrainedModel, ids: Tensor, cache: Cache | None = None, **kwargs) -> Tensor:
    """Logits of one forward."""
    if cache is not None:
        kwargs[CACHE] = cache
    return model(input_ids=ids, **kwargs).logits


def generate(model: PreTrainedModel, ids: Tensor | None, cache: Cache | None = None, new: int = 16, **kwargs):
    """`model.generate` of exactly `new` tokens; returns only those, or the whole output object if asked to."""
    if cache is not None:
        kwargs[CACHE] = cache
    if ids is not None:
        kwargs.setdefault("attention_mask", torch.ones_like(ids))
    kwargs = {"do_sample": False, "max_new_tokens": new, "min_new_tokens": new, **kwargs}
    out = model.generate(ids, **kwargs) if ids is not None else model.generate(**kwargs)
    if not torch.is_tensor(out):
        return out
    return out[:, ids.shape[1]:] if ids is not None else out


def decode(model: PreTrainedModel, cache: Cache, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    """Feeds `ids` `[B, T]` one token at a time after what the cache has seen; `[B, T, vocab]` logits.

    `mask`: the 2-D mask of what was seen before; needed where rows are padded. Positions are then given as `generate` does.
    """
    out = []
    for step in range(ids.shape[1]):
        kwargs = {}
        if mask is not None:
            mask = torch.cat((mask, mask.new_ones(len(mask), 1)), dim=1)
            kwargs = {"attention_mask": mask, "position_ids": positions(mask)[:, -1:]}
        out.append(forward(model, ids[:, step:step + 1], cache, **kwargs))
    return torch.cat(out, dim=1)


def prefill(model: PreTrainedModel, cache: Cache, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    """First forward over (padded) prompts; all logits."""
    if mask is None:
        return forward(model, ids, cache)
    return forward(model, ids, cache, attention_mask=mask, position_ids=positions(mask))


def positions(mask: Tensor) -> Tensor:
    """Positions as `generate()` derives them from a mask."""
    return (mask.long().cumsum(-1) - 1).clamp(min=0)


def seen(cache: Cache) -> int:
    """Tokens seen, as a host number that does not change later."""
    return int(cache.get_seq_length())


def kept(cache, layer: int = -1) -> list[list[list[int]]]:
    """True positions held, in any store of the layer, ascending: `[row][head]`."""
    stores = cache.sparse_layers[layer].stores
    rows, heads = stores[0].start.shape
    return [[sorted(sum((_held(store, row, head) for store in stores), [])) for head in range(heads)] for row in range(rows)]


def _held(store, row: int, head: int) -> list[int]:
    first, count = int(store.start[row, head]), int(store.length[row, head])
    return store.positions[first:first + count].tolist()


def kept_in_all_layers(cache) -> list:
    return [kept(cache, layer) for layer in range(len(cache.sparse_layers))]


def counts(cache) -> set[int]:
    """The distinct numbers of entries held per head, over all layers, rows and heads."""
    return {len(head) for layer in kept_in_all_layers(cache) for row in layer for head in row}


def tensors_of(cache) -> list[Tensor]:
    """Every tensor that the cache object keeps alive, wherever it hides; the model, config and code are not followed."""
    found, visited, todo = [], set(), [cache]
    while todo:
        item = todo.pop()
        if id(item) in visited:
            continue
        visited.add(id(item))
        if torch.is_tensor(item):
            found.append(item)
        elif isinstance(item, dict):
            todo.extend(item.values())
        elif isinstance(item, (list, tuple, set)):
            todo.extend(item)
        elif type(item).__module__.startswith(("kvsparse_hf", "transformers.cache_utils")):
            if type(item).__name__ not in ("Binding", "KeyRotation"):
                todo.extend(vars(item).values())
    return found


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the distinct storages behind some tensors."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def snapshot(cache) -> dict:
    """All tensors of a cache by path, cloned: to show that an operation changed nothing."""
    out = {}
    for index, layer in enumerate(cache.layers):
        held = layer.tensors() if hasattr(layer, "tensors") else {k: v for k, v in vars(layer).items() if torch.is_tensor(v)}
        out.update({(index, name): value.clone() for name, value in held.items()})
    return out


def same_snapshot(left: dict, right: dict) -> bool:
    """Bit for bit, so that unused memory may hold anything, also NaN."""
    return left.keys() == right.keys() and all(
        left[key].shape == right[key].shape and torch.equal(_bits(left[key]), _bits(right[key])) for key in left
    )


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
