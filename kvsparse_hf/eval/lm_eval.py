"""lm-eval's model type `kvsparse`: a Transformers model that answers through a preset's cache.

lm-eval has no plug-in mechanism, so its command is started through this module, with the same arguments:

    python -m kvsparse_hf.eval.lm_eval --model kvsparse --model_args pretrained=NAME,preset=snapkv-1024 --tasks gsm8k

In Python, `import kvsparse_hf.eval.lm_eval` before `lm_eval.simple_evaluate(model="kvsparse", …)` does.
"""

import difflib
from typing import Any

import torch

from ..errors import KVSparseError, OptionError, suggest
from ..hf.compat import CACHE_ARGUMENT
from ..presets import load_preset, read_preset
from ..registry import get_method
from .extras import need
from .forced import forced

need("lm_eval", "the model type kvsparse")

from lm_eval.api.registry import register_model  # noqa: E402 first ask whether it is there
from lm_eval.models.huggingface import HFLM  # noqa: E402
from lm_eval.models.utils import Collator  # noqa: E402
from tqdm import tqdm  # noqa: E402


@register_model("kvsparse")
class KVSparseLM(HFLM):
    """`HFLM` with a fresh cache for every batch.

    `generate_until`: the prompt is compressed as the preset says, then the answer is generated.

    `loglikelihood`: the context is the prompt, which the preset compresses; the continuation is then fed after it, one token at
    a time, as decoding would. So the first token of a continuation is predicted by the prompt's own forward, in which
    attention is dense: continuations of one token (MMLU's letters) score as with the full cache whatever the preset. With
    `hold_back=N` the last N tokens of the context are fed after the compressed rest too, and every score is the cache's; the
    preset then does not see them when it chooses. `loglikelihood_rolling`: of each window the prefix token is the prompt and all
    else the continuation.

    Args:
        preset: a preset's name or YAML file.
        hold_back: tokens at the end of a context that are not part of the compressed prompt (log-likelihoods alone).
        kwargs: options of the preset's method (`budget=512`), and all that `HFLM` takes. `backend` is HFLM's.
    """

    def __init__(self, pretrained: Any, preset: str = "full", hold_back: int = 0, **kwargs: Any):
        content = read_preset(preset)
        known = get_method(content["method"]).options_for(content).model_fields
        self._preset = preset
        self._overrides = {name: kwargs.pop(name) for name in list(kwargs) if name in known and name != "backend"}
        self._hold_back = int(hold_back)
        if self._hold_back < 0:
            raise OptionError(f"hold_back={hold_back}; choose 0 or more tokens.")
        _check_names(kwargs, known)
        super().__init__(pretrained, **kwargs)
        if self.AUTO_MODEL_CLASS.__name__ != "AutoModelForCausalLM":
            raise KVSparseError("the model type kvsparse serves causal language models.")
        self._make_cache()  # a bad option or model is refused now, not in the middle of a task

    def _make_cache(self):
        return load_preset(self._preset, self.model, **self._overrides)

    def get_model_info(self) -> dict:
        """What lm-eval writes beside its results; here also the cache."""
        cache = self._make_cache()
        return {
            **super().get_model_info(),
            "preset": self._preset,
            "cache": {"method": cache.method, **cache.option_dict()},
        }

    def _model_generate(self, context, max_length, stop, **generation_kwargs):
        generation_kwargs[CACHE_ARGUMENT] = self._make_cache()
        generation_kwargs.setdefault("disable_compile", True)  # every batch would be compiled for its own shapes
        return super()._model_generate(context, max_length, stop, **generation_kwargs)

    def _loglikelihood_tokens(self, requests, disable_tqdm: bool = False, override_bs: int | None = None):
        """`(sum of log-probabilities, whether greedy decoding gives it)` of each `(strings, context ids, continuation ids)`."""
        order = Collator(
            requests, sort_fn=lambda request: (-len(request[1]) - len(request[2]), request[1] + request[2])
        )
        size = override_bs or self.batch_size
        size = 1 if size == "auto" else int(size)
        results = []
        bar = tqdm(total=len(requests), disable=disable_tqdm or self.rank != 0, desc="Running loglikelihood requests")
        for chunk in order.get_batched(n=size):
            for (strings, _, _), answer in zip(chunk, self._score(chunk), strict=True):
                results.append(answer)
                if strings is not None:
                    self.cache_hook.add_partial("loglikelihood", strings, answer)
                bar.update(1)
        bar.close()
        return order.get_original(results)

    def _score(self, chunk) -> list[tuple[float, bool]]:
        contexts, continuations, scored = [], [], []
        for _, context, continuation in chunk:
            # Too long for the model: cut from the left, as HFLM does. The last continuation token is predicted, not fed.
            context = context[-max(self.max_length + 1 - len(continuation), 1) :]
            cut = len(context) - min(self._hold_back, len(context) - 1)
            contexts.append(context[:cut])
            continuations.append([*context[cut:], *continuation])
            scored.append(len(continuation))
        with torch.autocast(
            device_type=self.device.type,
            dtype=self.mixed_precision_dtype,
            enabled=self.mixed_precision_dtype is not None,
        ):
            rows = forced(self.model, contexts, continuations, self._make_cache())
        return [(sum(row.logprobs[-n:]), all(row.greedy[-n:])) for row, n in zip(rows, scored, strict=True)]


def _check_names(kwargs: dict[str, Any], known: dict[str, Any]) -> None:
    """Refuses names that are nearly an option: HFLM hands unknown ones on to `from_pretrained`, which may ignore them."""
    for name in kwargs:
        if name not in HFLM.__init__.__annotations__ and difflib.get_close_matches(name, known, n=1, cutoff=0.75):
            raise OptionError(f"the preset's method has no option {name!r}.{suggest(name, known)}")


def main() -> None:
    """lm-eval's own command, with the model type registered."""
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    main()
