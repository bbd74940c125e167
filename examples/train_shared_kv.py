"""Trains a small Llama on text three ways, at equal steps: dense, CLA-2 and YOCO.

    python examples/train_shared_kv.py --text books/*.txt --checkpoints checkpoints

The sharing lives in the cache: every training forward gets a fresh one. The defaults (11 million parameters, bytes as tokens,
50 million of them) are for one GPU. Checkpoints carry the map in their config; each is loaded back with `from_pretrained` and
`load_preset`, and what is measured is measured on what was loaded. Appends rows to examples/results/train_shared_kv.jsonl and
draws examples/results/train_shared_kv.png.

Up-training begins from a dense model of the same kind (`--start FOLDER`): an owner's key and value projections then start as the
mean of those of the layers that will read it.
"""

import argparse
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers import get_cosine_schedule_with_warmup as cosine_schedule

import kvsparse_hf as kv
from kvsparse_hf.bench.timing import Results
from kvsparse_hf.hf.compat import CACHE_ARGUMENT

BYTES = 256


@dataclass(frozen=True)
class Variant:
    """One way to train.

    Attributes:
        preset: what `load_preset` is given for a checkpoint, which says the rest itself; "full" for the dense model.
        options: of the cache while the model is not marked yet.
    """

    preset: str
    options: dict

    def cache(self, model: PreTrainedModel):
        """A fresh cache of the model in training; None where it needs none."""
        return None if self.preset == "full" else kv.load_preset(self.preset, model, **self.options)


def variants(window: int) -> dict[str, Variant]:
    return {"dense": Variant("full", {}), "cla-2": Variant("cla", {"factor": 2}), "yoco": Variant("yoco", {"window": window})}


