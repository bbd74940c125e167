"""The methods under test. A new method adds one entry here and then passes every test in `conformance/`."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from helpers import SharingDense, WindowedDense, dense, full_layers, kept_in_all_layers

import kvsparse_hf
from kvsparse_hf import SparseCache
from kvsparse_hf.hf.binding import Binding

BUDGET = 12  # what `make` uses where a test wants eviction; every entry must accept it
AMPLE = 512  # larger than anything a conformance test feeds


@dataclass(frozen=True)
class MethodCase:
    """One method, with small settings.

    Attributes:
        cache: the class.
        options: constructor options besides the budget.
        evicts: whether tokens over the budget are gone.
        bounded: whether the budget also holds while decoding.
        every: decoded tokens after which the cache is compressed to the budget again; 0 for never.
        drops: tokens that a full head drops at once; 0 where it gives up one for one.
        memory: bytes that the method remembers of each entry beside its key, value and position.
        croppable: whether tokens can be taken back after a compression.
        assisted: whether drafts can be verified with it even when it evicts.
        takes_budget: whether there is a budget option.
        rounding: factor on the tolerance in half precision, where keys are stored in other coordinates.
        selects: nothing is evicted, but a decoded token reads at most the budget; drafts are verified densely.
        sinks, window: first and newest tokens that always stay.
        variant: another setting of a method listed before; spared the matrix of all architectures.
        rounds: a small budget leaves some tokens in few bits.
        streaming: position alone decides, so the kept tokens are the first `sinks` and the newest ones.
        uneven: "heads" where the heads of a layer hold unequal numbers of entries, "layers" where the layers do too; only the
            average over them is then the budget.
        queries: dense layers' worth of queries that a prompt holds, where the scores look at all queries of several layers.
        drafts: whether drafts can be verified; otherwise they are refused.
        layers: of the models that it is tested on, where a test does not say (see `conftest.py`).
        hybrids: whether models in which some layers slide by themselves are supported; otherwise they are refused.
        dense: makes the dense cache, of Transformers' own code, whose results an ample budget must give.
    """

    id: str
    cache: type[SparseCache]
    options: dict[str, Any] = field(default_factory=dict)
    evicts: bool = True
    bounded: bool = False
    every: int = 0
    drops: int = 0
    memory: int = 0
    croppable: bool = True
    assisted: bool = False
    selects: bool = False
    rounds: bool = False
    rounding: float = 1.0
    takes_budget: bool = True
    sinks: int = 0
    window: int = 0
    variant: bool = False
    streaming: bool = False
    uneven: str = ""
    dense: Callable = dense
    queries: int = 0
    drafts: bool = True
    layers: int = 2
    hybrids: bool = True

    def make(self, model, budget: Any = BUDGET, **overrides) -> SparseCache:
        options = {**self.options, **overrides}
        if self.takes_budget:
            options["budget"] = budget
        return self.cache(model, **options)

    def held(self, cache) -> set[float]:
        """The distinct numbers of entries held per row and head; averages over what is `uneven`."""
        lengths = [[[len(head) for head in row] for row in layer] for layer in kept_in_all_layers(cache)]
        if not self.uneven:
            return {length for layer in lengths for row in layer for length in row}
        if self.uneven == "layers":
            lengths = [[[n for layer in lengths for n in layer[row]] for row in range(len(lengths[0]))]]
        return {sum(row) / len(row) for layer in lengths for row in layer}

    def kept_after_prompt(self, length: int, budget: int = BUDGET) -> int:
        """Entries that must be held once a prompt of `length` real tokens was read."""
        return min(length, budget) if self.evicts else length

    def kept_after_decode(self, length: int, steps: int, budget: int = BUDGET) -> int:
        """Entries after `steps` further one-token forwards."""
        kept = self.kept_after_prompt(length, budget)
        for step in range(steps):
            if self.every and step and step % self.every == 0:
                kept = min(kept, budget)
            if self.drops and kept == budget:
                kept -= self.drops
            kept += 1
        return min(kept, budget) if self.bounded else kept

    def owners(self, layers: int) -> int:
        """How many of so many full-attention layers store something."""
        return layers

    def windows(self, layers: int) -> list[int]:
        """How many of the newest tokens the queries of each layer see, also within a prompt; 0 for all."""
        return [0] * layers

    def is_untouched(self, length: int, budget: int = BUDGET) -> bool:
        """Whether a prompt of so many tokens is read as it was, until it grows."""
        return length <= budget or not (self.evicts or self.selects or self.rounds)


_SNAP = dict(window=4, kernel=3)

_BOUNDED = dict(bounded=True, croppable=False)
_SELECTS = dict(evicts=False, assisted=True, selects=True)
_QUEST = dict(page_size=2, sinks=2, recent=2, dense_layers=0)
_ZONES = dict(sinks=2, recent=3, update_every=4, per_cluster=2, segment=64)

METHODS = [
    MethodCase("full", kvsparse_hf.FullCache, evicts=False, assisted=True, takes_budget=False),
    MethodCase("snapkv", kvsparse_hf.SnapKVCache, _SNAP, window=4),
    MethodCase("snapkv-bounded", kvsparse_hf.SnapKVCache, {**_SNAP, "decode": "bounded"}, bounded=True, croppable=False, window=4),
    MethodCase("snapkv-cachepos", kvsparse_hf.SnapKVCache, {**_SNAP, "positions": "cache"}, window=4, variant=True),
    MethodCase("snapkv-sinks-avg", kvsparse_hf.SnapKVCache, {**_SNAP, "sinks": 2, "pooling": "avg", "reduce": "max"}, sinks=2,
               window=4, variant=True),
    MethodCase("streaming", kvsparse_hf.StreamingLLMCache, bounded=True, croppable=False, sinks=4, window=1, streaming=True),
    MethodCase("streaming-original", kvsparse_hf.StreamingLLMCache, {"positions": "original"}, bounded=True, croppable=False,
               sinks=4, window=1, variant=True, streaming=True),
    MethodCase("snapkv-periodic", kvsparse_hf.SnapKVCache, {**_SNAP, "recompress_every": 7}, every=7, croppable=False, window=4,
               variant=True),
    MethodCase("h2o", kvsparse_hf.H2OCache, window=6, memory=4, **_BOUNDED),
    MethodCase("h2o-count", kvsparse_hf.H2OCache, {"normalize": "count", "sinks": 2, "recent": 3}, sinks=2, window=3,
               memory=4, variant=True, **_BOUNDED),
    MethodCase("scissorhands", kvsparse_hf.ScissorhandsCache, {"recent": 2, "window": 20}, drops=6, window=2, memory=8, **_BOUNDED),
    MethodCase("tova", kvsparse_hf.TOVACache, memory=4, **_BOUNDED),
    MethodCase("pyramidkv", kvsparse_hf.PyramidKVCache, _SNAP, window=4, uneven="layers"),
    MethodCase("pyramidkv-bounded", kvsparse_hf.PyramidKVCache, {**_SNAP, "decode": "bounded"}, window=4, variant=True,
               uneven="layers", **_BOUNDED),
    MethodCase("keydiff", kvsparse_hf.KeyDiffCache, {"block": 8}),
    # (two keys are always equally far from their mean: the sink decides)
    MethodCase("keydiff-bounded", kvsparse_hf.KeyDiffCache, {"block": 8, "decode": "bounded", "sinks": 1, "recent": 2}, sinks=1, window=2,
               variant=True, **_BOUNDED),
    MethodCase("knorm", kvsparse_hf.KnormCache),
    MethodCase("knorm-bounded", kvsparse_hf.KnormCache, {"decode": "bounded", "recent": 2}, window=2, variant=True, **_BOUNDED),
    MethodCase("expected-attention", kvsparse_hf.ExpectedAttentionCache, {"sinks": 2, "future": 16}, sinks=2),
    MethodCase("rkv", kvsparse_hf.RKVCache, {**_SNAP, "recompress_every": 8}, every=8, croppable=False, window=4),
    MethodCase("quest", kvsparse_hf.QuestCache, _QUEST, **_SELECTS),
    MethodCase("quest-per-head", kvsparse_hf.QuestCache, {**_QUEST, "per_query_head": True}, variant=True, **_SELECTS),
    MethodCase("loki", kvsparse_hf.LokiCache, {"d_f": 0.5, "sinks": 1, "recent": 2}, rounding=2.0, **_SELECTS),
    MethodCase("sparq", kvsparse_hf.SparQCache, {"channels": 6, "recent": 3}, **_SELECTS),
    MethodCase("sparq-channels", kvsparse_hf.SparQCache, {"channels": 6, "recent": 3, "channel_major": True}, variant=True, **_SELECTS),
    MethodCase("retrieval-flat", kvsparse_hf.RetrievalAttentionCache, {**_ZONES, "index": "flat"}, variant=True, **_SELECTS),
    MethodCase("retrieval-ivf", kvsparse_hf.RetrievalAttentionCache, _ZONES, **_SELECTS),
    MethodCase("retrieval-ivf-queries", kvsparse_hf.RetrievalAttentionCache, {**_ZONES, "train_on": "queries", "per_query_head": True},
               variant=True, **_SELECTS),
]

# --- head-level methods ---


@dataclass(frozen=True)
class DuoCase(MethodCase):
    """In every layer one of the two heads streams, and the budget is that head's."""

    def make(self, model, budget: Any = BUDGET, **overrides) -> SparseCache:
        binding = Binding.of(model)
        heads, layers = binding.kv_heads, binding.layers
        span = budget if isinstance(budget, int) else AMPLE
        options = {"pattern": [[head % 2 for head in range(heads)]] * layers, "sinks": 2, "recent": span - 2, **overrides}
        return self.cache(model, **options)

    def kept_after_prompt(self, length: int, budget: int = BUDGET) -> float:
        return (length + min(length, budget)) / 2

    def kept_after_decode(self, length: int, steps: int, budget: int = BUDGET) -> float:
        return self.kept_after_prompt(length + steps, budget)


