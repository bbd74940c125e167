"""KVzip: scores against the whole attention matrix in fp64, one threshold, and a prefix that serves any continuation."""

import copy

import pytest
import torch
from head_oracles import spanned
from helpers import (
    decode,
    dense,
    forward,
    generate,
    kept_in_all_layers,
    left_pad,
    prefill,
    snapshot,
    storage_bytes,
    tensors_of,
    tokens,
)
from tiny_models import build
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from kvsparse_hf import BudgetError, KVzipCache, SparseCache, UnsupportedOperationError

SINKS, CHUNK, LEAD = 3, 16, 4


class Words:
    """A tokenizer that knows the requests alone."""

    chat_template = None

    def __call__(self, text, add_special_tokens=False):
        return {"input_ids": [90, 91] if "starting with" in text else [92, 93, 94] if text else []}


def replayed(row: torch.Tensor, start: int, words: bool) -> torch.Tensor:
    answer = row[start : start + CHUNK]
    if not words:
        lead = row[max(0, start - LEAD) : start]
        return torch.cat((lead, answer)) if start else answer
    return torch.cat((torch.tensor([90, 91]), row[start - LEAD : start], answer)) if start else torch.cat((torch.tensor([92, 93, 94]), answer))


def brute_force(model, row: torch.Tensor, words: bool) -> torch.Tensor:
    """`[L, H, N]` fp64: the replay runs densely after the prompt; its queries and keys are read from the model itself."""
    config, n = model.config, len(row)
    heads, group = config.num_key_value_heads, config.num_attention_heads // config.num_key_value_heads
    scores = torch.zeros(config.num_hidden_layers, heads, n, dtype=torch.float64)
    for start in range(0, n, CHUNK):
        again = replayed(row, start, words)
        caught = {}
        cache = dense(model)
        whole = torch.cat((row, again))[None]
        hooks = []
        for index, layer in enumerate(model.model.layers):
            def catch(module, args, kwargs, index=index, caught=caught):
                caught[index] = (kwargs["hidden_states"], kwargs["position_embeddings"])
            hooks.append(layer.self_attn.register_forward_pre_hook(catch, with_kwargs=True))
        forward(model, whole, cache)
        for hook in hooks:
            hook.remove()
        for index, layer in enumerate(model.model.layers):
            hidden, (cos, sin) = caught[index]
            q = layer.self_attn.q_proj(hidden).view(1, len(whole[0]), -1, config.head_dim).transpose(1, 2)
            q, _ = apply_rotary_pos_emb(q, q, cos, sin)
            keys = cache.layers[index].keys[0].double()
            end = min(start + CHUNK, n)
            at = sorted({*range(min(SINKS, start)), *range(start, end)})
            for head in range(heads):
                for t in range(n, len(whole[0])):
                    seen = at + list(range(n, t + 1))
                    for g in range(group):
                        logits = q[0, head * group + g, t].double() @ keys[head, seen].T * config.head_dim**-0.5
                        a = torch.softmax(logits, -1)
                        for j in range(start, end):
                            scores[index, head, j] = max(scores[index, head, j], a[seen.index(j)])
    return scores


@pytest.mark.parametrize("words", [False, True])
def test_kept_sets_against_brute_force(words):
    model = build(num_hidden_layers=2)
    rows = [tokens(40), tokens(19, seed=2)]
    ids, mask = left_pad(rows)
    cache = KVzipCache(model, budget=0.35, sinks=SINKS, chunk_size=CHUNK, lead=LEAD, reserve=2)
    cache.compress(model, {"input_ids": ids, "attention_mask": mask}, Words() if words else None)
    held = kept_in_all_layers(cache)
    for index, row in enumerate(rows):
        row = row[0]
        scores = brute_force(build(num_hidden_layers=2), row, words)
        scores[..., :SINKS] = float("inf")
        total = round(0.35 * len(row)) * 4
        best = scores.flatten().topk(total).indices
        want = torch.zeros(scores.numel(), dtype=torch.bool)
        want[best] = True
        want = want.view_as(scores)
        for layer in range(2):
            assert [list(head.nonzero().flatten().tolist()) for head in want[layer]] == held[layer][index]
    sizes = {len(head) for layer in held for head in layer[0]}
    assert len(sizes) > 1


def test_scoring_changes_nothing_and_a_second_compression_is_refused():
    """Length, contents and the next logits are those of the full cache until tokens are dropped."""
    model = build("gemma3")
    ids, mask = left_pad([tokens(40), tokens(19, seed=2)])
    mine, full = KVzipCache(model, budget=1.0, chunk_size=CHUNK), KVzipCache(model)
    prefill(model, mine, ids, mask)
    before = snapshot(mine)
    mine._drop = lambda *args: None
    mine.compress(model, {"input_ids": ids, "attention_mask": mask})
    assert int(mine.get_seq_length()) == 40
    after = snapshot(mine)
    assert all(torch.equal(before[key], after[key]) for key in before)
    prefill(model, full, ids, mask)
    assert torch.equal(decode(model, mine, tokens(6, 2), mask), decode(model, full, tokens(6, 2), mask))
    other = KVzipCache(model, budget=0.5)
    other.compress(model, ids, None)
    with pytest.raises(UnsupportedOperationError, match="compressed already"):
        other.compress(model, ids)


