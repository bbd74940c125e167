"""Train the recall model: a Llama of a few million parameters that finds facts in 2K tokens and solves chains of sums.

    python examples/train_recall_model.py --output recall-model             # one GPU, under ten minutes
    python examples/train_recall_model.py --output small --tiny             # a laptop, to see that it learns

Batches are drawn on the device, so nothing is read. First the model learns to repeat spans of random words, of another length
in each batch: that takes it hundreds of steps, and without it thousands do not teach it to look anything up. Then come facts
and chains, short at first; they grow whenever the model is right about those of the present length. Prints the share of
exactly right answers with the full cache.
"""

import argparse
import math
import random
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from kvsparse_hf.recall.tasks import ASK, IGNORED, Batch, chains_batch, facts_batch
from kvsparse_hf.recall.vocabulary import IDS, SPECIAL, WORDS, make_tokenizer


@dataclass(frozen=True)
class Plan:
    """Sizes of the model and of its training.

    Attributes:
        length: tokens of the longest text of facts; steps: of the longest chain.
        tokens: of a batch.
    """

    hidden: int = 256
    layers: int = 6
    length: int = 2048
    steps: int = 40
    tokens: int = 32_768
    rate: float = 1.5e-3


TINY = Plan(hidden=128, layers=3, length=96, steps=4, tokens=2_048, rate=2e-3)
TASKS = ("facts", "chains")
SPAN = (5, 25)  # words that are repeated


class Curriculum:
    """How long the texts of one task may be, as a share of the full length.

    Args:
        start: the first share; factor: by how much it grows when a share `good` of the answers' tokens was right lately.
    """

    def __init__(self, start: float = 0.03, factor: float = 1.15, good: float = 0.94):
        self.reach, self.factor, self.good = start, factor, good
        self.right = 0.0

    def see(self, right: float) -> None:
        """The share of tokens that were right in a batch."""
        self.right = 0.7 * self.right + 0.3 * right
        if self.right > self.good and self.reach < 1:
            self.reach = min(1.0, self.reach * self.factor)
            self.right = 0.0  # and again at the new length


def make_model(plan: Plan) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=64 * math.ceil(len(WORDS) / 64),
        hidden_size=plan.hidden,
        intermediate_size=2 * plan.hidden,
        num_hidden_layers=plan.layers,
        num_attention_heads=plan.hidden // 32,
        num_key_value_heads=plan.hidden // 64,
        head_dim=32,
        max_position_embeddings=2 * plan.length,
        tie_word_embeddings=True,
        bos_token_id=IDS["<s>"],
        eos_token_id=IDS["</s>"],
        pad_token_id=IDS["<pad>"],
    )
    return LlamaForCausalLM(config)


