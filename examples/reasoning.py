"""What costs accuracy in long reasoning: that tokens are gone, or that they are not on the device?

    python examples/reasoning.py MODEL --data gsm8k.jsonl                   # accuracy of greedy answers to GSM8K
    python examples/reasoning.py [MODEL] --data gsm8k.jsonl --nll           # likelihood of the model's own reasoning, on a CPU

The grid of "Not All Thoughts Need HBM" (arXiv 2605.09490): shares of tokens that are evicted, times shares of the remaining
ones that stay on the device, the rest lying in host memory; and one column of quantized tiers. Tokens are ranked by the
attention they received so far, prompt included, after the prompt and after every `--interval` decoded tokens; the first
`--sinks` and the newest `--recent` stay in any case. Appends rows to examples/results/reasoning.jsonl and draws
reasoning.png (reasoning_nll.png) beside it.

With --nll the model first reasons with the full cache, greedily; every cell is then fed that text token by token. The first
token after the question is predicted by the prompt's own, dense forward and is left out.
"""

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvsparse_hf as kv
from kvsparse_hf.bench.timing import Results
from kvsparse_hf.demo.model import find_model
from kvsparse_hf.eval.forced import forced, left_pad
from kvsparse_hf.eval.tasks.gsm8k import INSTRUCTION, score_answer
from kvsparse_hf.hf.compat import CACHE_ARGUMENT

EVICTED = (0.0, 0.03, 0.1, 0.25, 0.5)
RESIDENT = (1.0, 0.5, 0.25)
BITS = (8, "fp8", 4)
QUANTIZED = 0.75  # of the tokens, where the rest stays in full precision

Cells = dict[str, Callable[[object], kv.SparseCache]]


def cells(interval: int, sinks: int, recent: int, evicted=EVICTED, resident=RESIDENT, bits=BITS, group: int = 32) -> Cells:
    """How to make the cache of every cell, by name; "full" comes first."""
    common = dict(interval=interval, sinks=sinks, recent=recent)

    def tiered(**shares):
        return lambda model: kv.TieredCache(model, **shares, **common)

    made: Cells = {"full": kv.FullCache}
    for gone in evicted:
        for share in resident:
            hbm = share * (1 - gone)
            made[f"evicted={gone:g} hbm={share:g}"] = tiered(hbm=hbm, host=1 - gone - hbm, evicted=gone)
    for width in bits:
        shares = dict(hbm=1 - QUANTIZED, host=0.0, quantized=QUANTIZED, bits=width, group=group)
        made[f"quantized={QUANTIZED:g} bits={width}"] = tiered(**shares)
    return made


def prompts(tokenizer, questions: list[str]) -> list[list[int]]:
    """Token ids of the questions as chat turns."""
    texts = [[{"role": "user", "content": f"{question}\n\n{INSTRUCTION}"}] for question in questions]
    chats = [tokenizer.apply_chat_template(text, add_generation_prompt=True, tokenize=False) for text in texts]
    return [tokenizer(chat, add_special_tokens=False).input_ids for chat in chats]


def answer(model, tokenizer, ids: list[list[int]], cache: kv.SparseCache, new: int) -> list[list[int]]:
    """Greedy answers up to the end of text, as token ids; the cache is left as generation left it."""
    inputs, mask = left_pad(ids, tokenizer.pad_token_id or 0, model.device)
    loop = {"custom_generate": kv.fast_decode} if model.device.type == "cuda" else {}
    out = model.generate(
        inputs, attention_mask=mask, do_sample=False, max_new_tokens=new, pad_token_id=tokenizer.pad_token_id or 0,
        **{CACHE_ARGUMENT: cache}, **loop,
    )  # fmt: skip
    ends = set(torch.as_tensor(model.generation_config.eos_token_id).flatten().tolist())
    rows = out[:, inputs.shape[1] :].tolist()
    return [row[: next((at for at, token in enumerate(row) if token in ends), len(row))] for row in rows]


def shares_held(cache: kv.SparseCache) -> tuple[float, float]:
    """Bytes on the device and on the host as shares of a dense cache, both without what waits empty for further tokens."""
    report = cache.report()
    held = sum(report.tiers.values()) + report.evicted
    return report.share, report.tiers.get("host", 0) / held if held else 0.0