def test_before_compress_it_is_full_and_with_everything_kept_too():
    model = build()
    expected = generate(model, tokens(40), dense(model), 20)
    assert torch.equal(generate(model, tokens(40), KVzipCache(model, budget=0.1), 20), expected)
    cache = KVzipCache(model, budget=1.0)
    cache.compress(model, tokens(40))
    question = torch.cat((tokens(40), tokens(5, seed=8)), 1)
    assert torch.equal(generate(model, question, cache, 20), generate(model, question, dense(model), 20))


def test_one_prefix_serves_several_questions(tmp_path):
    """Forked, saved and loaded, repeated: all go on alike; later turns are added."""
    model = build()
    document = tokens(60)
    cache = KVzipCache(model, budget=0.3, chunk_size=CHUNK)
    cache.compress(model, document)
    cache.save(tmp_path)
    loaded = SparseCache.load(tmp_path, model)
    for seed in (7, 8):
        whole = torch.cat((document, tokens(6, seed=seed)), 1)
        want = generate(model, whole, cache.fork(), 10)
        assert torch.equal(generate(model, whole, copy.deepcopy(loaded), 10), want)
        twice = cache.fork()
        twice.batch_repeat_interleave(2)
        assert torch.equal(generate(model, whole.repeat(2, 1), twice, 10), want.repeat(2, 1))
    assert cache.report().kept == 18


def test_bytes_are_those_of_the_budget():
    model = build(num_hidden_layers=8)
    rows = [tokens(600), tokens(450, seed=2), tokens(300, seed=3), tokens(80, seed=4)]
    for chosen in (rows[:1], rows):
        ids, mask = left_pad(chosen)
        cache = KVzipCache(model, budget=0.25, chunk_size=300, reserve=1)
        cache.compress(model, {"input_ids": ids, "attention_mask": mask})
        entries = sum(round(0.25 * row.shape[1]) for row in chosen) * 8 * 2
        needed, tables = entries * (2 * 16 * 4 + 4), len(chosen) * 16 * 64
        held = storage_bytes(tensors_of(cache)) - cache.report().reserve_bytes
        assert needed <= held <= 1.02 * needed + tables
        assert cache.report().reserve_bytes <= len(chosen) * 16 * (2 * 16 * 4 + 4)
        assert sum(len(h) for layer in kept_in_all_layers(cache) for row in layer for h in row) == entries


@pytest.mark.parametrize("budget", ["40KiB", "123456B"])
def test_a_byte_budget_is_that_of_the_whole_cache(budget):
    allowed = {"40KiB": 40 * 1024, "123456B": 123456}[budget]
    for rows in ((700,), (700, 350)):
        ids, mask = left_pad([tokens(length, seed=length) for length in rows])
        model = build()
        cache = KVzipCache(model, budget=budget, reserve=1)
        cache.compress(model, {"input_ids": ids, "attention_mask": mask})
        report = cache.report()
        assert 0.5 * allowed <= report.device_bytes - report.reserve_bytes <= allowed + len(rows) * 4 * 64


def test_sending_the_whole_prompt_again_warns_and_reset_does_not(recwarn):
    model = build()
    cache = KVzipCache(model, budget=0.5)
    cache.compress(model, tokens(40))
    cache.reset()
    cache.compress(model, tokens(40))
    assert not [w for w in recwarn if "forgotten" in str(w.message)]
    with pytest.warns(UserWarning, match="forgotten"):
        answer = generate(model, tokens(40), cache, 5)
    assert torch.equal(answer, generate(model, tokens(40), dense(model), 5))


def test_system_tokens_stay_everywhere():
    model = build()
    cache = KVzipCache(model, budget=16, chunk_size=CHUNK)
    cache.compress(model, tokens(60), system_tokens=12)
    for layer in kept_in_all_layers(cache):
        for head in layer[0]:
            assert head[:12] == spanned(12, 12, 0)


def test_a_head_may_hold_nothing():
    """Without sinks the threshold may empty a head; decode goes on."""
    model = build(num_hidden_layers=4)
    cache = KVzipCache(model, budget=1, sinks=0, chunk_size=CHUNK)
    cache.compress(model, tokens(60))
    assert min(len(h) for layer in kept_in_all_layers(cache) for h in layer[0]) == 0
    assert decode(model, cache, tokens(4, seed=3)).isfinite().all()
    assert forward(model, tokens(5, seed=4), cache).isfinite().all()


def test_bad_input():
    model = build()
    with pytest.raises(BudgetError, match="always stay"):
        KVzipCache(model, budget=5).compress(model, tokens(60), system_tokens=9)
    cache = KVzipCache(model)
    forward(model, tokens(30), cache)
    with pytest.raises(UnsupportedOperationError, match="exactly what"):
        cache.compress(model, tokens(31))
    with pytest.raises(UnsupportedOperationError, match="num_hidden_layers"):
        cache.compress(build(num_hidden_layers=3), tokens(30))
    for budget in (0, 1.5, "12 apples"):
        with pytest.raises(BudgetError):
            KVzipCache(model, budget=budget)


def test_an_interrupted_replay_leaves_the_cache_as_it_was():
    model = build()
    cache = KVzipCache(model, chunk_size=CHUNK)

    def stop(done, of):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cache.compress(model, tokens(60), progress=stop)
    assert int(cache.get_seq_length()) == 60
    full = dense(model)
    forward(model, tokens(60), full)
    torch.testing.assert_close(decode(model, cache, tokens(5, seed=3)), decode(model, full, tokens(5, seed=3)), atol=1e-5, rtol=0)
