"""Loss of a long text, teacher-forced through the cache."""

from collections.abc import Callable, Sequence

from pydantic import Field

from ...errors import KVSparseError
from ..data import load_hub, read_text
from ..forced import forced
from .base import Answer, Example, Setting, Task, TaskOptions

_HUB = ("Salesforce/wikitext", "wikitext-2-raw-v1")


class PerplexityOptions(TaskOptions):
    """Options of the task."""

    prompt: int = Field(1024, ge=1, description="tokens that are read as the prompt")
    tokens: int = Field(1024, ge=1, description="tokens after it that are fed and scored")
    chunk: int = Field(1, ge=1, description="tokens fed at a time; 1 is what decoding does")
    windows: int = Field(16, ge=1, description="windows of the text")


class PerplexityTask(Task):
    """Windows slide over the text by `tokens`: each token is scored once, after at least `prompt` others.

    `chunk=1` feeds token by token, as `generate()` would. A larger chunk is read as a further chunk of the prompt: methods
    that evict choose again after each, with the chunk's own queries; methods that skip read everything, so they refuse it.
    The first scored token comes from the prompt's own dense forward. `nll` is in nats per token, `ppl` its exponential.
    """

    name = "ppl"
    primary = "nll"
    unit = "nats/token"
    needs_template = False
    Options = PerplexityOptions

    def examples(self, setting: Setting) -> list[Example]:
        options = self.options
        ids = setting.tokenizer(self._text(setting), add_special_tokens=False, verbose=False).input_ids
        size = options.prompt + options.tokens
        starts = range(0, len(ids) - size + 1, options.tokens)[: setting.count(options.windows)]
        if not starts:
            raise KVSparseError(
                f"the text has {len(ids)} tokens; a window needs {size}. Lower -t prompt= or -t tokens=."
            )
        return [
            Example(
                id=str(index),
                prompt="",
                references=None,
                max_new_tokens=options.tokens,
                ids=tuple(ids[at : at + size]),
            )
            for index, at in enumerate(starts)
        ]

    def _text(self, setting: Setting) -> str:
        if setting.data is None:
            return "".join(row["text"] for row in load_hub(*_HUB, "test", {"text": str}))
        files = sorted(setting.data.glob("*.txt")) if setting.data.is_dir() else [setting.data]
        if not files:
            raise KVSparseError(f"--data {setting.data}: the folder holds no .txt file.")
        text = "\n".join(map(read_text, files))
        if not text.strip():
            raise KVSparseError(f"--data {setting.data} is empty.")
        return text

    def ask(self, engine, examples: Sequence[Example], make_cache: Callable) -> list[Answer]:
        cut, chunk, cache = self.options.prompt, self.options.chunk, make_cache()
        if chunk > 1 and cache.action == "skip":
            raise KVSparseError(f"{cache.method} reads all its tokens when several are fed at once; use -t chunk=1.")
        contexts, rest = [example.ids[:cut] for example in examples], [example.ids[cut:] for example in examples]
        scored = forced(engine.model, contexts, rest, cache, chunk)
        held = engine.held(cache, len(examples))
        return [
            Answer([], cut, len(row), held, {"nll": -sum(found.logprobs) / len(found.logprobs)})
            for row, found in zip(rest, scored, strict=True)
        ]

    def score(self, example: Example, answer: Answer) -> dict[str, float]:
        return {"nll": answer.values["nll"]}
