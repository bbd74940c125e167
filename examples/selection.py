"""Query-aware selection against eviction: passkey and phone book, first and second question; recall of the indexes.

    python examples/selection.py [MODEL] --text book.txt

Appends rows to examples/results/selection.jsonl and draws selection_recall.png and selection_answers.png beside it.
Everything after the question's own tokens (the beginning of the answer, then the answer) is decoded token by token, so
that it is the selection that must find the facts; a dense forward would find them for any method that evicts nothing.
"""

import argparse
import json
import random
import re
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

import torch
from selection_recall import draw_recall, measure_recall
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvsparse_hf as kv
from kvsparse_hf.bench.timing import Results
from kvsparse_hf.demo.model import find_model
from kvsparse_hf.hf.compat import CACHE_ARGUMENT
from kvsparse_hf.layers.evicting import EvictingLayer
from kvsparse_hf.policy.base import Policy

NAMES = "Adam Alice Anna Brian Carol David Emma Frank George Helen Jack James Jane John Kate Laura Lucy Mark Mary Paul Peter".split()
ENTRIES = 6  # phone numbers in a text
ASKED = 4  # of which so many are asked for, each in a row of one batch
_ZONES = dict(sinks=4, recent=64)


def methods(budget: int) -> dict:
    """The caches to compare, by name."""
    return {
        "full": lambda model: kv.FullCache(model),
        "streaming-llm": lambda model: kv.StreamingLLMCache(model, budget=budget),
        "snapkv": lambda model: kv.SnapKVCache(model, budget=budget),
        "quest": lambda model: kv.QuestCache(model, budget=budget),
        "quest-per-query-head": lambda model: kv.QuestCache(model, budget=budget, per_query_head=True),
        "loki": lambda model: kv.LokiCache(model, budget=budget),
        "retrieval-flat": lambda model: kv.RetrievalAttentionCache(model, budget=budget, index="flat", **_ZONES),
        "retrieval-ivf": lambda model: kv.RetrievalAttentionCache(model, budget=budget, **_ZONES),
    }


@dataclass(frozen=True)
class Fact:
    """Something to ask for: `begin` is how its answer begins, `digits` how it goes on."""

    kind: str
    sentence: str
    question: str
    begin: str
    digits: str


def make_facts(tokenizer, rng: random.Random) -> list[Fact]:
    """A passkey and some phone numbers, whose questions and answers have the same number of tokens."""
    key = str(rng.randrange(10000, 100000))
    about = "The pass key is"
    facts = [Fact("passkey", f"{about} {key}. Remember it: {key} is the pass key.", "What is the pass key?", about, key)]
    width = {name: len(tokenizer(f" {name}", add_special_tokens=False).input_ids) for name in NAMES}
    usual = Counter(width.values()).most_common(1)[0][0]
    for name in rng.sample([name for name in NAMES if width[name] == usual], ENTRIES):
        number = str(rng.randrange(1000, 10000))
        about = f"The phone number of {name} is"
        facts.append(Fact("phone", f"{about} {number}.", f"What is the phone number of {name}?", about, number))
    return facts


