"""Options that cannot work are refused with a sentence that says why; those that look odd but work, work."""

import pytest
import torch
from token_driver import Driver, tiny_config
from transformers import LlamaForCausalLM

import kvsparse_hf
from kvsparse_hf import BudgetError, OptionError, UnsupportedOperationError, get_method
from kvsparse_hf.hf.compat import CACHE_ARGUMENT

METHODS = ["h2o", "scissorhands", "tova", "pyramidkv", "keydiff", "knorm", "expected-attention", "rkv"]
PERIODIC = ["snapkv", "pyramidkv", "keydiff", "knorm", "expected-attention", "rkv"]


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("h2o", dict(budget=10, sinks=4, recent=7)),
        ("h2o", dict(budget=10, sinks=6)),  # half of the budget is recent
        ("h2o", dict(budget=10, heavy=10)),
        ("h2o", dict(budget=10, heavy=6, sinks=4)),
        ("h2o", dict(budget=10, heavy=6, recent=5)),
        ("h2o", dict(budget=10, heavy=2, recent=5)),
        ("h2o", dict(budget=0)),
        ("scissorhands", dict(budget=10)),  # the paper's 10 recent tokens leave nothing to drop
        ("scissorhands", dict(budget=20, sinks=10)),
        ("scissorhands", dict(budget=16, recent=10, layer_weights=[1, 1, 4, 4])),
        ("tova", dict(budget=4, sinks=3, recent=2)),
        ("snapkv", dict(budget=10, window=8, sinks=3)),
        ("pyramidkv", dict(budget=10, window=8, sinks=3)),
        ("pyramidkv", dict(budget=10, recent=11)),
        ("keydiff", dict(budget=4, sinks=3, recent=2)),
        ("knorm", dict(budget=4, recent=5)),
        ("expected-attention", dict(budget=3)),  # four sinks
        ("rkv", dict(budget=10, window=8, sinks=3)),
    ],
    ids=str,
)
def test_what_must_stay_exceeds_the_budget(method, options):
    with pytest.raises(BudgetError):
        get_method(method)(tiny_config(layers=4), **options)


@pytest.mark.parametrize(
    ("method", "options", "says"),
    [
        ("h2o", dict(decay=-0.5), "decay"),
        ("h2o", dict(decay=0.0), "decay"),
        ("h2o", dict(decay=1.5), "decay"),
        ("h2o", dict(normalize="age"), "normalize"),
        ("h2o", dict(recent=0), "recent"),
        ("h2o", dict(budget=0.5, heavy=3), "heavy"),
        ("h2o", dict(positions="cache"), "positions"),
        ("h2o", dict(backend="flash"), "flash"),
        ("h2o", dict(decode="grow"), "decode"),
        ("tova", dict(positions="cache"), "positions"),
        ("scissorhands", dict(window=0), "window"),
        ("scissorhands", dict(window=-400), "window"),
        ("scissorhands", dict(drop=0.0), "drop"),
        ("scissorhands", dict(drop=1.0), "drop"),
        ("scissorhands", dict(layer_weights=[1, 2]), "layer_weights"),
        ("scissorhands", dict(layer_weights=[1, 0, 1, 1]), "positive"),
        ("scissorhands", dict(positions="cache"), "positions"),
        ("pyramidkv", dict(beta=0), "beta"),
        ("pyramidkv", dict(kernel=4), "odd"),
        ("keydiff", dict(block=0), "block"),
        ("knorm", dict(skip_layers=[4]), "skip_layers"),
        ("expected-attention", dict(future=0), "future"),
        ("expected-attention", dict(epsilon=-1.0), "epsilon"),
        ("rkv", dict(balance=1.1), "balance"),
        ("rkv", dict(balance=-0.1), "balance"),
        ("rkv", dict(kernel=2), "odd"),
        ("rkv", dict(recompress_every=7), "window"),
        ("snapkv", dict(recompress_every=31), "window"),
        ("pyramidkv", dict(recompress_every=7), "window"),
        ("snapkv", dict(recompress_every=0), "recompress_every"),
        ("snapkv", dict(recompress_every=64, decode="bounded"), "bounded"),
        ("knorm", dict(recompress_every=64, decode="bounded"), "bounded"),
        ("keydiff", dict(recompress_every=64, positions="cache"), "positions"),
        ("keydiff", dict(decode="bounded", positions="cache"), "positions"),
        ("rkv", dict(positions="cache"), "positions"),
        ("rkv", dict(recompress_evry=64), "recompress_every"),
    ],
    ids=str,
)
def test_impossible_options(method, options, says):
    with pytest.raises(OptionError, match=says):
        get_method(method)(tiny_config(layers=4), **options)


