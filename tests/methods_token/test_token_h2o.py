"""H2O against its rule in fp64: what each step reads, what stays, what is remembered."""

import pytest
import torch
from token_driver import SCALE, Driver, tiny_config
from token_oracles import H2O, causal, group

from kvsparse_hf import H2OCache
from kvsparse_hf.policy.base import Candidates
from kvsparse_hf.policy.received import received_attention

STEPS = 200


def check_run(driver: Driver, oracles: list[list[H2O]], prompt: int, steps: int, tolerance: float = 1e-4) -> None:
    """`oracles[row][head]`; rows may be padded."""
    given = [prompt - pad for pad in driver.pads]
    for row, heads in enumerate(oracles):
        for oracle in heads:
            oracle.prompt(given[row])
        # The layer still holds the token that the first decoded one will replace.
        for oracle, kept in zip(heads, driver.kept(row), strict=True):
            assert set(oracle.kept) <= set(kept) and len(kept) == min(given[row], oracle.size + 1)
    for step in range(steps):
        out = driver.feed(1)
        for row, heads in enumerate(oracles):
            t = given[row] + step
            for head, oracle in enumerate(heads):
                read = oracle.step(t)
                assert driver.kept(row)[head] == read, (row, head, step)
                part = group(driver.rows[row], head)
                logits = driver.rows[row].q[part, t].double() @ driver.rows[row].k[head, read].double().T * oracle.scale
                exact = torch.softmax(logits, -1) @ driver.rows[row].v[head, read].double()
                assert torch.allclose(out[row, 0, part].double(), exact, atol=1e-4)
    for row, heads in enumerate(oracles):
        for head, oracle in enumerate(heads):
            remembered = driver.remembered("received", row, head)
            for position, score in oracle.score.items():
                assert float(remembered[position]) == pytest.approx(score, rel=tolerance, abs=1e-6)


def oracles_of(driver: Driver, **options) -> list[list[H2O]]:
    return [[H2O(row, head, SCALE, **options) for head in range(driver.kv_heads)] for row in driver.rows]


@pytest.mark.parametrize("heads", [(2, 2), (4, 1), (8, 1), (8, 2)], ids=str)
def test_200_steps(heads):
    driver = Driver(H2OCache(tiny_config(*heads), budget=24))
    driver.feed(60)
    check_run(driver, oracles_of(driver, heavy=12, recent=12), 60, STEPS)


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        (dict(recent=4), dict(heavy=20, recent=4)),
        (dict(heavy=4, sinks=3), dict(heavy=4, recent=17, sinks=3)),
        (dict(normalize="count", recent=6), dict(heavy=18, recent=6, normalize=True)),
        (dict(decay=0.9, recent=6), dict(heavy=18, recent=6, decay=0.9)),
        (dict(decay=0.9, normalize="count", recent=6, sinks=2), dict(heavy=16, recent=6, sinks=2, decay=0.9, normalize=True)),
        (dict(heavy=23), dict(heavy=23, recent=1)),
    ],
    ids=lambda value: str(value) if "budget" not in value else "",
)
def test_options_and_padding(options, rule):
    """Every row of a padded batch does what the row alone would; one is shorter than the budget."""
    driver = Driver(H2OCache(tiny_config(), budget=24, **options), pads=(0, 13, 45))
    driver.feed(60)
    check_run(driver, oracles_of(driver, **rule), 60, 60)


@pytest.mark.parametrize("length", [1, 2, 22, 23, 24, 25, 26])
def test_prompts_around_the_budget(length):
    """A prompt within the budget is left untouched; the first eviction comes with the token that does not fit."""
    driver = Driver(H2OCache(tiny_config(), budget=24, reserve=2))
    driver.feed(length)
    assert driver.kept() == [list(range(length))] * 2 or length > 24
    check_run(driver, oracles_of(driver, heavy=12, recent=12), length, 40)


@pytest.mark.parametrize("budget", [1, 2, 3])
def test_tiny_budgets(budget):
    driver = Driver(H2OCache(tiny_config(), budget=budget, recent=1))
    driver.feed(9)
    check_run(driver, oracles_of(driver, heavy=budget - 1, recent=1), 9, 20)