def make_text(tokenizer, book: list[str], length: int, facts: list[Fact], rng: random.Random) -> str:
    """So many tokens of consecutive paragraphs from somewhere in the book, with the facts between them in random order."""
    at, taken, total = rng.randrange(len(book) // 2), [], 0
    while total < length:
        paragraph = book[at % len(book)]
        taken.append(paragraph)
        total += len(tokenizer(paragraph, add_special_tokens=False).input_ids) + 1
        at += 1
    for fact in rng.sample(facts, len(facts)):
        taken.insert(rng.randrange(1, len(taken)), fact.sentence)
    return "\n".join(taken)


class RecordingLayer(EvictingLayer):
    """A dense layer that remembers the queries, keys and values it was given."""

    def absorb_prompt(self, query, key, value, positions, pad, call, lse=None):
        self.given, self.call = [(query, key, value)], call
        super().absorb_prompt(query, key, value, positions, pad, call, lse)

    def absorb_turn(self, query, key, value, *args):
        self.given.append((query, key, value))
        return super().absorb_turn(query, key, value, *args)


class RecordingCache(kv.FullCache):
    """Every method reads a prompt with the model's own attention, so that one forward serves them all."""

    method = "full"

    def make_layer(self, layer_idx: int) -> RecordingLayer:
        return RecordingLayer(layer_idx, self.session, Policy(), 64)

    def replay(self, cache, until: int | None = None, only: range | None = None, rows: int = 1):
        """Gives an empty cache what this one was given: the first `until` tokens, in `only` these layers, in so many rows."""
        for index in only or range(len(self.sparse_layers)):
            mine, layer = self.sparse_layers[index], cache.sparse_layers[index]
            parts = [torch.cat(part, dim=2)[:, :, :until] for part in zip(*mine.given, strict=True)]
            query, key, value = (part.expand(len(part) * rows, -1, -1, -1) for part in parts)
            cache.session.begin(layer.layer_idx, key, has_mask=False)
            layer.device = key.device
            positions = torch.arange(key.shape[2], device=key.device).expand(*key.shape[:2], -1)
            pad = torch.zeros(key.shape[:2], dtype=torch.int64, device=key.device)
            layer.absorb_prompt(query, key, value, positions, pad, mine.call)
            layer.is_initialized = True
        return cache


class Chat:
    """A conversation's text, cut where the tests need it."""

    def __init__(self, tokenizer, device: torch.device):
        self.tokenizer, self.device = tokenizer, device

    def ids(self, text: str) -> torch.Tensor:
        return self.tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids.to(self.device)

    def first(self, text: str, question: str) -> tuple[torch.Tensor, torch.Tensor]:
        """The text, and the question with everything up to where the answer begins."""
        whole = self._render([("user", f"{text}\n\n{question}")])
        at = whole.index(text) + len(text)
        return self.ids(whole[:at]), self.ids(whole[at:])

    def next(self, fact: Fact, question: str) -> torch.Tensor:
        """What follows an answer up to where the next one begins."""
        answer = f"{fact.begin} {fact.digits}"
        whole = self._render([("user", "x"), ("assistant", answer), ("user", question)])
        return self.ids(whole[whole.index(answer) + len(answer):])

    def _render(self, turns: list[tuple[str, str]]) -> str:
        messages = [{"role": role, "content": content} for role, content in turns]
        return self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)


def feed(model, cache, ids: torch.Tensor) -> torch.Tensor:
    """One forward; the last logits `[B, vocab]`."""
    return model(input_ids=ids, logits_to_keep=1, **{CACHE_ARGUMENT: cache}).logits[:, -1]


def answers(model, chat: Chat, cache, facts: list[Fact]) -> list[bool]:
    """Decodes an answer in each row, token by token, and leaves the right one in the cache; whether it was found."""
    begin = torch.cat([chat.ids(fact.begin) for fact in facts])
    right = torch.cat([chat.ids(f" {fact.digits}") for fact in facts])
    for at in range(begin.shape[1]):
        logits = feed(model, cache, begin[:, at : at + 1])
    found = []
    for at in range(right.shape[1]):
        found.append(logits.argmax(-1))
        logits = feed(model, cache, right[:, at : at + 1])  # the right one: the next question finds the same text everywhere
    texts = [chat.tokenizer.decode(row) for row in torch.stack(found, dim=1)]
    return [re.sub(r"\D", "", text) == fact.digits for text, fact in zip(texts, facts, strict=True)]


def ask(model, chat: Chat, caches: dict, context: RecordingCache, text: str, first: list[Fact], second: list[Fact], scores: dict):
    """Asks for the `first` facts, each in a row of its own, then for the `second` ones in a later turn of the same cache.

    Appends to `scores`, by method and metric, whether an answer was right.
    """
    asked = context.replay(RecordingCache(model), rows=len(first))
    question = torch.cat([chat.first(text, fact.question)[1] for fact in first])
    feed(model, asked, question)
    for name, make in caches.items():
        cache = asked.replay(make(model))
        cache.session.decoding = True  # the question ended the prompt
        scores[name, f"{first[0].kind}_first"] += answers(model, chat, cache, first)
        if second:
            turn = torch.cat([chat.next(old, new.question) for old, new in zip(first, second, strict=True)])
            feed(model, cache, turn)
            scores[name, f"{second[0].kind}_second"] += answers(model, chat, cache, second)