def copies_batch(plan: Plan, generator: torch.Generator, device: torch.device) -> Batch:
    """Random words, twice: the second time they follow from the first."""
    words = random.randint(*SPAN)
    rows = max(1, plan.tokens // (2 * words))
    ids = torch.randint(len(SPECIAL), len(WORDS), (rows, words), generator=generator, device=device).repeat(1, 2)
    labels = ids.clone()
    labels[:, : words + 1] = IGNORED
    return Batch(ids, labels)


def draw_batch(plan: Plan, task: str, reach: float, generator: torch.Generator, device: torch.device) -> Batch:
    """One batch of texts of up to the share `reach` of the full length."""
    share = reach * (0.3 + 0.7 * random.random())
    if task == "chains":
        steps = max(3, round(share * plan.steps))
        filler = random.randint(0, steps)
        rows = max(1, plan.tokens // (10 * steps + 5 * (steps + filler)))
        return chains_batch(rows, steps, filler, generator, device)
    length = max(48, round(share * plan.length))
    asked = max(1, min(32, length // (3 * ASK)))
    facts = max(2, int((length // 6) * random.random()))
    return facts_batch(max(1, plan.tokens // length), length, facts, asked, generator, device)


def loss_of(model, batch: Batch) -> tuple[Tensor, Tensor]:
    """Mean cross-entropy of the labelled tokens, and the share of them that is right. Only their logits are computed."""
    hidden = model.model(input_ids=batch.ids[:, :-1], use_cache=False).last_hidden_state
    wanted = batch.labels[:, 1:]
    chosen = wanted >= 0
    logits = model.lm_head(hidden[chosen]).float()
    return torch.nn.functional.cross_entropy(logits, wanted[chosen]), (logits.argmax(-1) == wanted[chosen]).float().mean()


@torch.no_grad()
def exact(model, plan: Plan, seed: int, device: torch.device, texts: int = 256) -> dict[str, float]:
    """Share of answers of which every token is the likeliest one, with everything attended to, at full length."""
    found = {}
    for task in ("facts", "chains"):
        generator, right = torch.Generator(device).manual_seed(seed), []
        for _ in range(math.ceil(texts / 16)):
            if task == "facts":
                batch = facts_batch(16, plan.length, plan.length // 12, 1, generator, device)
            else:
                batch = chains_batch(16, plan.steps, plan.steps // 2, generator, device)
            logits = model(input_ids=batch.ids[:, :-1], use_cache=False).logits
            wanted = batch.labels[:, 1:]
            right.append(((logits.argmax(-1) == wanted) | (wanted < 0)).all(1))
        found[task] = float(torch.cat(right).float().mean())
    return found


def train(plan: Plan, minutes: float, device: torch.device, seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    random.seed(seed)
    model = make_model(plan).to(device)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters on {device}", flush=True)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=plan.rate, betas=(0.9, 0.98), fused=device.type == "cuda")
    generator = torch.Generator(device).manual_seed(seed)
    curricula = {"copies": Curriculum(start=1.0), **{task: Curriculum() for task in TASKS}}
    knows_copies = False
    begin, step = time.perf_counter(), 0
    while (done := (time.perf_counter() - begin) / (60 * minutes)) < 1:
        rate = plan.rate * min(1.0, (step + 1) / 200) * (1.0 if done < 0.5 else max(0.02, 2 - 2 * done))
        for group in optimizer.param_groups:
            group["lr"] = rate
        task = TASKS[step % 2] if knows_copies else "copies"
        if knows_copies:
            batch = draw_batch(plan, task, curricula[task].reach, generator, device)
        else:
            batch = copies_batch(plan, generator, device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss, right = loss_of(model, batch)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 10 < 2:  # one of each task; reading it waits for the device
            curricula[task].see(float(right))
            knows_copies = knows_copies or curricula["copies"].right > curricula["copies"].good
        if step % 200 == 1:
            reached = (f"{name} {c.reach:5.1%} of the length, right {c.right:.3f}" for name, c in curricula.items())
            print(f"step {step:6d} {done:4.0%}  loss {float(loss.detach()):.4f}  ", *reached, flush=True)
        if step % 1000 == 999:
            print(f"step {step:6d}       exact at full length:", exact(model, plan, seed + 1, device, 64), flush=True)
        step += 1
    return model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="folder for the model and its tokenizer")
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--length", type=int, help="tokens of the longest text of facts")
    parser.add_argument("--steps", type=int, help="of the longest chain")
    parser.add_argument("--tiny", action="store_true", help="short texts and a smaller model, for a CPU")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    given = {name: value for name in ("length", "steps") if (value := getattr(arguments, name)) is not None}
    plan = replace(TINY if arguments.tiny else Plan(), **given)
    model = train(plan, arguments.minutes, device, arguments.seed).to(torch.bfloat16)
    print("exactly right, bfloat16 weights:", exact(model, plan, arguments.seed + 2, device))
    model.save_pretrained(arguments.output)
    make_tokenizer().save_pretrained(arguments.output)


if __name__ == "__main__":
    main()