@dataclass(frozen=True)
class MoACase(MethodCase):
    """Every head's span is the budget."""

    def make(self, model, budget: Any = BUDGET, **overrides) -> SparseCache:
        span = budget if isinstance(budget, int) else AMPLE
        shape = (Binding.of(model).layers, Binding.of(model).kv_heads)
        rules = {"alphas": [[span] * shape[1]] * shape[0], "betas": [[0.0] * shape[1]] * shape[0]}
        options = {"rules": rules, "sinks": 4, "minimum": 5, "multiple": 1, "new_tokens": AMPLE, **overrides}
        return self.cache(model, **options)


@dataclass(frozen=True)
class HeadKVCase(MethodCase):
    """A table that prefers later heads and layers."""

    def make(self, model, budget: Any = BUDGET, **overrides) -> SparseCache:
        shape = (Binding.of(model).layers, Binding.of(model).kv_heads)
        table = [[layer + head + 1 for head in range(shape[1])] for layer in range(shape[0])]
        return self.cache(model, budget=budget, table=table, **{**self.options, **overrides})


_ADA = dict(**_SNAP, alpha=0.2)
METHODS += [
    MethodCase("adakv", kvsparse_hf.AdaKVCache, _ADA, window=4, uneven="heads"),
    MethodCase("adakv-bounded", kvsparse_hf.AdaKVCache, {**_ADA, "decode": "bounded"}, bounded=True, croppable=False, window=4,
               uneven="heads", variant=True),
    MethodCase("adakv-pyramid", kvsparse_hf.AdaKVCache, {**_ADA, "scorer": "pyramidkv", "beta": 2}, window=4, uneven="layers",
               variant=True),
    MethodCase("adakv-expected", kvsparse_hf.AdaKVCache, {"scorer": "expected-attention", "sinks": 2, "recent": 2}, sinks=2, window=2,
               uneven="heads", variant=True),
    HeadKVCase("headkv", kvsparse_hf.HeadKVCache, {**_SNAP, "beta": 1.5}, window=4, uneven="layers"),
    DuoCase("duo-attention", kvsparse_hf.DuoAttentionCache, sinks=2, window=1, uneven="heads", takes_budget=False, **_BOUNDED),
    MoACase("moa", kvsparse_hf.MoACache, sinks=4, window=1, takes_budget=False, streaming=True, **_BOUNDED),
    MethodCase("kvzip", kvsparse_hf.KVzipCache, evicts=False, assisted=True),
]

