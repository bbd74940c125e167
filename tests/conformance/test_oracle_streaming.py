"""StreamingLLM against the paper's arithmetic: unrotated keys, rotated at every step by their place in the cache."""

import pytest
import torch
from helpers import decode, dense, forward, generate, kept_in_all_layers, left_pad, prefill, tokens
from oracle import OracleLlama, evict_streaming, keep_streaming
from tiny_models import build

from kvsparse_hf import StreamingLLMCache

SCALED = {
    "default": None,
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 64, "rope_theta": 10000.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
}


def _model(rope: str = "default", name: str = "llama-gqa2"):
    return build(name) if SCALED[rope] is None else build(name, rope_parameters=dict(SCALED[rope]))


def _oracle(model, budget, sinks, positions):
    keep = keep_streaming(sinks, budget)
    return OracleLlama(model, keep, keep, evict_streaming(sinks), budget, positions == "cache")


def _conversation(model, mine, oracle, prompt, tolerance=1e-4):
    """Prompt, steps, a later turn, steps: the same logits and tokens at every point."""
    for part, by_one in ((prompt, False), (tokens(25, seed=3), True), (tokens(7, seed=4), False), (tokens(25, seed=5), True)):
        if by_one:
            got = decode(model, mine, part)[0]
            expected = torch.cat([oracle.forward(token.view(1)) for token in part[0]])
        else:
            got, expected = forward(model, part, mine)[0], oracle.forward(part[0])
        torch.testing.assert_close(got.double(), expected, atol=tolerance, rtol=0)
        assert [layer[0] for layer in kept_in_all_layers(mine)] == [layer.positions.tolist() for layer in oracle.layers]


@pytest.mark.parametrize("positions", ["cache", "original"])
@pytest.mark.parametrize("rope", SCALED)
def test_a_conversation(rope, positions):
    model = _model(rope)
    _conversation(model, StreamingLLMCache(model, budget=16, positions=positions), _oracle(model, 16, 4, positions), tokens(50))


@pytest.mark.parametrize("positions", ["cache", "original"])
@pytest.mark.parametrize("name", ["llama-mha", "llama-gqa4", "llama-mqa8"])
def test_groups(name, positions):
    model = _model(name=name)
    _conversation(model, StreamingLLMCache(model, budget=16, positions=positions), _oracle(model, 16, 4, positions), tokens(50))


@pytest.mark.parametrize("length", [1, 3, 4, 5, 15, 16, 17])
@pytest.mark.parametrize("sinks", [0, 1, 4, 14])
def test_edges(length, sinks):
    """Prompts around the sinks and the budget: the sinks fill up from later tokens, then the ring starts."""
    model = _model()
    _conversation(model, StreamingLLMCache(model, budget=16, sinks=sinks), _oracle(model, 16, sinks, "cache"), tokens(length))


def test_the_two_numberings_differ_once_something_is_gone():
    model = _model()
    out = []
    for positions in ("cache", "original"):
        mine = StreamingLLMCache(model, budget=16, positions=positions)
        forward(model, tokens(50), mine)
        out.append(decode(model, mine, tokens(4, seed=3)))
    assert (out[0] - out[1]).abs().max() > 1e-2


def test_yarn_scaling_is_not_applied_twice():
    """YaRN scales cos and sin; the keys already carry it when they are moved."""
    model = _model("yarn")
    assert abs(model.model.rotary_emb.attention_scaling - 1) > 0.05
    mine, oracle = StreamingLLMCache(model, budget=16), _oracle(model, 16, 4, "cache")
    forward(model, tokens(50), mine)
    oracle.forward(tokens(50)[0])
    norms = mine.sparse_layers[0].store.keys.norm(dim=-1)
    decode(model, mine, tokens(100, seed=3))
    torch.testing.assert_close(mine.sparse_layers[0].store.keys.norm(dim=-1)[:4], norms[:4], atol=1e-4, rtol=0)


def test_many_steps_do_not_drift():
    """300 evictions move the sinks 300 times; each move starts from the key as the model made it."""
    model = _model()
    mine, oracle = StreamingLLMCache(model, budget=10), _oracle(model, 10, 4, "cache")
    forward(model, tokens(20), mine)
    oracle.forward(tokens(20)[0])
    after = tokens(300, seed=3)
    got = decode(model, mine, after)[0]
    expected = torch.cat([oracle.forward(token.view(1)) for token in after[0]])
    torch.testing.assert_close(got.double(), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 0.3), (torch.float16, 0.06)], ids=str)
