"""Query-aware selection against eviction: passkey and phone book, first and second question; recall of the indexes.

    python examples/selection.py [MODEL] --text book.txt

Appends rows to examples/results/selection.jsonl and draws selection_recall.png and selection_answers.png beside it.
Everything after the question's own tokens (the beginning of the answer, then the answer) is decoded token by token, so
that it is the selection that must find the facts; a dense forward would find them for any method that evicts nothing.
"""

import argparse
import random
import re
from collections import defaultdict
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

NAMES = "Anna Boris Clara David Emma Felix Greta Hector Irene Jonas Karla Louis Marta Niels Olga Peter".split()
ENTRIES = 6  # phone numbers in a text
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


def make_facts(rng: random.Random) -> list[Fact]:
    """A passkey and some phone numbers."""
    key = str(rng.randrange(10000, 100000))
    facts = [
        Fact("passkey", f"The pass key is {key}. Remember it: {key} is the pass key.", "What is the pass key?", "The pass key is", key)
    ]
    for name in rng.sample(NAMES, ENTRIES):
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

    def absorb_prompt(self, query, key, value, positions, pad, call):
        self.given, self.call = [(query, key, value)], call
        super().absorb_prompt(query, key, value, positions, pad, call)

    def absorb_turn(self, query, key, value, *args):
        self.given.append((query, key, value))
        return super().absorb_turn(query, key, value, *args)


class RecordingCache(kv.FullCache):
    """Every method reads a prompt with the model's own attention, so that one forward serves them all."""

    method = "full"

    def make_layer(self, layer_idx: int) -> RecordingLayer:
        return RecordingLayer(layer_idx, self.session, Policy(), 64)

    def forget_turn(self, tokens: int) -> None:
        self.crop(-tokens)
        for layer in self.sparse_layers:
            layer.given.pop()

    def replay(self, cache, until: int | None = None, only: range | None = None):
        """Gives an empty cache what this one was given (its first `until` tokens, in `only` these layers)."""
        for index in only or range(len(self.sparse_layers)):
            mine, layer = self.sparse_layers[index], cache.sparse_layers[index]
            query, key, value = (torch.cat(parts, dim=2)[:, :, :until] for parts in zip(*mine.given, strict=True))
            cache.session.begin(layer.layer_idx, key, has_mask=False)
            layer.device = key.device
            positions = torch.arange(key.shape[2]).expand(*key.shape[:2], -1)
            layer.absorb_prompt(query, key, value, positions, torch.zeros(key.shape[:2], dtype=torch.int64), mine.call)
            layer.is_initialized = True
        return cache


