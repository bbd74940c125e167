"""One rank of `test_whole_heads.py`: runs models whose plan leaves every rank all heads, and leaves what it found in a file.

    torchrun --nproc_per_node 2 whole_heads_worker.py FOLDER NAME…

FOLDER holds a model of each NAME; `found-RANK` is written there.
"""

import sys
from pathlib import Path

import torch
from tp_worker import METHODS, RANK, generate, kept_in_all_layers, outcome, prompts, run, second_turn, zipped
from transformers import AutoModelForCausalLM

import kvsparse_hf
from kvsparse_hf import SparseCache
from kvsparse_hf.eval.runner import fingerprint
from kvsparse_hf.hf import compat

NEW = 12
CASES = {case.id: case for case in METHODS}
NAMES = ("full", "snapkv", "adakv", "headkv", "moa", "h2o", "quest")
WINDOW = dict(window=4, kernel=3)


def saved(model, folder: Path) -> dict:
    """Saves twice, the second time over what the first left, and loads."""
    ids, mask = prompts(model)
    for budget in (16, 12):
        cache = kvsparse_hf.AdaKVCache(model, budget=budget, **WINDOW)
        generate(model, ids, cache, NEW, attention_mask=mask, disable_compile=True)
        cache.save(folder)
        assert kept_in_all_layers(SparseCache.load(folder, model)) == kept_in_all_layers(cache)
    return outcome(ids, cache)


def find(model, folder: Path) -> dict[str, dict]:
    """What each method made of a model; a cache is saved in `folder`."""
    found = {name: run(CASES[name].make(model), model, NEW) for name in NAMES}
    found["adakv, second turn"] = second_turn(CASES["adakv"].make(model), model, NEW)
    found["bytes"] = run(kvsparse_hf.AdaKVCache(model, budget="40KiB", **WINDOW), model, NEW)
    found["kvzip, compressed"] = zipped(model)
    found["saved"] = saved(model, folder)
    return found


def main(folder: Path, *names: str) -> None:
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    found = {}
    for name in names:
        model = AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32, **compat.tensor_parallel()).eval()
        found[name] = find(model, folder / f"{name}-saved")
        found[name]["weights"] = fingerprint(model)
    torch.save(found, folder / f"found-{RANK}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