def test_half_precision_does_not_drift(dtype, tolerance):
    """After 150 moves of the sinks the error is that of the same model with keys that never move."""
    model, after, late = build(dtype=dtype), tokens(150, seed=3), {}
    for positions in ("cache", "original"):
        mine, oracle = StreamingLLMCache(model, budget=10, positions=positions), _oracle(model, 10, 4, positions)
        forward(model, tokens(20), mine)
        oracle.forward(tokens(20)[0])
        expected = torch.cat([oracle.forward(token.view(1)) for token in after[0]])
        error = (decode(model, mine, after)[0].double() - expected).abs().amax(-1)
        assert error.max() < tolerance
        late[positions] = error[-50:].median()
    assert late["cache"] < 2 * late["original"]


@pytest.mark.parametrize("positions", ["cache", "original"])
def test_padded_rows(positions):
    model = _model()
    rows = [tokens(50), tokens(21, seed=2), tokens(2, seed=6)]
    ids, mask = left_pad(rows)
    mine = StreamingLLMCache(model, budget=16, positions=positions)
    prefill(model, mine, ids, mask)
    after = tokens(25, 3, seed=3)
    got = decode(model, mine, after, mask)
    for index, row in enumerate(rows):
        oracle = _oracle(model, 16, 4, positions)
        oracle.forward(row[0])
        expected = torch.cat([oracle.forward(token.view(1)) for token in after[index]])
        torch.testing.assert_close(got[index].double(), expected, atol=1e-4, rtol=0)


def test_token_by_token_as_in_the_paper():
    """The paper's evaluation feeds one token at a time: every query sees only what the cache holds."""
    model = _model()
    mine, oracle = StreamingLLMCache(model, budget=12), _oracle(model, 12, 4, "cache")
    ids = tokens(60)
    got = decode(model, mine, ids)[0]
    expected = torch.cat([oracle.forward(token.view(1)) for token in ids[0]])
    torch.testing.assert_close(got.double(), expected, atol=1e-4, rtol=0)
    assert not torch.allclose(got, forward(model, ids)[0], atol=0.1)


@pytest.mark.parametrize("chunk", [5, 8, 16])
def test_chunks_see_what_the_cache_kept(chunk):
    model = _model()
    mine, oracle = StreamingLLMCache(model, budget=12), _oracle(model, 12, 4, "cache")
    ids = tokens(40)
    answer = generate(model, ids, mine, 5, prefill_chunk_size=chunk)
    logits = [oracle.forward(part)[-1:] for part in ids[0].split(chunk)][-1:]
    logits += [oracle.forward(token.view(1)) for token in answer[0, :-1]]
    assert torch.cat(logits).argmax(-1).tolist() == answer[0].tolist()


@pytest.mark.parametrize("name", ["phi3-partial", "gpt-neox", "qwen3", "gemma3", "qwen3-moe", "gpt-oss"])
def test_other_rotary_layouts(name):
    """Partial rotary, QK norm, another layout: moving a key equals the model's own key at the later position.

    The sinks are moved by the number of evicted tokens, so they must be what the model makes of the same token there.
    """
    model = build(name)
    mine = StreamingLLMCache(model, budget=12)
    raw = StreamingLLMCache(model, budget=12, positions="original")
    ids, gone = tokens(30), 30 - 12
    forward(model, ids, mine)
    forward(model, ids, raw)
    first = mine.sparse_layers[0].layer_idx
    captured = dense(model)
    forward(model, ids, captured, position_ids=torch.arange(gone, gone + 30)[None])
    # Rotary attention is relative, so the shifted prompt has the same hidden states in every layer.
    shifted = captured.layers[first].keys[:, :, :4]
    heads = shifted.shape[1]
    store, plain = mine.sparse_layers[0].store, raw.sparse_layers[0].store
    for head in range(heads):
        at = int(store.start[0, head])
        torch.testing.assert_close(store.keys[at:at + 4], shifted[0, head], atol=2e-5, rtol=0)
        assert not torch.allclose(store.keys[at:at + 4], plain.keys[at:at + 4], atol=1e-3)
        torch.testing.assert_close(store.keys[at + 4:at + 12], plain.keys[at + 4:at + 12], atol=0, rtol=0)