class Chat:
    """A conversation's text, cut where the tests need it."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def ids(self, text: str) -> torch.Tensor:
        return self.tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids

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
    """One forward; the last logits."""
    return model(input_ids=ids, **{CACHE_ARGUMENT: cache}).logits[0, -1]


def answer(model, chat: Chat, cache, fact: Fact) -> bool:
    """Decodes the answer token by token and leaves the right one in the cache; whether it was found."""
    *begin, last = chat.ids(fact.begin)[0]
    for token in begin:
        model.base_model(input_ids=token.view(1, 1), **{CACHE_ARGUMENT: cache})
    logits = feed(model, cache, last.view(1, 1))
    right, found = chat.ids(f" {fact.digits}")[0], []
    for token in right:
        found.append(int(logits.argmax()))
        logits = feed(model, cache, token.view(1, 1))  # the right one, so that the next question finds the same text
    return re.sub(r"\D", "", chat.tokenizer.decode(found)) == fact.digits


def ask_all(model, chat: Chat, caches: dict, text: str, pairs: list, scores: dict[tuple[str, str], list[bool]]) -> None:
    """Asks pairs of questions about one text; the second question comes in a later turn of the same cache.

    Appends to `scores`, by method and metric, whether an answer was right.
    """
    recording = RecordingCache(model)
    context, _ = chat.first(text, pairs[0][0].question)
    model.base_model(input_ids=context, **{CACHE_ARGUMENT: recording})
    for first, second in pairs:
        question = chat.first(text, first.question)[1]
        model.base_model(input_ids=question, **{CACHE_ARGUMENT: recording})
        for name, make in caches.items():
            cache = recording.replay(make(model))
            cache.session.decoding = True  # the question ended the prompt
            scores[name, f"{first.kind}_first"].append(answer(model, chat, cache, first))
            feed(model, cache, chat.next(first, second.question))
            scores[name, f"{second.kind}_second"].append(answer(model, chat, cache, second))
        recording.forget_turn(question.shape[1])


def measure_answers(model, tokenizer, book: list[str], lengths: list[int], contexts: list[int], budget: int, results: Results) -> None:
    """Rows `<passkey|phone>_<first|second>` by method and length."""
    chat, caches = Chat(tokenizer), methods(budget)
    for length, count in zip(lengths, contexts, strict=True):
        scores = defaultdict(list)
        for index in range(count):
            rng = random.Random(f"{length}/{index}")
            facts = make_facts(rng)
            text = make_text(tokenizer, book, length, facts, rng)
            key, *phones = facts
            pairs = [(phones[0], phones[1]), (key, phones[2])]
            ask_all(model, chat, caches, text, pairs, scores)
            print(f"{length} tokens, text {index + 1} of {count}", flush=True)
        for (name, metric), found in sorted(scores.items()):
            share = sum(found) / len(found)
            shape = {"model": model.config._name_or_path.split("/")[-1], "batch": 1, "context": length, "budget": budget}
            error = (share * (1 - share) / len(found)) ** 0.5
            results.add(name, metric, round(share, 4), "share", shape, len(found), round(error, 4))


def draw_answers(rows: list[dict], path: Path) -> None:
    """Share of right answers by context length, one line a method."""
    import matplotlib.pyplot as plt

    metrics = [m for m in ("passkey_first", "phone_first", "phone_second") if any(r["metric"] == m for r in rows)]
    figure, panels = plt.subplots(1, len(metrics), figsize=(4 * len(metrics), 4), sharey=True, squeeze=False)
    for panel, metric in zip(panels[0], metrics, strict=True):
        for case in dict.fromkeys(row["case"] for row in rows):
            points = sorted((r["shape"]["context"], r["value"]) for r in rows if r["metric"] == metric and r["case"] == case)
            panel.plot(*zip(*points, strict=True), marker="o", label=case)
        panel.set(title=metric.replace("_", ", ") + " question", xlabel="tokens of text", ylim=(-0.03, 1.03))
    panels[0][0].set_ylabel("answers found")
    panels[0][-1].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", help="folder or Hub name of a chat model (default: the demo's)")
    parser.add_argument("--text", type=Path, required=True, help="a long text in paragraphs, to hide facts in")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1500, 3000, 6000])
    parser.add_argument("--contexts", type=int, nargs="+", default=[6, 4, 3], help="texts of each length")
    parser.add_argument("--budget", type=int, default=256)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--only", choices=["answers", "recall"])
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    path = arguments.model or str(find_model(print))
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    book = [" ".join(part.split()) for part in arguments.text.read_text(encoding="utf-8").split("\n\n") if part.strip()]
    results = Results(arguments.output, "selection")
    with torch.no_grad():
        if arguments.only != "answers":
            rng = random.Random("recall")
            facts = make_facts(rng)
            text = make_text(tokenizer, book, max(arguments.lengths), facts, rng)
            recording, chat = RecordingCache(model), Chat(tokenizer)
            model.base_model(input_ids=torch.cat(chat.first(text, facts[1].question), dim=1), **{CACHE_ARGUMENT: recording})
            rows = measure_recall(model, recording, results)
            draw_recall(rows, arguments.output / "selection_recall.png")
        if arguments.only != "recall":
            first = len(results.rows)
            measure_answers(model, tokenizer, book, arguments.lengths, arguments.contexts, arguments.budget, results)
            draw_answers(results.rows[first:], arguments.output / "selection_answers.png")


if __name__ == "__main__":
    main()