# --- tiers ---


@dataclass(frozen=True)
class TieredCase(MethodCase):
    """A small budget means small shares: of the lossy variant some tokens are gone then, and some rounded."""

    def make(self, model, budget: Any = BUDGET, **overrides) -> SparseCache:
        shares = dict(hbm=0.4, host=0.6)
        if self.evicts and budget == BUDGET:
            shares = dict(hbm=0.3, host=0.2, quantized=0.2, evicted=0.3)
        return self.cache(model, **{"sinks": 1, "recent": 3, "interval": 4, "group": 8, **shares, **overrides})

    def is_untouched(self, length: int, budget: int = BUDGET) -> bool:
        return not self.evicts or length <= 4

    def kept_after_prompt(self, length: int, budget: int = BUDGET) -> int:
        return length - min(int(0.3 * length + 1e-9), max(length - 4, 0)) if self.evicts else length

    def kept_after_decode(self, length: int, steps: int, budget: int = BUDGET) -> int:
        since = (steps - 1) % 4 + 1 if steps else 0  # steps after the last ranking
        return self.kept_after_prompt(length + steps - since) + since


METHODS += [
    TieredCase("tiered", kvsparse_hf.TieredCache, evicts=False, assisted=True, takes_budget=False),
    TieredCase("tiered-lossy", kvsparse_hf.TieredCache, every=4, croppable=False, takes_budget=False, variant=True),
    MethodCase("snapkv-offload", kvsparse_hf.SnapKVCache, {**_SNAP, "action": "offload"}, evicts=False, assisted=True, variant=True),
    MethodCase("snapkv-quantize", kvsparse_hf.SnapKVCache, {**_SNAP, "action": "quantize", "group": 8}, evicts=False, croppable=False,
               rounds=True, variant=True),
    MethodCase("h2o-offload", kvsparse_hf.H2OCache, {"action": "offload", "interval": 5}, evicts=False, assisted=True, variant=True),
]

