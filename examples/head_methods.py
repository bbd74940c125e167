"""Head-level methods against uniform budgets at equal bytes: likelihood of text that follows a prompt, and a passkey in it.

    python examples/head_methods.py [MODEL] --calibrate war.txt --text book.txt other.txt

Calibrates HeadKV, DuoAttention and MoA on the first files, and measures on the others. Appends rows to
examples/results/head_methods.jsonl. One forward over a prompt serves all methods; what follows is fed as one teacher-forced
turn, whose greedy prediction is right where every token of the key is the likeliest.
"""

import argparse
import random
import time
from collections.abc import Callable
from pathlib import Path

import torch
from token_methods import Prompt, name_of
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvsparse_hf as kv
from kvsparse_hf.bench.timing import Results
from kvsparse_hf.calibrate.cli import text_windows
from kvsparse_hf.calibrate.duo import calibrate_duo
from kvsparse_hf.calibrate.headkv import calibrate_headkv
from kvsparse_hf.calibrate.moa import calibrate_moa
from kvsparse_hf.demo.model import find_model
from kvsparse_hf.hf.compat import CACHE_ARGUMENT

METHODS = ["adakv", "headkv", "duo-attention", "moa"]
SHARES = (0.1, 0.2, 0.4)
SCORES = dict(window=16, kernel=5)
STREAM = dict(sinks=16, recent=64)
PROMPT, ANSWER = 512, 64


def calibrate(model, tokenizer, files: list[Path], folder: Path, results: Results, names: list[str]) -> None:
    """Small plans of those methods in `names` that need one, and rows with how long they took."""
    text = torch.cat(list(text_windows(tokenizer, files, PROMPT)))
    windows = [window for window in text.split(PROMPT) if len(window) == PROMPT]
    lengths = {n: [window[:n] for window in windows[:4]] for n in (256, 512)}
    runs = {
        "headkv": lambda path: calibrate_headkv(model, text[:200_000], path, samples=16, length=PROMPT),
        "duo-attention": lambda path: calibrate_duo(model, windows[:16], path),
        "moa": lambda path: calibrate_moa(model, lengths, path, density=0.5),
    }
    for name, run in runs.items():
        path, begin = folder / f"{name}.safetensors", time.perf_counter()
        if name not in names or path.is_file():
            continue
        plan = run(path)
        shape = {"model": name_of(model), "batch": 1, "context": PROMPT, "threads": torch.get_num_threads()}
        results.add(name, "calibration", round(time.perf_counter() - begin, 1), "s", shape)
        print(name, plan.facts, flush=True)


def caches(model, folder: Path) -> dict[tuple[str, float | None], Callable]:
    """What is compared, by name and share of the prompt."""
    layers, heads = model.config.num_hidden_layers, model.config.num_key_value_heads
    table = folder / "headkv.safetensors"
    made: dict[tuple[str, float | None], Callable] = {("full", None): lambda: kv.FullCache(model)}
    for share in SHARES:
        budget = round(share * PROMPT)
        made["snapkv", share] = lambda budget=budget: kv.SnapKVCache(model, budget=budget, **SCORES)
        made["adakv", share] = lambda budget=budget: kv.AdaKVCache(model, budget=budget, **SCORES)
        made["headkv", share] = lambda budget=budget: kv.HeadKVCache(model, budget=budget, table=table, **SCORES)
    made["duo-attention", None] = lambda: kv.DuoAttentionCache(model, pattern=folder / "duo-attention.safetensors", **STREAM)
    for seed in range(3):
        pattern = torch.rand(layers, heads, generator=torch.Generator().manual_seed(seed))
        made[f"duo-random-{seed}", None] = lambda pattern=pattern: kv.DuoAttentionCache(model, pattern=pattern, **STREAM)
    made["moa", None] = lambda: kv.MoACache(model, rules=folder / "moa.safetensors", new_tokens=ANSWER)
    even = {"alphas": torch.zeros(layers, heads), "betas": torch.full((layers, heads), 0.5)}
    made["moa-uniform", None] = lambda: kv.MoACache(model, rules=even, new_tokens=ANSWER)
    return made


def follow(model, prompt: Prompt, cache: kv.SparseCache, answer: Tensor) -> tuple[Tensor, float]:
    """`[len(answer)]` log-probabilities of every token of the vocabulary, and entries held per head after the prompt."""
    prompt.start(cache)
    held = cache.report().kept
    cache.session.decoding = True  # what follows is an answer, not the next chunk of the prompt
    logits = [prompt.logits[None]]
    if len(answer) > 1:
        logits.append(model(input_ids=answer[None, :-1], **{CACHE_ARGUMENT: cache}).logits[0])
    return torch.cat(logits).float().log_softmax(-1), held