def measure_accuracy(
    model, tokenizer, rows: list[dict], made: Cells, batch: int, new: int, results: Results, setting: dict
) -> None:
    """Rows of each cell: the scores of `score_answer` with standard errors, and bytes held at the end."""
    ids = prompts(tokenizer, [row["question"] for row in rows])
    for name, make in made.items():
        texts, held = [], []
        for first in range(0, len(rows), batch):
            cache = make(model)
            found = answer(model, tokenizer, ids[first : first + batch], cache, new)
            texts += tokenizer.batch_decode(found, skip_special_tokens=True)
            held.append(shares_held(cache))
            del cache
        shape = {"model": name_of(model), "batch": batch, "questions": len(rows), "new_tokens": new, **setting, **cell_shape(name)}
        scored = [score_answer(text, row["answer"].rpartition("#### ")[2].strip()) for text, row in zip(texts, rows, strict=True)]
        for metric in scored[0]:
            mean = sum(scores[metric] for scores in scored) / len(scored)
            error = math.sqrt(mean * (1 - mean) / len(scored))
            results.add(name, metric, round(mean, 4), "share", shape, len(scored), round(error, 4))
            print(f"{name}: {metric} {mean:.3f} ± {error:.3f}", flush=True)
        add_bytes(results, name, shape, held)


def measure_nll(
    model, tokenizer, rows: list[dict], made: Cells, batch: int, new: int, results: Results, setting: dict
) -> None:
    """Rows `nll` and `nll_over_full` by cell: nats per token of the model's own reasoning, with errors over the questions."""
    ids = prompts(tokenizer, [row["question"] for row in rows])
    pairs = []
    for first in range(0, len(ids), batch):
        part = ids[first : first + batch]
        found = answer(model, tokenizer, part, kv.FullCache(model), new)
        pairs += [(context, text) for context, text in zip(part, found, strict=True) if len(text) > 1]
    score_texts(model, pairs, made, batch, results, setting)


def score_texts(
    model, pairs: list[tuple[list[int], list[int]]], made: Cells, batch: int, results: Results | None = None, setting: dict | None = None
) -> dict[str, float]:
    """The mean loss of each cell over texts `(context, continuation)` of token ids, and its rows."""
    means, full = {}, None
    for name, make in made.items():
        losses, held = [], []
        for first in range(0, len(pairs), batch):
            contexts, texts = zip(*pairs[first : first + batch], strict=True)
            cache = make(model)
            losses += [torch.tensor(row.logprobs[1:]).neg() for row in forced(model, contexts, texts, cache)]
            held.append(shares_held(cache))
        full = losses if full is None else full
        means[name] = float(torch.cat(losses).mean())
        print(f"{name}: {means[name]:.4f} nats per token, {held[0][0]:.0%} of dense on the device, {held[0][1]:.0%} on the host",
              flush=True)
        if results is not None:
            shape = {"model": name_of(model), "batch": batch, "questions": len(pairs), **(setting or {}), **cell_shape(name)}
            over = [mine - theirs for mine, theirs in zip(losses, full, strict=True)]
            for metric, values in (("nll", losses), ("nll_over_full", over)):
                tokens = sum(map(len, values))
                results.add(name, metric, round(float(torch.cat(values).mean()), 4) + 0.0, "nats/token", shape, tokens,
                            round(_error_over_texts(values), 4))  # fmt: skip
            add_bytes(results, name, shape, held)
    return means


def _error_over_texts(values: list[torch.Tensor]) -> float:
    """Standard error of the mean over all tokens, where the tokens of a text depend on each other (clustered by text)."""
    mean, tokens = float(torch.cat(values).mean()), sum(map(len, values))
    return math.sqrt(sum(float((text - mean).sum()) ** 2 for text in values)) / tokens


def add_bytes(results: Results, name: str, shape: dict, held: list[tuple[float, float]]) -> None:
    for metric, values in zip(("device_share", "host_share"), zip(*held, strict=True), strict=True):
        results.add(name, metric, round(sum(values) / len(values), 4), "share of dense bytes", shape, len(values))


def cell_shape(name: str) -> dict:
    """The numbers in a cell's name."""
    parts = dict(part.split("=") for part in name.split() if "=" in part)
    return {key: value if key == "bits" else float(value) for key, value in parts.items()}