def measure_answers(model, tokenizer, book: list[str], lengths: list[int], contexts: list[int], budget: int, results: Results) -> None:
    """Rows `<passkey|phone>_<first|second>` by method and length."""
    chat, caches = Chat(tokenizer, model.device), methods(budget)
    for length, count in zip(lengths, contexts, strict=True):
        scores = defaultdict(list)
        for index in range(count):
            rng = random.Random(f"{length}/{index}")
            facts = make_facts(tokenizer, rng)
            text = make_text(tokenizer, book, length, facts, rng)
            context = RecordingCache(model)
            feed(model, context, chat.first(text, facts[0].question)[0])
            phones = facts[1 : 1 + ASKED]
            ask(model, chat, caches, context, text, phones, phones[1:] + phones[:1], scores)
            ask(model, chat, caches, context, text, facts[:1], [], scores)
            print(f"{length} tokens, text {index + 1} of {count}", flush=True)
        for (name, metric), found in sorted(scores.items()):
            share = sum(found) / len(found)
            shape = {"model": model.config._name_or_path.split("/")[-1], "batch": 1, "context": length, "budget": budget}
            error = (share * (1 - share) / len(found)) ** 0.5
            results.add(name, metric, round(share, 4), "share", shape, len(found), round(error, 4))


def newest(path: Path) -> list[dict]:
    """The rows of a results file; of rows that measure the same the last one."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return list({(row["case"], row["metric"], json.dumps(row["shape"])): row for row in rows}.values())


def draw_answers(rows: list[dict], path: Path) -> None:
    """Share of right answers by context length, one line a method."""
    import matplotlib.pyplot as plt

    metrics = [m for m in ("passkey_first", "phone_first", "phone_second") if any(r["metric"] == m for r in rows)]
    figure, panels = plt.subplots(1, len(metrics), figsize=(4 * len(metrics) + 1.5, 4), sharey=True, squeeze=False)
    for panel, metric in zip(panels[0], metrics, strict=True):
        for case in dict.fromkeys(row["case"] for row in rows):
            points = sorted((r["shape"]["context"], r["value"]) for r in rows if r["metric"] == metric and r["case"] == case)
            panel.plot(*zip(*points, strict=True), marker="o", label=case)
        panel.set(title=metric.replace("_", ", ") + " question", xlabel="tokens of text", ylim=(-0.03, 1.03))
    panels[0][0].set_ylabel("answers found")
    panels[0][-1].legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.01, 1.0))
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", help="folder or Hub name of a chat model (default: the demo's)")
    parser.add_argument("--text", type=Path, required=True, help="a long text in paragraphs, to hide facts in")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1500, 3000, 6000])
    parser.add_argument("--contexts", type=int, nargs="+", default=[8, 6, 4], help="texts of each length")
    parser.add_argument("--budget", type=int, default=256)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--only", choices=["answers", "recall"])
    parser.add_argument("--backends", nargs="+", help="measure recall of these alone")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    path = arguments.model or str(find_model(print))
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(arguments.device).eval()
    book = [" ".join(part.split()) for part in arguments.text.read_text(encoding="utf-8").split("\n\n") if part.strip()]
    results = Results(arguments.output, "selection")
    with torch.no_grad():
        if arguments.only != "answers":
            rng = random.Random("recall")
            facts = make_facts(tokenizer, rng)
            text = make_text(tokenizer, book, max(arguments.lengths), facts, rng)
            recording, chat = RecordingCache(model), Chat(tokenizer, model.device)
            feed(model, recording, torch.cat(chat.first(text, facts[1].question), dim=1))
            measure_recall(model, recording, results, arguments.backends)
            draw_recall(newest(results.path), arguments.output / "selection_recall.png")
        if arguments.only != "recall":
            measure_answers(model, tokenizer, book, arguments.lengths, arguments.contexts, arguments.budget, results)
            draw_answers(newest(results.path), arguments.output / "selection_answers.png")


if __name__ == "__main__":
    main()