def texts(tokenizer, files: list[Path], count: int) -> list[tuple[Tensor, Tensor]]:
    """Prompts and what follows them, evenly spaced over the books."""
    out = []
    for file in files:
        ids = torch.cat(list(text_windows(tokenizer, [file], 10**9)))
        step = (len(ids) - PROMPT - ANSWER) // -(-count // len(files))
        out += [(ids[at : at + PROMPT], ids[at + PROMPT : at + PROMPT + ANSWER]) for at in range(step // 2, len(ids) - PROMPT - ANSWER, step)]
    return out[:count]


def passkeys(tokenizer, stories: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """The same texts with a passkey at some depth, and the question for it."""
    out = []
    for index, (story, _) in enumerate(stories):
        key = str(random.Random(index).randrange(10**5, 10**6))
        needle = tokenizer(f" The pass key is {key}. Remember it. {key} is the pass key. ", add_special_tokens=False).input_ids
        question = tokenizer("\n\nWhat is the pass key? The pass key is", add_special_tokens=False).input_ids
        answer = tokenizer(f" {key}", add_special_tokens=False).input_ids
        room = PROMPT - len(needle) - len(question)
        at = round((index + 0.5) / len(stories) * room)
        prompt = [*story[:at].tolist(), *needle, *story[at:room].tolist(), *question]
        out.append((torch.tensor(prompt), torch.tensor(answer)))
    return out


def measure(model, folder: Path, stories, keys, results: Results, names: list[str]) -> None:
    """Rows by case: the figure itself, and where there is a uniform rival, the paired difference to it."""
    wanted = {case for case in caches(model, folder) if case[0] in ("full", *names)}
    wanted |= {rival for case in wanted for rival in _rival(case) or ()}
    made = {case: make for case, make in caches(model, folder).items() if case in wanted}
    loss: dict[tuple, list[float]] = {case: [] for case in made}
    found: dict[tuple, list[float]] = {case: [] for case in made}
    held: dict[tuple, list[float]] = {case: [] for case in made}
    for number, (story, key) in enumerate(zip(stories, keys, strict=True)):
        for task, pair in (("nll", story), ("key", key)):
            ids, answer = (part.to(model.device) for part in pair)
            prompt = Prompt.read(model, ids[None])
            for case, make in made.items():
                scores, kept = follow(model, prompt, make(), answer)
                if task == "nll":
                    loss[case].append(-float(scores.gather(1, answer[:, None]).mean()))
                    held[case].append(kept)
                else:
                    found[case].append(float((scores.argmax(-1) == answer).all()))
        if number % 8 == 7:
            print(number + 1, {case: round(sum(v) / len(v), 3) for case, v in loss.items()}, flush=True)
    for case in made:
        name, share = case
        shape = {"model": name_of(model), "batch": 1, "context": PROMPT, "new_tokens": ANSWER, "share": share,
                 "held_per_head": round(sum(held[case]) / len(held[case]), 2)}  # fmt: skip
        for metric, unit, values in (("nll", "nats/token", loss), ("passkey_found", "share", found)):
            _add(results, name, metric, unit, values[case], shape)
            rival = _rival(case)
            if rival is not None:
                paired = [[mine - other for mine, other in zip(values[case], values[r], strict=True)] for r in rival]
                mean = [sum(column) / len(column) for column in zip(*paired, strict=True)]
                _add(results, name, f"{metric}_minus_uniform", unit, mean, shape)


def _rival(case: tuple[str, float | None]) -> list[tuple] | None:
    """The uniform plans of the same bytes."""
    name, share = case
    if name in ("adakv", "headkv"):
        return [("snapkv", share)]
    return {"duo-attention": [(f"duo-random-{seed}", None) for seed in range(3)], "moa": [("moa-uniform", None)]}.get(name)


def _add(results: Results, name: str, metric: str, unit: str, values: list[float], shape: dict) -> None:
    sample = torch.tensor(values, dtype=torch.float64)
    error = float(sample.std()) / len(sample) ** 0.5
    results.add(name, metric, round(float(sample.mean()), 4), unit, shape, len(sample), round(error, 4))
    print(f"{name} {shape['share'] or ''} {metric}: {float(sample.mean()):.4f} ± {error:.4f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", help="folder or Hub name; default: the demo's SmolLM2-135M-Instruct")
    parser.add_argument("--calibrate", type=Path, nargs="+", default=[], help="plain text files to calibrate on; adakv needs none")
    parser.add_argument("--text", type=Path, nargs="+", required=True, help="plain text files to measure on")
    parser.add_argument("--plans", type=Path, default=Path("plans"), help="folder of the plans; those that exist are used")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--only", nargs="+", default=METHODS, choices=METHODS, help="besides the full cache and their uniform rivals")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    planned = set(arguments.only) - {"adakv"}
    if planned and not arguments.calibrate:
        parser.error("--calibrate is needed, but with --only adakv")
    torch.set_num_threads(arguments.threads)
    source = arguments.model or find_model(print)
    tokenizer = AutoTokenizer.from_pretrained(source)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).to(device).eval()
    results = Results(arguments.output, "head_methods")
    if planned:
        calibrate(model, tokenizer, arguments.calibrate, arguments.plans, results, arguments.only)
    stories = texts(tokenizer, arguments.text, arguments.prompts)
    with torch.no_grad():
        measure(model, arguments.plans, stories, passkeys(tokenizer, stories), results, arguments.only)


if __name__ == "__main__":
    main()