def name_of(model) -> str:
    return model.config._name_or_path.rstrip("/").split("/")[-1]


def draw(results: Path, plot: Path, metric: str, label: str) -> None:
    """The metric by evicted share, one line for each share on the device; quantized tiers as points, all from the newest rows."""
    import matplotlib.pyplot as plt

    rows = [json.loads(line) for line in results.read_text().splitlines()]
    rows = [row for row in rows if row["metric"] == metric]
    newest = {row["case"]: row for row in rows if row["shape"]["model"] == rows[-1]["shape"]["model"]}
    figure, axes = plt.subplots(figsize=(7, 4.5))
    for index, share in enumerate(RESIDENT):
        mine = sorted((row["shape"]["evicted"], row["value"], row["se"]) for row in newest.values() if row["shape"].get("hbm") == share)
        if mine:
            x, y, error = zip(*mine, strict=True)
            shifted = [100 * value + 0.6 * (index - 1) for value in x]
            axes.errorbar(shifted, y, yerr=error, marker="os^"[index], capsize=2, lw=1, label=f"{share:.0%} of the rest on the device")
    quantized = [row for row in newest.values() if "bits" in row["shape"]]
    for index, row in enumerate(quantized):
        axes.errorbar([-4 - 2 * index], [row["value"]], yerr=[row["se"]], marker="DPX"[index % 3], capsize=2, ls="",
                      label=f"{QUANTIZED:.0%} in {_format(row['shape']['bits'])}, nothing evicted")  # fmt: skip
    if "full" in newest:
        axes.axhline(newest["full"]["value"], color="black", lw=0.8, label="full cache")
    shape = next(iter(newest.values()))["shape"]
    title = f"{shape['model']}: reasoning on {shape['questions']} GSM8K questions\n"
    title += f"ranked by attention received, every {shape['interval']} tokens; first {shape['sinks']} and newest {shape['recent']} stay"
    axes.set_title(title, fontsize=9)
    axes.set(xlabel="tokens evicted, %", ylabel=label)
    axes.set_xticks([100 * share for share in EVICTED])
    axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(plot, dpi=120)


def _format(bits: str) -> str:
    return bits if bits == "fp8" else f"int{bits}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", help="folder or Hub name; default: the demo's SmolLM2-135M-Instruct")
    parser.add_argument("--data", type=Path, required=True, help="GSM8K's test.jsonl (question, answer)")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--nll", action="store_true", help="likelihood of the model's own reasoning instead of accuracy")
    parser.add_argument("--only", nargs="+", metavar="CELL", help="these cells alone, such as full 'evicted=0.1 hbm=0.5'")
    parser.add_argument("--questions", type=int, default=300)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--new", type=int, default=400, help="tokens of an answer at most")
    parser.add_argument("--interval", type=int, default=16, help="decoded tokens between two rankings")
    parser.add_argument("--sinks", type=int, default=4, help="first tokens that are never moved")
    parser.add_argument("--recent", type=int, default=16, help="newest tokens that are never moved")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    source = arguments.model or find_model(print)
    tokenizer = AutoTokenizer.from_pretrained(source)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype).to(device).eval()
    rows = [json.loads(line) for line in arguments.data.read_text(encoding="utf-8").splitlines()][: arguments.questions]
    setting = {name: getattr(arguments, name) for name in ("interval", "sinks", "recent")}
    made = cells(**setting)
    if unknown := set(arguments.only or ()) - set(made):
        parser.error(f"no such cell: {', '.join(sorted(unknown))}; there are {', '.join(made)}")
    made = {name: made[name] for name in arguments.only or made}
    setting["instruction"] = INSTRUCTION
    results = Results(arguments.output, "reasoning")
    with torch.inference_mode():
        if arguments.nll:
            measure_nll(model, tokenizer, rows, made, arguments.batch, arguments.new, results, setting)
            draw(results.path, arguments.output / "reasoning_nll.png", "nll_over_full", "nats per token over the full cache")
        else:
            measure_accuracy(model, tokenizer, rows, made, arguments.batch, arguments.new, results, setting)
            draw(results.path, arguments.output / "reasoning.png", "flexible_extract", "accuracy (flexible-extract)")


if __name__ == "__main__":
    main()
