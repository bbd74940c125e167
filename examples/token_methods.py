"""Token-level methods side by side: a passkey in 1.5K tokens, and the likelihood of real text decoded through each cache.

    python examples/token_methods.py [MODEL] --text book.txt

Appends rows to examples/results/token_methods.jsonl and draws token_methods.png beside it. Every method reads a prompt with
the model's own attention, so one forward over the prompt serves them all; what follows is decoded token by token.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvsparse_hf as kv
from kvsparse_hf.bench.timing import Results
from kvsparse_hf.demo.model import find_model
from kvsparse_hf.demo.passkey import ANSWER_BEGINS, make_trials
from kvsparse_hf.hf.compat import CACHE_ARGUMENT
from kvsparse_hf.layers.evicting import EvictingLayer
from kvsparse_hf.policy.base import Policy

ANSWER_TOKENS = 8
SHARES = (0.25, 0.5, 0.75)
INTERVAL = 64  # tokens between two compressions of the methods that are published for prompts


def as_published(budget: int) -> dict[str, Callable]:
    """For the passkey: the prompt is compressed, the short answer is added where the method does so."""
    return {
        "full": lambda model: kv.FullCache(model),
        "streaming-llm": lambda model: kv.StreamingLLMCache(model, budget=budget),
        "snapkv": lambda model: kv.SnapKVCache(model, budget=budget),
        "pyramidkv": lambda model: kv.PyramidKVCache(model, budget=budget),
        "h2o": lambda model: kv.H2OCache(model, budget=budget),
        "h2o-count": lambda model: kv.H2OCache(model, budget=budget, normalize="count"),
        "scissorhands": lambda model: kv.ScissorhandsCache(model, budget=budget),
        "tova": lambda model: kv.TOVACache(model, budget=budget),
        "expected-attention": lambda model: kv.ExpectedAttentionCache(model, budget=budget),
        "keydiff": lambda model: kv.KeyDiffCache(model, budget=budget),
        "knorm": lambda model: kv.KnormCache(model, budget=budget),
        "rkv": lambda model: kv.RKVCache(model, budget=budget),
    }


def held_in_decode(budget: int) -> dict[str, Callable]:
    """For long decoding: every method holds the budget, or compresses to it again after every `INTERVAL` tokens."""
    again = dict(budget=budget, recompress_every=INTERVAL)
    return as_published(budget) | {
        "snapkv": lambda model: kv.SnapKVCache(model, **again),
        "pyramidkv": lambda model: kv.PyramidKVCache(model, **again),
        "expected-attention": lambda model: kv.ExpectedAttentionCache(model, **again),
        "keydiff": lambda model: kv.KeyDiffCache(model, budget=budget, decode="bounded"),
        "knorm": lambda model: kv.KnormCache(model, budget=budget, decode="bounded"),
        "rkv": lambda model: kv.RKVCache(model, **again),
    }


class _RecordingLayer(EvictingLayer):
    """A dense layer that remembers what it was given."""

    def absorb_prompt(self, *given) -> None:
        self.given = given
        super().absorb_prompt(*given)


class Prompt(kv.FullCache):
    """One forward over a prompt, from which any number of caches can start."""

    method = "full"

    def make_layer(self, layer_idx: int) -> _RecordingLayer:
        return _RecordingLayer(layer_idx, self.session, Policy(), self.options.reserve)

    @classmethod
    def read(cls, model, ids: Tensor) -> "Prompt":
        prompt = cls(model)
        prompt.logits = model(input_ids=ids, logits_to_keep=1, **{CACHE_ARGUMENT: prompt}).logits[0, -1]
        return prompt

    def start(self, cache: kv.SparseCache) -> kv.SparseCache:
        """Gives an empty cache this prompt, as the model would have."""
        for mine, layer in zip(self.sparse_layers, cache.sparse_layers, strict=True):
            key = mine.given[1]
            cache.session.begin(layer.layer_idx, key, has_mask=False)
            layer.device = key.device
            layer.absorb_prompt(*mine.given)
            layer.is_initialized = True
        return cache


def step(model, cache: kv.SparseCache, token: Tensor) -> Tensor:
    """Decodes one token; the logits of the next."""
    return model(input_ids=token.view(1, 1), **{CACHE_ARGUMENT: cache}).logits[0, -1]


def measure_passkey(model, tokenizer, depths: int, budget: int, results: Results) -> None:
    """Rows `passkey_found` by method: the share of `depths` passkeys that the greedy answer begins with."""
    found: dict[str, list[bool]] = {}
    for index, trial in enumerate(make_trials(tokenizer, depths, seed=0)):
        messages = [{"role": "user", "content": trial.prompt}]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False) + ANSWER_BEGINS
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids.to(model.device)
        prompt = Prompt.read(model, ids)
        for name, make in as_published(budget).items():
            cache, logits, answer = prompt.start(make(model)), prompt.logits, []
            for _ in range(ANSWER_TOKENS):
                answer.append(logits.argmax())
                logits = step(model, cache, answer[-1])
            found.setdefault(name, []).append(trial.is_found(tokenizer.decode(torch.stack(answer))))
        print(f"passkey {index + 1} of {depths}, {ids.shape[1]} tokens:", {k: sum(v) for k, v in found.items()}, flush=True)
    shape = {"model": name_of(model), "batch": 1, "context": ids.shape[1], "budget": budget}
    for name, right in found.items():
        share = sum(right) / len(right)
        error = (share * (1 - share) / len(right)) ** 0.5
        results.add(name, "passkey_found", round(share, 4), "share", shape, len(right), round(error, 4))


def decoded_losses(model, prompt: Prompt, make: Callable, ids: Tensor) -> Tensor:
    """Nats of each token of `ids`, decoded one by one after a prompt."""
    cache, logits, losses = prompt.start(make(model)), prompt.logits, []
    for token in ids:
        losses.append(torch.nn.functional.cross_entropy(logits[None].float(), token[None]))
        logits = step(model, cache, token)
    return torch.stack(losses)


def measure_text(model, tokenizer, texts: list[str], length: int, tokens: int, results: Results) -> None:
    """Rows `nll` and `nll_over_full` by method and budget: nats per token after a prompt of real text, teacher-forced."""
    given = []
    for text in texts:
        ids = tokenizer(text, return_tensors="pt").input_ids[:, : length + tokens].to(model.device)
        given.append((Prompt.read(model, ids[:, :length]), ids[0, length:]))
    full = torch.cat([decoded_losses(model, prompt, kv.FullCache, ids) for prompt, ids in given])

    def add(case: str, metric: str, values: Tensor, share: float) -> None:
        shape = {"model": name_of(model), "batch": 1, "context": length, "new_tokens": tokens, "texts": len(texts)}
        shape |= {"budget": round(share * length), "share": share}
        error = float(values.std()) / len(values) ** 0.5
        results.add(case, metric, round(float(values.mean()), 4), "nats/token", shape, len(values), round(error, 4))
        print(f"{case} at {share:.0%}: {metric} {float(values.mean()):.3f}", flush=True)

    add("full", "nll", full, 1.0)
    for share in SHARES:
        for name, make in held_in_decode(round(share * length)).items():
            if name != "full":
                losses = torch.cat([decoded_losses(model, prompt, make, ids) for prompt, ids in given])
                add(name, "nll", losses, share)
                add(name, "nll_over_full", losses - full, share)


def name_of(model) -> str:
    return model.config._name_or_path.rstrip("/").split("/")[-1]


def middle_of(path: Path, characters: int) -> str:
    """Running text from the middle of a book, from the start of a paragraph."""
    book = path.read_text(encoding="utf-8").replace("\r", "")
    at = book.index("\n\n", len(book) // 2) + 2
    return " ".join(book[at : at + characters].split())


def draw(results: Path, plot: Path) -> None:
    """Loss over the full cache by budget, one line a method, from the newest rows of each."""
    import matplotlib.pyplot as plt

    rows = [json.loads(line) for line in results.read_text().splitlines()]
    points = {(row["case"], row["shape"]["share"]): row for row in rows if row["metric"] == "nll_over_full"}
    figure, axes = plt.subplots(figsize=(7, 4.5))
    for index, case in enumerate(dict.fromkeys(case for case, _ in points)):
        mine = sorted((share, row["value"], row["se"]) for (name, share), row in points.items() if name == case)
        share, value, error = zip(*mine, strict=True)
        axes.errorbar(share, value, yerr=error, marker="ov^sDPX*"[index % 8], ls="-" if index < 10 else "--",
                      capsize=2, lw=1, label=case)
    shape = next(iter(points.values()))["shape"]
    axes.axhline(0.0, color="black", lw=0.8)
    axes.set(
        title=f"{shape['model']}: {shape['new_tokens']} tokens of {shape['texts']} text(s) after {shape['context']}",
        xlabel="budget, share of the prompt",
        ylabel="nats per token over the full cache",
        xticks=SHARES,
    )
    axes.set_yscale("symlog", linthresh=0.1)
    axes.set_ylim(bottom=-0.05)
    axes.legend(fontsize=7, ncols=2)
    figure.tight_layout()
    figure.savefig(plot, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", help="folder or Hub name; default: the demo's SmolLM2-135M-Instruct")
    parser.add_argument("--text", type=Path, nargs="+", required=True, help="plain text files, each longer than the context")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--depths", type=int, default=20, help="passkeys to hide; 0 skips the task")
    parser.add_argument("--budget", type=int, default=256, help="of the passkey task")
    parser.add_argument("--prompt", type=int, default=1536, help="tokens of text in the prompt")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of text after it; 0 skips the task")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    source = arguments.model or find_model(print)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    tokenizer = AutoTokenizer.from_pretrained(source)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype).to(device).eval()
    results = Results(arguments.output, "token_methods")
    with torch.inference_mode():
        if arguments.depths:
            measure_passkey(model, tokenizer, arguments.depths, arguments.budget, results)
        if arguments.tokens:
            texts = [middle_of(path, 8 * (arguments.prompt + arguments.tokens)) for path in arguments.text]
            measure_text(model, tokenizer, texts, arguments.prompt, arguments.tokens, results)
            draw(results.path, arguments.output / "token_methods.png")


if __name__ == "__main__":
    main()
