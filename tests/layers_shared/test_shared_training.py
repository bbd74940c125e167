"""Training with shared keys and values: gradients, what is refused, and checkpoints that carry the map."""

import copy

import pytest
import torch
import transformers
from helpers import CACHE, dense, forward, generate, left_pad, positions, storage_bytes, tensors_of, tokens
from shared_oracle import in_groups, shared_forward, yoco_map, yoco_windows
from tiny_models import build

from kvsparse_hf import CLACache, FullCache, OptionError, UnsupportedOperationError, YOCOCache, load_preset

LAYERS, WINDOW = 4, 5
CASES = {
    "cla": (lambda model: CLACache(model, factor=2), in_groups(LAYERS, 2), None),
    "yoco": (lambda model: YOCOCache(model, window=WINDOW), yoco_map(LAYERS), yoco_windows(LAYERS, WINDOW)),
}
by_case = pytest.mark.parametrize("case", CASES)


def _model(**options):
    return build(num_hidden_layers=LAYERS, initializer_range=0.15, **options)


def _gradients(model, loss) -> dict[str, torch.Tensor | None]:
    model.zero_grad(set_to_none=True)
    loss.backward()
    return {name: None if weight.grad is None else weight.grad.clone() for name, weight in model.named_parameters()}


@by_case
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_gradients_are_those_of_the_modules(case, attention):
    """Of a padded batch with a fresh cache: they reach the owner's projections from all readers, and no reader's own."""
    make, sources, windows = CASES[case]
    model = _model(attention=attention).train()
    ids, mask = left_pad([tokens(20), tokens(13, seed=2)])
    labels = ids.masked_fill(mask.cumsum(-1) < 2, -100)  # nothing is predicted from padding
    with torch.enable_grad():
        inputs = dict(input_ids=ids, attention_mask=mask, position_ids=positions(mask), labels=labels)
        got = _gradients(model, model(**inputs, **{CACHE: make(model)}).loss)
        logits, _ = shared_forward(model, ids, sources, mask, windows)
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        expected = _gradients(model, loss)
    for name, gradient in expected.items():
        if gradient is None:
            assert got[name] is None or not got[name].any(), name
        else:
            torch.testing.assert_close(got[name], gradient, atol=1e-5, rtol=1e-4, msg=name)
    reader = f"model.layers.{LAYERS - 1}.self_attn.k_proj.weight"
    owner = f"model.layers.{sources[-1]}.self_attn.k_proj.weight"
    assert expected[reader] is None and got[owner].abs().max() > 0


@by_case
def test_a_step_of_training_lowers_the_loss(case):
    make, model = CASES[case][0], _model().train()
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.05), []
    with torch.enable_grad():
        for _ in range(5):
            loss = model(input_ids=tokens(16, 4), labels=tokens(16, 4), **{CACHE: make(model)}).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]


@by_case
def test_a_trained_model_refuses_to_run_without_its_map(case):
    make, model = CASES[case][0], _model()
    untouched = forward(model, tokens(9), use_cache=False)
    mine = make(model)
    assert torch.equal(forward(model, tokens(9), use_cache=False), untouched)  # an unmarked model runs as it did
    mine.mark(model)
    for run in (
        lambda: forward(model, tokens(9), use_cache=False),
        lambda: forward(model, tokens(9)),
        lambda: forward(model, tokens(9), dense(model)),
        lambda: generate(model, tokens(9), None, 3),
    ):
        with pytest.raises(UnsupportedOperationError, match="use_cache=False"):
            run()
    model.train()
    checkpoint = "activation_checkpointing" if hasattr(model, "activation_checkpointing_enable") else "gradient_checkpointing"
    getattr(model, f"{checkpoint}_enable")()
    with torch.enable_grad(), pytest.raises(UnsupportedOperationError, match="gradient checkpointing"):
        model(input_ids=tokens(9), labels=tokens(9), **{CACHE: make(model)})
    getattr(model, f"{checkpoint}_disable")()
    generate(model.eval(), tokens(9), make(model), 3)


@by_case
def test_checkpoints_carry_the_map(case, tmp_path):
    make, model = CASES[case][0], _model()
    mine = make(model)
    mine.mark(model)
    expected = generate(model, tokens(20), mine, 12)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    again = load_preset(case, loaded)
    assert again.layer_map == mine.layer_map and again.window() == mine.window()
    assert torch.equal(generate(loaded, tokens(20), again, 12), expected)
    with pytest.raises(UnsupportedOperationError, match="fresh one"):
        forward(loaded, tokens(9), use_cache=False)
    other = copy.deepcopy(loaded)
    wrong = dict(cla=lambda: CLACache(other, factor=3), yoco=lambda: YOCOCache(other, window=WINDOW + 1))
    with pytest.raises(OptionError, match="was trained with"):
        wrong[case]()
    with pytest.raises(UnsupportedOperationError, match="was trained"):
        FullCache(other)
    assert other.config._attn_implementation == loaded.config._attn_implementation


@by_case
def test_a_training_forward_keeps_nothing(case):
    """Neither tensors nor a graph; a second step with the same cache is refused, after `reset()` it is a fresh one."""
    make, model = CASES[case][0], _model().train()
    mine = make(model)
    with torch.enable_grad():
        loss = model(input_ids=tokens(16, 2), labels=tokens(16, 2), **{CACHE: mine}).loss
        small = 1024  # clocks and padding
        assert storage_bytes(tensors_of(mine)) < small
        for length in (1, 4):
            with pytest.raises(UnsupportedOperationError, match="fresh one"):
                forward(model, tokens(length, 2), mine)
        mine.reset()
        again = model(input_ids=tokens(16, 2), labels=tokens(16, 2), **{CACHE: mine}).loss
    assert float(loss.detach()) == float(again.detach())
    mine.reset()
    model.eval()
    assert torch.equal(generate(model, tokens(9), mine, 4), generate(model, tokens(9), make(model), 4))
