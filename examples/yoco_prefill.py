"""What YOCO saves of a prompt: time and floating-point operations, with and without its early exit, against a dense cache.

    python examples/yoco_prefill.py

A Llama with random weights (the figures do not depend on them). Appends rows to examples/results/layers.jsonl. The count of
operations leaves attention out on the CPU, where PyTorch's counter does not know its kernel.
"""

import argparse
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

import kvsparse_hf as kv
from kvsparse_hf.bench.timing import Results
from kvsparse_hf.hf.compat import CACHE_ARGUMENT


def new_model(width: int, layers: int, device: str) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=max(width // 128, 1),
        max_position_embeddings=2**17,
    )
    return LlamaForCausalLM(config).to(device, torch.bfloat16 if device == "cuda" else torch.float32).eval()


def run(model, ids: torch.Tensor, make, early: bool) -> torch.Tensor:
    """Logits of the last token, from a fresh cache."""
    cache = make(model)
    with cache.early_exit(model) if early else nullcontext():
        return model(input_ids=ids, logits_to_keep=1, **{CACHE_ARGUMENT: cache}).logits[:, -1].float()


def seconds(model, ids: torch.Tensor, make, early: bool, repeats: int) -> float:
    """The fastest of some runs after a first one."""
    times = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        run(model, ids, make, early).sum().item()
        times.append(time.perf_counter() - begin)
    return min(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--context", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model, results = new_model(arguments.width, arguments.layers, device), Results(arguments.output, "layers")
    yoco = partial(kv.YOCOCache, window=arguments.window)
    cases = {"dense": (kv.FullCache, False), "yoco": (yoco, False), "yoco, early exit": (yoco, True)}
    with torch.inference_mode():
        for context in arguments.context:
            ids = torch.randint(256, (1, context), device=device)
            shape = {"model": f"random-{arguments.layers}x{arguments.width}", "batch": 1, "context": context, "window": arguments.window,
                     "threads": arguments.threads}  # fmt: skip
            for case, (make, early) in cases.items():
                with FlopCounterMode(display=False) as counter:
                    logits = run(model, ids, make, early)
                if case == "yoco":
                    expected = logits
                elif early:
                    difference = float((logits - expected).abs().max())
                    results.add(f"prefill {case}", "max_difference", difference, "logits", shape)
                spent = seconds(model, ids, make, early, arguments.repeats)
                results.add(f"prefill {case}", "prefill", round(spent * 1e3, 1), "ms", shape, arguments.repeats)
                results.add(f"prefill {case}", "flops", counter.get_total_flops() / 1e9, "GFLOP", shape)
                print(f"{context} {case}: {spent * 1e3:.0f} ms, {counter.get_total_flops() / 1e9:.1f} GFLOP", flush=True)


if __name__ == "__main__":
    main()
