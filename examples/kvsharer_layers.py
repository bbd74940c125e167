"""KVSharer: likelihood of text against the number of layers that share, for calibrated and for random pairs.

    python examples/kvsharer_layers.py [MODEL] --calibrate moby.txt --text holmes.txt emma.txt

Calibrates on stretches of the first file, and measures on the others. Appends rows to examples/results/layers.jsonl and draws
examples/results/kvsharer.png. An interrupted calibration goes on.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from token_methods import middle_of, name_of
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvsparse_hf as kv
from kvsparse_hf.bench.timing import Results
from kvsparse_hf.calibrate.cli import text_windows
from kvsparse_hf.calibrate.kvsharer import calibrate_kvsharer
from kvsparse_hf.demo.model import find_model
from kvsparse_hf.errors import KVSparseError
from kvsparse_hf.hf.compat import CACHE_ARGUMENT
from kvsparse_hf.plans import Plan

WINDOW = 64


def searches(divergence: float | None, seeds: int) -> dict[str, dict]:
    """What is compared, as options of the calibration. Random and similar pairs are taken as they come."""
    free = dict(cosine=-1.0)
    out = {"dissimilar": dict(order="dissimilar"), "similar": dict(order="similar", **free)}
    if divergence is not None:
        out["dissimilar, KL"] = dict(order="dissimilar", divergence=divergence)
    return {**out, **{f"random {seed}": dict(order="random", seed=seed, **free) for seed in range(seeds)}}


def calibrate(model, windows: list[Tensor], folder: Path, options: dict[str, dict], shared: int, results: Results) -> dict[str, Plan]:
    """The plans, and rows with how long each took and where its last pair left the model."""
    plans = {}
    for name, how in options.items():
        path, begin = folder / f"{name.replace(', ', '-').replace(' ', '-')}.safetensors", time.perf_counter()
        if not path.is_file():
            try:
                calibrate_kvsharer(model, windows, path, shared, **how)
            except KVSparseError as error:
                print(name, error, flush=True)
                continue
            shape = {"model": name_of(model), "windows": len(windows), "tokens": WINDOW, **how}
            results.add(f"kvsharer {name}", "calibration", round(time.perf_counter() - begin, 1), "s", shape)
        plans[name] = Plan.load(path, "kvsharer", model)
        print(name, plans[name].tensors["pairs"].tolist(), plans[name].facts["cosine_reached"][-1:], flush=True)
    return plans


def losses(model, texts: list[Tensor], pairs: list) -> Tensor:
    """Nats of every token of the texts but their first ones, with the layers sharing by `pairs`."""
    found = []
    for ids in texts:
        cache = kv.KVSharerCache(model, plan=pairs)
        logits = model(ids[None].to(model.device), **{CACHE_ARGUMENT: cache}).logits[0, :-1].float()
        found.append(torch.nn.functional.cross_entropy(logits, ids[1:].to(model.device), reduction="none").cpu())
    return torch.cat(found)


def measure(model, texts: list[Tensor], plans: dict[str, Plan], counts: list[int], results: Results) -> None:
    """Rows by search and number of shared layers: the loss, its excess over no sharing, and the bytes of a token."""
    dense = losses(model, texts, [])
    layers = model.config.num_hidden_layers
    shape = {"model": name_of(model), "layers": layers, "texts": len(texts), "context": len(texts[0])}
    results.add("kvsharer none", "nll", round(float(dense.mean()), 4), "nats/token", {**shape, "shared": 0}, len(dense))
    for name, plan in plans.items():
        pairs = plan.tensors["pairs"].tolist()
        for count in (count for count in counts if 0 < count <= len(pairs)):
            mine = losses(model, texts, pairs[:count])
            over, error = mine - dense, float((mine - dense).std() / len(dense) ** 0.5)
            how = {**shape, "shared": count, "share": round(count / layers, 3)}
            results.add(f"kvsharer {name}", "nll", round(float(mine.mean()), 4), "nats/token", how, len(mine))
            results.add(f"kvsharer {name}", "nll_over_none", round(float(over.mean()), 4), "nats/token", how, len(mine), round(error, 4))
            print(f"{name}: {count} shared, {float(mine.mean()):.3f} nats", flush=True)


def draw(results: Path, plot: Path) -> None:
    """Loss by the number of shared layers, one line a search, from the newest rows of each."""
    import matplotlib.pyplot as plt

    rows = [json.loads(line) for line in results.read_text().splitlines()]
    rows = [row for row in rows if row["case"].startswith("kvsharer")]
    points = {(row["case"], row["shape"]["shared"]): row["value"] for row in rows if row["metric"] == "nll"}
    none = points[("kvsharer none", 0)]
    figure, axes = plt.subplots(figsize=(6.5, 4.2))
    for case in dict.fromkeys(case for case, _ in points if case != "kvsharer none"):
        count, value = zip(*sorted((count, value) for (name, count), value in points.items() if name == case), strict=True)
        style = dict(color="grey", ls=":") if "random" in case else dict(ls="-")
        axes.plot((0, *count), (none, *value), marker="o", ms=4, label=case.removeprefix("kvsharer "), **style)
    shape = next(row["shape"] for row in rows if row["metric"] == "nll")
    axes.axvline(0.25 * shape["layers"], color="black", lw=0.8, ls="--")
    axes.set(
        title=f"{shape['model']}, KVSharer by the order of its pairs",
        xlabel=f"layers of {shape['layers']} that read another's keys and values (dashed: 25 %)",
        ylabel="nats per token",
    )
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(plot, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", help="folder or Hub name; default: the demo's SmolLM2-135M-Instruct")
    parser.add_argument("--calibrate", type=Path, nargs="+", required=True, help="text files to calibrate on")
    parser.add_argument("--text", type=Path, nargs="+", required=True, help="text files to measure on")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--plans", type=Path, default=Path("plans"), help="folder for the plans")
    parser.add_argument("--windows", type=int, default=30, help=f"stretches of {WINDOW} tokens to calibrate on")
    parser.add_argument("--context", type=int, default=512, help="tokens of a text that is measured")
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 2, 3, 4, 6, 8], help="numbers of shared layers")
    parser.add_argument("--divergence", type=float, help="a further search with this limit on the logits' KL; it may try all pairs")
    parser.add_argument("--seeds", type=int, default=2, help="random orders")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    source = arguments.model or find_model(print)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(source)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype).to(device).eval()
    results = Results(arguments.output, "layers")
    whole = [window for window in text_windows(tokenizer, arguments.calibrate, WINDOW) if len(window) == WINDOW]
    windows = whole[:: max(len(whole) // arguments.windows, 1)][: arguments.windows]  # from all over the files
    texts = [torch.tensor(tokenizer(middle_of(path, 8 * arguments.context)).input_ids[: arguments.context]) for path in arguments.text]
    with torch.no_grad():
        options = searches(arguments.divergence, arguments.seeds)
        plans = calibrate(model, windows, arguments.plans, options, max(arguments.counts), results)
        measure(model, texts, plans, arguments.counts, results)
    draw(results.path, arguments.output / "kvsharer.png")


if __name__ == "__main__":
    main()