class Text:
    """Tokens of the files, the last twentieth of each held out.

    Attributes:
        train, held: `[n]` token ids on the device.
    """

    def __init__(self, files: list[Path], tokenizer, device: torch.device):
        train, held = [], []
        for file in files:
            ids = self._ids(file, tokenizer)
            cut = len(ids) - len(ids) // 20
            train.append(ids[:cut])
            held.append(ids[cut:])
        self.train, self.held = torch.cat(train).to(device), torch.cat(held).to(device)

    @staticmethod
    def _ids(file: Path, tokenizer) -> Tensor:
        if tokenizer is None:
            return torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8).long()
        return torch.tensor(tokenizer(file.read_text(encoding="utf-8"), add_special_tokens=False).input_ids)

    def batch(self, step: int, rows: int, length: int) -> Tensor:
        """`[rows, length]` from random places, the same ones in every run."""
        generator = torch.Generator().manual_seed(step)
        first = torch.randint(len(self.train) - length, (rows, 1), generator=generator)
        return self.train[(first + torch.arange(length)).to(self.train.device)]

    def held_out(self, length: int, limit: int) -> list[Tensor]:
        """Up to `limit` whole stretches of the held-out text, `[1, length]` each, spread over it."""
        whole = [part[None] for part in self.held.split(length) if len(part) == length]
        return whole[:: max(len(whole) // limit, 1)][:limit]


def new_model(arguments, vocabulary: int) -> PreTrainedModel:
    """The model to train, always with the same weights."""
    torch.manual_seed(arguments.seed)
    if arguments.start is not None:
        return AutoModelForCausalLM.from_pretrained(arguments.start, dtype=torch.float32)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=arguments.width,
        intermediate_size=3 * arguments.width,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.width // 64,
        num_key_value_heads=max(arguments.width // 128, 1),
        max_position_embeddings=max(2048, arguments.length),
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config)


@torch.no_grad()
def average_projections(model: PreTrainedModel, sources: tuple[int, ...]) -> None:
    """An owner's key and value projections become the mean over the layers that will read it."""
    layers = model.model.layers
    for owner in set(sources):
        group = [layers[index].self_attn for index, source in enumerate(sources) if source == owner]
        for name in ("k_proj", "v_proj"):
            mean = torch.stack([getattr(attention, name).weight for attention in group]).mean(0)
            getattr(layers[owner].self_attn, name).weight.copy_(mean)


def drop_unread(model: PreTrainedModel, sources: tuple[int, ...]) -> int:
    """Projections of layers that read another one take no part; leaves them untrained. Returns the trained parameters."""
    for index, source in enumerate(sources):
        if source != index:
            for name in ("k_proj", "v_proj"):
                getattr(model.model.layers[index].self_attn, name).requires_grad_(False)
    return sum(weight.numel() for weight in model.parameters() if weight.requires_grad)


def compile_parts(model: PreTrainedModel) -> None:
    """The parts between the attention calls, which a cache takes out of any graph in training."""
    for layer in model.model.layers:
        for part in (layer.mlp, layer.input_layernorm, layer.post_attention_layernorm):
            part.compile()


def optimizer_of(model: nn.Module, rate: float) -> torch.optim.Optimizer:
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    groups = [
        {"params": [weight for weight in weights if weight.dim() > 1], "weight_decay": 0.1},
        {"params": [weight for weight in weights if weight.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=torch.cuda.is_available())


def train(name: str, variant: Variant, model: PreTrainedModel, text: Text, arguments, results: Results) -> None:
    """Trains in place; rows with the loss along the way and with the time."""
    precision = "bf16" if torch.cuda.is_available() else "no"
    accelerator = Accelerator(mixed_precision=precision, kwargs_handlers=[DistributedDataParallelKwargs()])
    first = variant.cache(model)
    sources = tuple(range(arguments.layers)) if first is None else first.layer_map.sources
    if arguments.start is not None:
        average_projections(model, sources)
    parameters = drop_unread(model, sources)
    if arguments.compile:
        compile_parts(model)
    rows = arguments.batch // accelerator.num_processes
    steps = arguments.steps or math.ceil(arguments.tokens / (arguments.batch * arguments.length))
    optimizer = optimizer_of(model, arguments.rate)
    schedule = cosine_schedule(optimizer, min(steps // 10, 100) + 1, steps)
    prepared, optimizer = accelerator.prepare(model.train(), optimizer)
    shape = {"parameters": parameters, "layers": len(model.model.layers), "batch": arguments.batch, "context": arguments.length,
             "window": arguments.window, "start": arguments.start and arguments.start.name}
    begin, losses = time.perf_counter(), []
    for step in range(steps):
        ids = text.batch(step * accelerator.num_processes + accelerator.process_index, rows, arguments.length)
        cache = variant.cache(model)
        given = dict(use_cache=False) if cache is None else {CACHE_ARGUMENT: cache}
        loss = prepared(input_ids=ids, labels=ids, **given).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
        if (step + 1) % arguments.log == 0 or step + 1 == steps:
            mean = float(torch.stack(losses).mean())
            losses.clear()
            seen = (step + 1) * arguments.batch * arguments.length
            results.add(name, "train_loss", round(mean, 4), "nats/token", {**shape, "step": step + 1, "tokens": seen})
            print(f"{name}: step {step + 1} of {steps}, loss {mean:.3f}, {time.perf_counter() - begin:.0f} s", flush=True)
    results.add(name, "train_time", round(time.perf_counter() - begin, 1), "s", {**shape, "steps": steps})
    accelerator.free_memory()


def save(name: str, variant: Variant, model: PreTrainedModel, folder: Path, window: int) -> Path:
    """A checkpoint whose config says how layers share."""
    cache = variant.cache(model)
    if cache is not None:
        cache.mark(model)
    kv.detach(model)
    model.save_pretrained(folder / name)
    return folder / name


@torch.no_grad()
def measure(name: str, variant: Variant, checkpoint: Path, text: Text, arguments, results: Results) -> None:
    """Held-out perplexity of the loaded checkpoint, the bytes its cache holds per token, and some text."""
    device = text.held.device
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype).to(device).eval()
    shape = {"context": arguments.length, "layers": model.config.num_hidden_layers, "window": arguments.window, "dtype": str(dtype)}
    losses, cache = [], kv.load_preset(variant.preset, model)
    for ids in text.held_out(arguments.length, arguments.held):
        cache.reset()
        logits = model(input_ids=ids, **{CACHE_ARGUMENT: cache}).logits[0, :-1].float()
        losses.append(nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none"))
    found = torch.cat(losses)
    mean, error = float(found.mean()), float(found.std() / len(found) ** 0.5)
    results.add(name, "nll", round(mean, 4), "nats/token", shape, len(found), round(error, 5))
    results.add(name, "perplexity", round(math.exp(mean), 4), "", shape, len(found), round(error * math.exp(mean), 5))
    report = cache.report()
    held = (report.device_bytes - report.reserve_bytes) / sum(report.seen)
    results.add(name, "bytes_per_token", round(held, 1), "B/token", shape)
    prompt = text.held[None, : min(64, arguments.length // 2)]
    cache.reset()
    new = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=48, **{CACHE_ARGUMENT: cache})
    print(f"{name}: perplexity {math.exp(mean):.3f}, {held:.0f} bytes a token; goes on with {new[0, prompt.shape[1]:].tolist()[:16]} …")


def draw(results: Path, plot: Path) -> None:
    """Loss by tokens, from the newest rows of each variant."""
    import matplotlib.pyplot as plt

    rows = [json.loads(line) for line in results.read_text().splitlines()]
    newest = {(row["case"], row["shape"]["tokens"]): row["value"] for row in rows if row["metric"] == "train_loss"}
    final = {row["case"]: row["value"] for row in rows if row["metric"] == "perplexity"}
    figure, axes = plt.subplots(figsize=(6.5, 4))
    for case in dict.fromkeys(case for case, _ in newest):
        tokens, loss = zip(*sorted((tokens / 1e6, loss) for (name, tokens), loss in newest.items() if name == case), strict=True)
        axes.plot(tokens, loss, lw=1.2, label=f"{case} (held-out perplexity {final.get(case, math.nan):.3f})")
    axes.set(xlabel="million tokens", ylabel="training loss, nats per token")
    axes.legend()
    figure.tight_layout()
    figure.savefig(plot, dpi=120)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, nargs="+", required=True, help="plain text files; the last 5 %% of each is held out")
    parser.add_argument("--tokenizer", help="folder or Hub name; default: every byte is a token")
    parser.add_argument("--start", type=Path, help="folder of a dense Llama to go on from")
    parser.add_argument("--only", nargs="+", default=["dense", "cla-2", "yoco"], choices=["dense", "cla-2", "yoco"])
    parser.add_argument("--checkpoints", type=Path, default=Path("checkpoints"))
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=14)
    parser.add_argument("--length", type=int, default=1024, help="tokens of a row")
    parser.add_argument("--batch", type=int, default=64, help="rows of a step, over all processes")
    parser.add_argument("--window", type=int, default=256, help="of YOCO's lower half")
    parser.add_argument("--tokens", type=int, default=50_000_000)
    parser.add_argument("--steps", type=int, help="instead of --tokens")
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--held", type=int, default=128, help="held-out rows that are measured")
    parser.add_argument("--log", type=int, default=20, help="steps between two rows of the loss")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=torch.cuda.is_available())
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    tokenizer = None if arguments.tokenizer is None else AutoTokenizer.from_pretrained(arguments.tokenizer)
    text = Text(arguments.text, tokenizer, device)
    results = Results(arguments.output, "train_shared_kv")
    for name in arguments.only:
        variant = variants(arguments.window)[name]
        model = new_model(arguments, BYTES if tokenizer is None else len(tokenizer)).to(device)
        train(name, variant, model, text, arguments, results)
        checkpoint = save(name, variant, model, arguments.checkpoints, arguments.window)
        del model
        measure(name, variant, checkpoint, text, arguments, results)
    draw(results.path, arguments.output / "train_shared_kv.png")


if __name__ == "__main__":
    main()