def test_scores_survive_turns_and_chunks():
    """Chunks of a prompt and later turns: survivors keep what they received, newcomers start from 0."""
    driver = Driver(H2OCache(tiny_config(), budget=24))
    driver.feed(30)
    oracles = oracles_of(driver, heavy=12, recent=12)[0]
    for oracle in oracles:
        oracle.prompt(30)
    seen = 30
    for tokens in (17, 1, 1, 1, 9, 40, 1, 1):
        # A multi-token forward attends to all that is held, which includes the token about to be replaced.
        for head, oracle in enumerate(oracles):
            if tokens > 1:
                spare = set(driver.kept()[head]) - set(oracle.kept)
                memory = driver.remembered("received", 0, head)
                oracle.score |= {j: float(memory[j]) for j in spare}
        driver.feed(tokens)
        for head, oracle in enumerate(oracles):
            if tokens == 1:
                assert driver.kept()[head] == oracle.step(seen)
            else:
                oracle.turn(seen, seen + tokens)
                assert set(oracle.kept) <= set(driver.kept()[head])
            remembered = driver.remembered("received", 0, head)
            assert all(float(remembered[j]) == pytest.approx(s, rel=1e-4) for j, s in oracle.score.items())
        seen += tokens


@pytest.mark.parametrize("decay", [1.0, 0.95])
def test_chunked_prompt_remembers_what_one_shot_does(decay):
    """Within the budget nothing is dropped, so the sums of all queries must not depend on the chunks."""
    whole = Driver(H2OCache(tiny_config(), budget=100, decay=decay), pads=(0, 7))
    parts = Driver(H2OCache(tiny_config(), budget=100, decay=decay), pads=(0, 7))
    q, k, v = whole.random(50)
    whole.feed(50, (q, k, v))
    for first, last in ((0, 20), (20, 21), (21, 50)):
        parts.feed(last - first, (q[:, :, first:last], k[:, :, first:last], v[:, :, first:last]))
    for row in range(2):
        for head in range(2):
            a, b = whole.remembered("received", row, head), parts.remembered("received", row, head)
            assert a.keys() == b.keys()
            assert all(float(a[j]) == pytest.approx(float(b[j]), rel=1e-4) for j in a)


def test_no_heavy_hitters_is_a_recency_window():
    driver = Driver(H2OCache(tiny_config(), budget=10, heavy=0))
    driver.feed(30)
    for step in range(40):
        driver.feed(1)
        assert driver.kept() == [list(range(21 + step, 31 + step))] * 2


def test_ties_keep_the_earlier_token():
    """The first token takes all attention, exactly; the others tie at 0."""
    driver = Driver(H2OCache(tiny_config(1, 1), budget=6, recent=2))
    q, k, v = (torch.zeros_like(t) for t in driver.random(12))
    q[..., 0], k[:, :, 0, 0] = 30.0, 100.0
    driver.feed(12, (q, k, v))
    assert driver.kept()[0] == [0, 1, 2, 3, 10, 11]
    for step in range(4):
        driver.feed(1, (q[:, :, 1:2], k[:, :, 1:2], v[:, :, 1:2]))
        # the tied newcomer of one step before loses against the earlier ones
        assert driver.kept()[0] == [0, 1, 2, 3, 11 + step, 12 + step]


def test_protected_by_index_when_all_scores_are_equal():
    driver = Driver(H2OCache(tiny_config(1, 1), budget=8, sinks=2, recent=3, normalize="count", decay=0.5))
    zeros = [torch.zeros_like(t) for t in driver.random(20)]
    driver.feed(20, tuple(zeros))
    for step in range(30):
        kept = driver.kept()[0]
        assert kept[:2] == [0, 1] and kept[-3:] == [17 + step, 18 + step, 19 + step]
        driver.feed(1, tuple(t[:, :, :1] for t in zeros))