@pytest.mark.parametrize("method", PERIODIC)
@pytest.mark.parametrize("length", [1, 3, 9])
def test_window_longer_than_the_prompt_works(method, length):
    options = {} if method in ("keydiff", "knorm", "expected-attention") else {"window": 16}
    driver = Driver(get_method(method)(tiny_config(), budget=20, recompress_every=16, **options))
    driver.feed(length)
    assert driver.kept() == [list(range(length))] * 2
    for _ in range(60):
        driver.feed(1)
    assert max(len(head) for head in driver.kept()) <= 20 + 16


@pytest.mark.parametrize("method", ["pyramidkv", "keydiff", "knorm", "expected-attention"])
def test_cache_positions_where_keys_move_once(method):
    """Compressed once, so that each kept key moves once: the same tokens stay, and the model still runs."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(tiny_config(layers=2)).eval()
    ids = torch.randint(0, 16, (1, 60))
    kept = []
    for positions in ("original", "cache"):
        cache = get_method(method)(model, budget=20, positions=positions)
        model(ids, **{CACHE_ARGUMENT: cache})
        kept.append([layer.store.positions[: 2 * 20].tolist() for layer in cache.sparse_layers])
        assert torch.isfinite(model(ids[:, :1], **{CACHE_ARGUMENT: cache}).logits).all()
    assert kept[0] == kept[1]


@pytest.mark.parametrize("method", METHODS)
def test_only_announced_drafts_can_be_taken_back(method):
    """What was decoded cannot; drafts are held back until they are verified."""
    options = {"recent": 2} if method == "scissorhands" else {}
    cache = get_method(method)(tiny_config(), budget=12, **options)
    assert not cache.is_croppable
    cache.activate_past_recording()
    assert cache.is_croppable


@pytest.mark.parametrize("method", ["h2o", "scissorhands", "tova", "rkv"])
def test_tokens_cannot_be_taken_back(method):
    options = {"recent": 2} if method == "scissorhands" else {}
    cache = get_method(method)(tiny_config(), budget=12, **options)
    driver = Driver(cache)
    driver.feed(20)
    driver.feed(1)
    with pytest.raises(UnsupportedOperationError):
        cache.crop(-1)


@pytest.mark.parametrize("method", METHODS)
def test_facts_for_the_method_table(method):
    cls = get_method(method)
    assert cls.paper.startswith("arXiv ") and cls.action == "evict" and cls.needs
    assert cls.prefix_safe == (method in ("keydiff", "knorm", "expected-attention"))
    assert cls.__name__ in kvsparse_hf.__all__


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("budget", [0.25, "64KiB"])
def test_budgets_of_the_other_forms(method, budget):
    """A share is one of each row's own prompt; bytes include what the method remembers."""
    cache = get_method(method)(tiny_config(), budget=budget, reserve=1)
    driver = Driver(cache, pads=(0, 160))
    driver.feed(400)
    store = driver.held.store
    if budget == 0.25:
        assert store.length.tolist() == [[100, 100], [60, 60]]
    else:
        full = sum(t.untyped_storage().nbytes() for name, t in driver.held.tensors().items())
        spare = driver.held.reserve_bytes() if method in PERIODIC else 0
        assert full - spare <= 65536
        assert int(store.length.min()) >= 100


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("share", [0.01, 0.1])
@pytest.mark.parametrize("more", [{}, {"decode": "bounded"}, {"recompress_every": 9}], ids=str)
def test_shares_too_small_for_what_must_stay(method, share, more):
    """A share of a short prompt may be less than sinks and recents."""
    if not more.keys() <= get_method(method).Options.model_fields.keys():
        pytest.skip("no such option")
    driver = Driver(get_method(method)(tiny_config(), budget=share, **more), pads=(0, 3, 9))
    for tokens in (10, *[1] * 25, 5, 1, 1):
        driver.feed(tokens)
        for row in range(3):
            kept = driver.kept(row)
            assert all(kept)
            if tokens == 1:
                assert all(head[-1] == driver.rows[row].length - 1 for head in kept), "a step reads at least its own token"
            if more == {"decode": "bounded"} or method in ("h2o", "tova", "scissorhands"):
                assert max(len(head) for head in kept) <= max(1, round(share * driver.rows[row].length))