# --- offloading, with a hot buffer that is smaller than most prompts ---

METHODS += [
    MethodCase("hisparse", kvsparse_hf.HiSparseCache, _QUEST, **_SELECTS),
    MethodCase("hisparse-loki", kvsparse_hf.HiSparseCache, {**_QUEST, "selector": "loki", "d_f": 0.5, "prefetch": 2},
               rounding=2.0, variant=True, **_SELECTS),
    MethodCase("hisparse-ivf", kvsparse_hf.HiSparseCache, {"selector": "ivf", "sinks": 2, "recent": 3, "update_every": 4,
                                                           "per_cluster": 2, "segment": 64}, variant=True, **_SELECTS),
]

# --- layer-level methods ---


def dense_in_pairs(model) -> SharingDense:
    """Every second full-attention layer gets what the one before it holds."""
    sources, full = list(range(model.config.num_hidden_layers)), full_layers(model)
    for reader, source in zip(full[1::2], full[::2], strict=False):
        sources[reader] = source
    return SharingDense(model, sources)


@dataclass(frozen=True)
class SharedCase(MethodCase):
    """Every second full-attention layer reads the one before it."""

    def make(self, model, budget: Any = BUDGET, **overrides) -> SparseCache:
        options = {**self.options, **overrides}
        if self.cache is kvsparse_hf.KVSharerCache:
            full = full_layers(model)
            options["plan"] = list(zip(full[1::2], full[::2], strict=False))
        if self.takes_budget:
            options["budget"] = budget
        return self.cache(model, **options)

    dense: Callable = dense_in_pairs

    def owners(self, layers: int) -> int:
        return (layers + 1) // 2


