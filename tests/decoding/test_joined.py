"""`FastDecode(compile="joined")`: projections of one input are one product, and the model stays what it was."""

import copy

import pytest
import torch
from helpers import CACHE, left_pad, tokens
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

import kvsparse_hf
from kvsparse_hf import FastDecode
from kvsparse_hf.decoding import compiled, joined, launches

SHAPE = dict(
    vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
    eos_token_id=None, bos_token_id=None,
)  # fmt: skip


def build(config_class):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_class(**SHAPE)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)  # biases, too
    return model


def run(model, **extra):
    ids, mask = left_pad([tokens(30), tokens(22, seed=2)])
    cache = kvsparse_hf.SnapKVCache(model, budget=16, window=4)
    return model.generate(ids, attention_mask=mask, max_new_tokens=12, pad_token_id=0, **{CACHE: cache}, **extra)


@pytest.mark.parametrize(
    "config_class",
    [pytest.param(LlamaConfig, id="llama", marks=pytest.mark.slow), pytest.param(Qwen2Config, id="qwen-2, with biases")],
)
def test_same_text_with_fewer_products(config_class, monkeypatch):
    monkeypatch.setitem(compiled.OPTIONS, "joined", {})  # without tuning, which takes a minute on a CPU
    made, join = [], joined._join
    monkeypatch.setattr(joined, "_join", lambda graph, products, *where: made.append(len(products)) or join(graph, products, *where))
    model, how = build(config_class), {"custom_generate": FastDecode(compile="joined")}
    before = run(model)
    assert torch.equal(run(model, **how), before)
    assert sorted(made) == [2, 3]
    # A weight that was replaced since counts, and needs no other graph.
    attention = model.model.layers[0].self_attn
    attention.k_proj.weight = torch.nn.Parameter(attention.k_proj.weight.detach().neg())
    after = run(model)
    assert torch.equal(run(model, **how), after) and not torch.equal(before, after)
    assert sorted(made) == [2, 3]


def test_the_model_stays_what_it_was(tmp_path):
    model = build(Qwen2Config)
    weights = copy.deepcopy(model.state_dict())
    names = dict(model.named_parameters())
    assert joined.join_weights(model) == joined.join_weights(model) == 2
    assert all(parameter is names[name] for name, parameter in model.named_parameters())
    attention = model.model.layers[0].self_attn
    assert joined.side_by_side([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight])
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    for other in (model, copy.deepcopy(model), loaded):
        assert all(torch.equal(tensor, weights[name]) for name, tensor in other.state_dict().items())
        assert torch.equal(run(other), run(model))


def test_what_cannot_be_joined_is_left_alone():
    model = build(LlamaConfig)
    layer = model.model.layers[0]
    layer.self_attn.q_proj = torch.nn.Sequential(layer.self_attn.q_proj)  # an adapter, say
    layer.mlp.up_proj.double()
    assert joined.join_weights(model) == 0
    assert not joined.side_by_side([layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight])


def test_few_rows_are_multiplied_by_our_kernel(monkeypatch):
    """On a GPU; here, the graph that Inductor would be given."""
    seen, given = [], []
    monkeypatch.setattr(joined, "_few_rows", lambda x: 1 < x.shape[:-1].numel() <= 16)
    monkeypatch.setattr(torch._inductor, "compile",
                        lambda module, inputs, options: seen.append(module) or given.append(options) or module)
    monkeypatch.setattr(torch.ops.kvsparse, "few_rows_linear", _Stand, raising=False)
    model = build(Qwen2Config)
    before = run(model)
    assert torch.equal(run(model, custom_generate=FastDecode(compile="joined")), before)
    targets = [node.target for node in seen[-1].graph.nodes if node.op == "call_function"]
    assert torch._C._nn.linear not in targets
    assert targets.count(_Stand.default) == 5  # q/k/v, o, gate/up, down, and the head
    assert given[-1] == {"freezing": True}  # nothing is left to tune


def test_products_that_are_left_to_inductor_are_tuned(monkeypatch):
    given = []
    monkeypatch.setattr(torch._inductor, "compile", lambda module, inputs, options: given.append(options) or module)
    run(build(LlamaConfig), custom_generate=FastDecode(compile="joined"))
    assert given[-1] == compiled.OPTIONS["joined"] == {**dict.fromkeys(compiled.TUNING, True), "freezing": True}


class _Stand:
    """In the place of the registered op, which needs a GPU."""

    default = staticmethod(lambda x, weight, bias=None: torch.nn.functional.linear(x, weight, bias))


KERNEL = """async_compile.triton('{name}', '''
@triton_heuristics.pointwise(triton_meta={{'launch_pdl': {early}}})
def {name}(in_ptr0, out_ptr0):
    {body}
''', device_str='cuda')
"""
WAIT = "tl.extra.cuda.gdc_wait()"


def kernel(body: str, early: bool = True) -> str:
    return KERNEL.format(name="some_kernel", early=early, body=body)


def several(*bodies: str) -> str:
    branches = "".join(f"{'elif' if at else 'if'} pid < num_xblocks_{at}:\n        {body}\n    " for at, body in enumerate(bodies))
    return kernel("pid = tl.program_id(0)\n    " + branches + "else:\n        pass")


@pytest.mark.parametrize("source, waits", [
    ("def call(args): pass", True),
    (kernel(WAIT), True),
    (kernel("tl.store(out_ptr0, 0.0)"), False),
    (kernel("tl.store(out_ptr0, 0.0)", early=False), True),
    (kernel(WAIT) + kernel("tl.store(out_ptr0, 0.0)"), False),
    (several(WAIT, WAIT), True),
    (several(WAIT, "tl.store(out_ptr0, 0.0)"), False),
])  # fmt: skip
def test_a_graph_with_a_kernel_that_does_not_wait_is_compiled_again(source, waits, tmp_path, monkeypatch):
    module, runs = tmp_path / "module.py", []

    def inductor(graph, inputs, options):
        runs.append(options)
        module.write_text(source)

    monkeypatch.setattr(torch._inductor, "compile", inductor)
    monkeypatch.setattr(launches, "written", lambda: {module} if module.exists() else set())
    for repeat in (1, 2):  # the second time no module is new
        launches.compile_ordered(lambda: (None, []), {launches.EARLY: True, "freezing": True})
        assert len(runs) == repeat * (1 if waits else 2)
        assert [run[launches.EARLY] for run in runs[-2:]] == ([True] * len(runs[-2:]) if waits else [True, False])
        assert all(run["freezing"] for run in runs)
    launches.compile_ordered(lambda: (None, []), {})
    assert runs[-1] == {}


def test_options_are_those_of_this_torch(monkeypatch):
    assert set(launches.available()) <= set(torch._inductor.list_options())
    monkeypatch.setattr(torch._inductor, "list_options", lambda: ["combo_kernels"])
    assert launches.available() == {"combo_kernels": True}
