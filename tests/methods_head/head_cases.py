"""One setting of every head-level method for the tests that take all of them."""

import torch

import kvsparse_hf

CASES = {
    "adakv": ("adakv", dict(window=4, kernel=3)),
    "adakv-official": ("adakv", dict(window=4, kernel=3, formula="official")),
    "adakv-bounded": ("adakv", dict(window=4, kernel=3, decode="bounded")),
    "adakv-periodic": ("adakv", dict(window=4, kernel=3, recompress_every=12)),
    "adakv-cachepos": ("adakv", dict(window=4, kernel=3, positions="cache")),
    "adakv-pyramid": ("adakv", dict(window=4, kernel=3, scorer="pyramidkv", beta=2)),
    "adakv-expected": ("adakv", dict(scorer="expected-attention", recent=2)),
    "headkv": ("headkv", dict(window=4, kernel=3)),
    "duo-attention": ("duo-attention", dict(sinks=2, recent=6)),
    "moa": ("moa", dict(sinks=2, minimum=4, multiple=2, new_tokens=30)),
    "kvzip": ("kvzip", dict(chunk_size=16)),
}
BUDGETED = ("adakv", "headkv", "kvzip")


def rules_for(config) -> dict:
    """Spans that differ between layers and heads."""
    layers, heads = config.num_hidden_layers, config.num_attention_heads
    betas = [[0.1 + 0.1 * ((layer + head) % 3) for head in range(heads)] for layer in range(layers)]
    return {"alphas": [[2.0 * head for head in range(heads)] for _ in range(layers)], "betas": betas}


def make(name: str, model, budget=24, **more):
    method, options = CASES[name]
    config = model.config
    shape = (config.num_hidden_layers, config.num_key_value_heads)
    options = {**options, **more}
    if method in BUDGETED:
        options["budget"] = budget
    if method == "headkv":
        options["table"] = (torch.arange(shape[0] * shape[1]).double().view(shape) + 1) ** 2
    if method == "duo-attention":
        options["pattern"] = torch.rand(shape, generator=torch.Generator().manual_seed(1))
    if method == "moa":
        options.setdefault("rules", rules_for(config))
    return kvsparse_hf.get_method(method)(model, **options)


def start(name: str, model, ids, mask=None, **more):
    """A cache that has read (and, for KVzip, compressed) a prompt."""
    from helpers import prefill

    cache = make(name, model, **more)
    if name == "kvzip":
        cache.compress(model, ids if mask is None else {"input_ids": ids, "attention_mask": mask})
    else:
        prefill(model, cache, ids, mask)
    return cache