@pytest.mark.parametrize("pad", [0, 5])
@pytest.mark.parametrize("sinks", [False, True])
def test_column_sums_equal_the_dense_matrix(pad, sinks):
    driver = Driver(H2OCache(tiny_config(4, 2), budget=64))
    q, k, v = driver.random(40)
    extra = torch.randn(4) if sinks else None
    candidates = Candidates(
        q, k, v, (torch.arange(40) - pad).expand(1, 2, -1), torch.full((1, 2), pad), SCALE, 0.0, extra, 0, 1
    )
    got = received_attention(candidates, 1.0, "mean", "auto")[0]
    for head in range(2):
        a = causal(q[0, 2 * head : 2 * head + 2, pad:], k[0, head, pad:], SCALE)
        if sinks:
            logits = q[0, 2 * head : 2 * head + 2, pad:].double() @ k[0, head, pad:].double().T * SCALE
            n = 40 - pad
            total = logits.masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf).exp().sum(-1)
            a = a * (total / (total + extra[2 * head : 2 * head + 2].double().exp()[:, None]))[..., None]
        assert torch.allclose(got[head, pad:].double(), a.sum(1).mean(0), atol=1e-5)
        assert not got[head, :pad].any()


def test_query_heads_of_a_group_commute():
    """Permuting query heads inside a group changes nothing; `h mod H` as the map would."""
    runs = []
    for order in ([0, 1, 2, 3], [1, 0, 3, 2]):
        driver = Driver(H2OCache(tiny_config(4, 2), budget=16))
        q, k, v = driver.random(90)
        q = q[:, order]
        driver.feed(40, (q[:, :, :40], k[:, :, :40], v[:, :, :40]))
        for t in range(40, 90):
            driver.feed(1, tuple(x[:, :, t : t + 1] for x in (q, k, v)))
        runs.append(driver.kept())
    assert runs[0] == runs[1]
    driver = Driver(H2OCache(tiny_config(4, 2), budget=16))
    q, k, v = driver.random(90)
    driver.feed(40, (q[:, [0, 2, 1, 3], :40], k[:, :, :40], v[:, :, :40]))
    for t in range(40, 90):
        driver.feed(1, (q[:, [0, 2, 1, 3], t : t + 1], k[:, :, t : t + 1], v[:, :, t : t + 1]))
    assert driver.kept() != runs[0]


def test_decoded_tokens_become_heavy_hitters():
    """A decoded token that every later query looks at stays when scores are counted per query that could see it. Summed
    scores favour age: there the prompt's tokens, each looked at a little by many, push it out."""
    kept = {}
    for normalize in ("count", "none"):
        driver = Driver(H2OCache(tiny_config(1, 1), budget=32, recent=2, normalize=normalize), spread=0.0)
        q, k, v = driver.random(400)
        q[..., 0], k[..., 0] = 1.0, 0.0
        star = 405
        driver.feed(400, (q, k, v))
        for t in range(400, 440):
            q, k, v = (x[:, :, :1].clone() for x in driver.random(1))
            q[..., 0], k[..., 0] = 1.0, 8.0 if t == star else 0.0
            driver.feed(1, (q, k, v))
        kept[normalize] = driver.kept()[0]
    assert 405 in kept["count"]
    assert all(position < 31 or position >= 438 for position in kept["none"])


def test_bf16_models_keep_fp32_sums():
    """Each query adds about 0.01 to a token; a bf16 sum stands still from 4 on, where its spacing is 0.03."""
    driver = Driver(H2OCache(tiny_config(1, 1), budget=128, recent=4), spread=0.0, dtype=torch.bfloat16)
    driver.feed(96)
    for _ in range(600):
        driver.feed(1)
    row = driver.rows[0]
    oracle = H2O(row, 0, SCALE, heavy=124, recent=4)
    oracle.prompt(96)
    for t in range(96, 696):
        oracle.step(t)
    remembered = driver.remembered("received", 0, 0)
    store = driver.held.store
    assert store.keys.dtype == torch.bfloat16 and store.extra["received"].dtype == torch.float32
    assert all(float(remembered[j]) == pytest.approx(s, rel=1e-4) for j, s in oracle.score.items())
    half = torch.zeros((), dtype=torch.bfloat16)
    for t in range(696):
        half = half + torch.tensor(1.0 / min(t + 1, 128), dtype=torch.bfloat16)
    assert float(half) < 0.9 * oracle.score[0]  # what a bf16 sum makes of the same addends
