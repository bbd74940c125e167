"""Models that other libraries have changed: adapters, weights in few bits."""

import pytest
import torch
from helpers import decode, generate, left_pad, prefill, tokens
from methods import AMPLE, by_all, quick_where
from tiny_models import build

import kvsparse_hf

NEW = 12
WEIGHTS = ("optimum.quanto", "torchao", "bitsandbytes")


def _prompts():
    return left_pad([tokens(30), tokens(17, seed=2)])


def _check(model, case):
    """Room for everything gives the dense answer, a small budget that of a row alone."""
    ids, mask = _prompts()
    out = [generate(model, ids, cache, NEW, attention_mask=mask) for cache in (case.dense(model), case.make(model, AMPLE))]
    assert torch.equal(*out)
    batch, alone, after = case.make(model), case.make(model), tokens(6, 2, seed=3)
    prefill(model, batch, ids, mask)
    prefill(model, alone, ids[1:, -17:])
    torch.testing.assert_close(decode(model, batch, after, mask)[1:], decode(model, alone, after[1:]), atol=5e-5, rtol=0)
    return out[0]


def _adapted():
    peft = pytest.importorskip("peft", reason="needs peft: pip install peft")
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "down_proj"]
    config = peft.LoraConfig(r=4, lora_alpha=32, target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM")
    return peft.get_peft_model(build(), config).eval()


@pytest.mark.feature("PEFT adapters")
@by_all
def test_a_peft_adapter(case):
    """Made on the wrapper or on the model within; switched off and on, and merged."""
    model = _adapted()
    with_adapter = _check(model, case)
    ids, mask = _prompts()
    with model.disable_adapter():
        assert not torch.equal(_check(model, case), with_adapter)
    assert torch.equal(generate(model, ids, case.make(model.get_base_model(), AMPLE), NEW, attention_mask=mask), with_adapter)
    with kvsparse_hf.use(model, lambda made: case.make(made, AMPLE)):
        assert torch.equal(generate(model, ids, None, NEW, attention_mask=mask), with_adapter)
    assert torch.equal(_check(model.merge_and_unload(), case), with_adapter)


def _four_bits(library: str):
    """The model with its linear layers, but for the head, in 4 bits."""
    module = pytest.importorskip(library, reason=f"needs {library}, which is not installed")
    model = build()
    if library == "optimum.quanto":
        module.quantize(model, weights=module.qint4, exclude="lm_head")
        module.freeze(model)
    elif library == "torchao":
        from torchao.quantization import IntxWeightOnlyConfig, PerGroup, quantize_

        quantize_(model.model, IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32)))
    else:
        for parent in list(model.model.modules()):
            for name, linear in list(parent.named_children()):
                if type(linear) is torch.nn.Linear:
                    coded = module.nn.Linear4bit(linear.in_features, linear.out_features, bias=False, compute_dtype=torch.float32)
                    coded.weight = module.nn.Params4bit(linear.weight.data, requires_grad=False, quant_type="nf4")
                    setattr(parent, name, coded.to("cpu"))
    return model


@pytest.mark.feature("weights in 4 bits (quanto, torchao, bitsandbytes)")
@pytest.mark.parametrize("case, library", quick_where(lambda case, library: False, WEIGHTS))  # quanto first compiles for a minute
def test_weights_in_four_bits(case, library):
    model = _four_bits(library)
    assert not torch.equal(_check(model, case), generate(build(), _prompts()[0], None, NEW, attention_mask=_prompts()[1]))
