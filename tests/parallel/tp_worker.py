"""One rank of `test_tensor_parallel.py`: runs every method on its share of the heads, and leaves what it found in files.

    torchrun --nproc_per_node 2 tp_worker.py MODEL OUTPUT DTYPE NEW

MODEL is the folder's path without its ending, the number of layers: "-2" for most methods.
Where there are GPUs, each rank is on its own.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch  # noqa: E402
from helpers import generate, kept_in_all_layers, left_pad, tokens  # noqa: E402
from methods import METHODS  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

import kvsparse_hf  # noqa: E402
from kvsparse_hf import KVSparseError, SparseCache  # noqa: E402

RANKS = int(os.environ.get("WORLD_SIZE", "1"))
RANK = int(os.environ.get("RANK", "0"))


def prompts(model):
    return [part.to(model.device) for part in left_pad([tokens(40), tokens(25, seed=3)])]


def outcome(ids, cache) -> dict:
    return {"tokens": ids.cpu(), "kept": kept_in_all_layers(cache), "bytes": cache.report().device_bytes}


def run(cache, model, new: int) -> dict:
    ids, mask = prompts(model)
    out = generate(model, ids, cache, new, attention_mask=mask, disable_compile=True)
    return outcome(out, cache)


def second_turn(cache, model, new: int) -> dict:
    """Heads that hold unequal numbers of tokens meet a turn that compresses again."""
    ids, mask = prompts(model)
    first = generate(model, ids, cache, new, attention_mask=mask, disable_compile=True)
    ids = torch.cat((ids, first, tokens(9, 2, seed=8).to(ids.device)), dim=1)
    mask = torch.cat((mask, mask.new_ones(2, new + 9)), dim=1)
    out = generate(model, ids, cache, new, attention_mask=mask, disable_compile=True)
    return outcome(out, cache)


def zipped(model) -> dict:
    ids, mask = prompts(model)
    cache = kvsparse_hf.KVzipCache(model, budget=0.4, chunk_size=16)
    cache.compress(model, {"input_ids": ids, "attention_mask": mask})
    return outcome(ids, cache)


def saved(model, output: Path, new: int) -> dict:
    """Saves on all ranks, loads, and goes on."""
    ids, mask = prompts(model)
    cache = kvsparse_hf.AdaKVCache(model, budget=12, window=4, kernel=3)
    generate(model, ids, cache, new, attention_mask=mask, disable_compile=True)
    cache.save(output / "saved")
    loaded = SparseCache.load(output / "saved", model)
    one = kvsparse_hf.FullCache(model)
    refusal = ""
    try:
        SparseCache.load(output / "saved-by-one", model)
    except KVSparseError as error:
        refusal = str(error)
    return {"kept": kept_in_all_layers(loaded) == kept_in_all_layers(cache), "refusal": refusal, "method": one.method}


def refusal_of_a_config(model) -> str:
    """What a cache says that was made from the config of a (divided) model."""
    try:
        run(kvsparse_hf.AdaKVCache(model.config, budget=12, window=4, kernel=3), model, 2)
    except KVSparseError as error:
        return str(error)
    return ""


def main(model: str, output: Path, dtype: str, new: str) -> None:
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    where = {"tp_plan": "auto"} if RANKS > 1 else {"device_map": "cuda" if torch.cuda.is_available() else "cpu"}
    depths = {
        layers: AutoModelForCausalLM.from_pretrained(f"{model}-{layers}", dtype=getattr(torch, dtype), **where).eval()
        for layers in {case.layers for case in METHODS}
    }
    new, loaded, found = int(new), depths[2], {}
    for case in METHODS:
        found[case.id] = run(case.make(depths[case.layers]), depths[case.layers], new)
        if case.uneven and case.evicts:
            found[case.id + ", second turn"] = second_turn(case.make(depths[case.layers]), depths[case.layers], new)
    # Methods whose heads decide together, where the rest moves instead of going.
    window = dict(budget=12, window=4, kernel=3, action="offload")
    for name, cache in (
        ("adakv, offload", kvsparse_hf.AdaKVCache(loaded, **window)),
        ("tova, offload", kvsparse_hf.TOVACache(loaded, budget=12, action="offload", interval=4)),
        ("tiered by the last query", kvsparse_hf.TieredCache(loaded, hbm=0.4, host=0.4, evicted=0.2, interval=4, recent=4, scorer="last")),
    ):
        found[name] = run(cache, loaded, new)
    found["bytes"] = run(kvsparse_hf.SnapKVCache(loaded, budget="40KiB", window=4, kernel=3), loaded, new)
    found["kvzip, compressed"] = zipped(loaded)
    found["saved"] = saved(loaded, output, new)
    found["from a config"] = refusal_of_a_config(loaded)
    torch.save(found, output / f"found-{RANK}-of-{RANKS}.pt")


if __name__ == "__main__":
    if sys.argv[3] == "fail" and RANK == 1:
        raise SystemExit("this rank fails on purpose")
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
