"""The compiled step, on the CPU: the eager tokens, one graph, no break, no recompilation."""

import logging

import pytest
import torch
import torch._dynamo
from helpers import dense, generate, kept_in_all_layers, left_pad, tokens
from methods import ALL, AMPLE, only, quick_where
from tiny_models import build
from torch._dynamo.backends.debugging import aot_eager
from transformers.generation import CompileConfig

# Variants whose step differs from that of their method; the steps of the others hold other numbers, and are in the slow run.
OTHER_STEPS = ("snapkv-cachepos", "snapkv-quantize", "quest-per-head", "sparq-channels", "retrieval-flat", "hisparse-loki",
               "hisparse-ivf", "cla-quest")  # fmt: skip
by_method = pytest.mark.parametrize("case", quick_where(lambda case: not case.variant or case.id in OTHER_STEPS))
by_core = pytest.mark.parametrize("case", [ALL["full"], ALL["snapkv"], ALL["streaming"]], ids=lambda case: case.id)


@pytest.fixture(autouse=True)
def _fresh_compiler(monkeypatch):
    # pytest listens to torch's trace log, which makes torch write thousands of records.
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "handlers", [])
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield
    torch._dynamo.reset()


def _compiled(backend, fullgraph: bool = True) -> CompileConfig:
    config = CompileConfig(fullgraph=fullgraph, mode=None, backend=backend)
    config._compile_all_devices = True
    return config


class _Graphs:
    """A backend that counts the graphs it is given."""

    def __init__(self, inner=None):
        self.count, self.inner = 0, inner

    def __deepcopy__(self, memo):  # Transformers copies the compile options
        return self

    def __call__(self, graph, inputs):
        self.count += 1
        return graph.forward if self.inner is None else self.inner(graph, inputs)


@pytest.mark.feature("compiled decoding")
@by_method
def test_60_steps_in_one_graph(case):
    """Also over a second `generate()` after `reset()`, with other tokens and other padding. The reserve holds the answer.

    AOTAutograd turns writes in place into copies back, so a write it does not see would be lost here."""
    model = build()
    ids, mask = left_pad([tokens(30), tokens(17, seed=2)])
    # Pyramid budgets follow the length of the prompt, and so do the buffers: there only the tokens differ.
    lengths = (30, 17) if "pyramid" in case.id else (24, 15)
    other, other_mask = left_pad([tokens(lengths[0], seed=5), tokens(lengths[1], seed=6)])
    graphs, mine = _Graphs(aot_eager), case.make(model)
    config = _compiled(graphs)
    got = generate(model, ids, mine, 61, attention_mask=mask, compile_config=config)
    assert graphs.count == 1
    held = kept_in_all_layers(mine)
    mine.reset()
    again = generate(model, other, mine, 30, attention_mask=other_mask, compile_config=config)
    assert graphs.count == 1
    eager = case.make(model)
    assert torch.equal(got, generate(model, ids, eager, 61, attention_mask=mask))
    assert held == kept_in_all_layers(eager)
    assert torch.equal(again, generate(model, other, case.make(model), 30, attention_mask=other_mask))


@by_core
def test_an_ample_budget_in_one_graph(case):
    model = build()
    graphs = _Graphs()
    got = generate(model, tokens(20), case.make(model, AMPLE), 40, compile_config=_compiled(graphs))
    assert graphs.count == 1
    assert torch.equal(got, generate(model, tokens(20), dense(model), 40))


def test_a_growing_cache_recompiles_only_when_it_doubles():
    model = build()
    graphs = _Graphs()
    with torch._dynamo.config.patch(error_on_recompile=False):
        got = generate(model, tokens(20), ALL["full"].make(model, reserve=8), 41, compile_config=_compiled(graphs))
    assert torch.equal(got, generate(model, tokens(20), dense(model), 41))
    assert graphs.count <= 3  # 8, 16, 32


@by_core
def test_second_turn_under_compile(case):
    model = build()
    config = _compiled(_Graphs())
    mine, eager = case.make(model), case.make(model)
    first = generate(model, tokens(20), mine, 10, compile_config=config)
    assert torch.equal(generate(model, tokens(20), eager, 10), first)
    whole = torch.cat((tokens(20), first, tokens(5, seed=4)), dim=1)
    with torch._dynamo.config.patch(error_on_recompile=False):
        second = generate(model, whole, mine, 10, compile_config=config)
    assert torch.equal(generate(model, whole, eager, 10), second)


@pytest.mark.slow
@by_core
def test_chunked_prefill_under_compile(case):
    model = build()
    expected = generate(model, tokens(40), case.make(model), 12, prefill_chunk_size=16)
    with torch._dynamo.config.patch(error_on_recompile=False):
        got = generate(model, tokens(40), case.make(model), 12, prefill_chunk_size=16, compile_config=_compiled(_Graphs(), fullgraph=False))
    assert torch.equal(got, expected)


@pytest.mark.parametrize("case", only([ALL["full"], ALL["snapkv"], ALL["streaming"]], quick_where(lambda case: case is ALL["snapkv"])))
def test_the_model_compiled_by_its_user(case):
    """`model.forward = torch.compile(model.forward)`: prompt and steps, breaks allowed, the same tokens."""
    model = build(num_hidden_layers=1)
    expected = generate(model, tokens(20), case.make(model), 6)
    model.forward = torch.compile(model.forward, backend="eager")
    mine = case.make(model)
    with torch._dynamo.config.patch(error_on_recompile=False):
        assert torch.equal(generate(model, tokens(20), mine, 6), expected)
    assert mine.report().seen == [25]


@pytest.mark.slow  # Inductor compiles C++: about half a minute
def test_inductor():
    model, case = build(), ALL["streaming"]
    ids, mask = left_pad([tokens(30), tokens(17, seed=2)])
    expected = generate(model, ids, case.make(model), 40, attention_mask=mask)
    assert torch.equal(generate(model, ids, case.make(model), 40, attention_mask=mask, compile_config=_compiled("inductor")), expected)