# Layers that others read decide together with them, so that one of them alone cannot try drafts out.
_TOGETHER = dict(variant=True, drafts=False)

METHODS += [
    SharedCase("cla", kvsparse_hf.CLACache, {"factor": 2}, evicts=False, assisted=True, takes_budget=False),
    SharedCase("cla-snapkv", kvsparse_hf.CLACache, {"factor": 2, "inner": "snapkv", **_SNAP}, window=4, **_TOGETHER),
    SharedCase("cla-h2o", kvsparse_hf.CLACache, {"factor": 2, "inner": "h2o"}, window=6, memory=4, queries=3, **_BOUNDED, **_TOGETHER),
    SharedCase("cla-quest", kvsparse_hf.CLACache, {"factor": 2, "inner": "quest", **_QUEST}, variant=True, **_SELECTS),
    SharedCase("cla-rkv", kvsparse_hf.CLACache, {"factor": 2, "inner": "rkv", **_SNAP, "recompress_every": 8}, every=8, croppable=False,
               window=4, **_TOGETHER),
    SharedCase("kvsharer", kvsparse_hf.KVSharerCache, evicts=False, assisted=True, takes_budget=False, variant=True),
]

SPAN = 6  # tokens that YOCO's lower layers see: fewer than almost every test feeds


def spans(layers: int) -> list[int]:
    """The layers below the middle see a window."""
    return [SPAN if layer < layers // 2 else 0 for layer in range(layers)]


def dense_from_the_middle(model) -> WindowedDense:
    """Every layer above the middle gets what the middle one holds; those below see a window."""
    layers = model.config.num_hidden_layers
    return WindowedDense(model, [min(layer, layers // 2) for layer in range(layers)], spans(layers))


@dataclass(frozen=True)
class YocoCase(MethodCase):
    """Three layers: one sees a window, the middle one keeps all, which the last one reads. Nothing depends on a budget."""

    dense: Callable = dense_from_the_middle

    def owners(self, layers: int) -> int:
        return layers // 2 + 1

    def windows(self, layers: int) -> list[int]:
        return spans(layers)

    def kept_after_prompt(self, length: int, budget: int = BUDGET) -> float:
        return (min(length, SPAN) + length) / 2

    def kept_after_decode(self, length: int, steps: int, budget: int = BUDGET) -> float:
        return self.kept_after_prompt(length + steps)

    def is_untouched(self, length: int, budget: int = BUDGET) -> bool:
        return True


METHODS += [
    YocoCase("yoco", kvsparse_hf.YOCOCache, {"window": SPAN}, croppable=False, takes_budget=False, window=SPAN, uneven="layers",
             drafts=False, layers=3, hybrids=False),
]

ALL = {case.id: case for case in METHODS}
MAIN = [case for case in METHODS if not case.variant]
EVICTING = [case for case in METHODS if case.evicts and case.takes_budget]
# One method for each kind of cache layer: what a layer does whatever its method is tested with these alone.
CORE = [ALL[name] for name in ("full", "snapkv", "streaming", "h2o", "quest", "adakv", "tiered")]


def quick_where(quick: Callable, *more) -> list:
    """Parameters: every method with every combination of further values. What is not `quick(case, *values)` is marked slow."""
    out = []
    for case in METHODS:
        for values in itertools.product(*more):
            marks = () if quick(case, *values) else pytest.mark.slow
            out.append(pytest.param(case, *values, id="-".join(map(str, (case.id, *values))), marks=marks))
    return out


def only(cases: list, params: list) -> list:
    """Those of the parameters whose method is one of `cases`."""
    return [param for param in params if param.values[0] in cases]


# Every method; those that are not in CORE are marked slow.
by_all = pytest.mark.parametrize("case", quick_where(lambda case: case in CORE))
