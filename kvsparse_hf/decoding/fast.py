"""`fast_decode`: `generate()`'s sampling loop with one graph replay a token and no host in between.

    model.generate(**inputs, past_key_values=cache, custom_generate=kvsparse_hf.fast_decode)

`generate()` still prepares inputs, logits processors, stopping criteria and cache. Greedy search and sampling with the
usual processors run here; everything else goes to Transformers' own loop, with one log line that says why.
"""

import contextlib
from typing import Any

import torch
from torch import Tensor
from transformers.generation import GenerateDecoderOnlyOutput, GenerationMode
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria
from transformers.utils import logging

from ..cache import SparseCache
from ..errors import OptionError
from ..hf import compat
from . import processors
from .compiled import OPTIONS, compiled_forward
from .step import Choice, DecodeStep
from .watch import Watch

logger = logging.get_logger(__name__)


class FastDecode:
    """A decoding loop for `generate(custom_generate=…)`.

    Args:
        compile: what is captured on a GPU. "none" records the model's own kernels: seconds of warm-up, good for short
            runs and small models. "default" compiles the forward with Inductor first (tens of seconds once per model),
            which fuses the small kernels between the matrix products. "max-autotune" also tunes the matrix products
            (minutes once). "freeze" also runs Inductor's passes for inference graphs, and has kernels launched while the
            one before ends. "joined" also multiplies with q/k/v at once, and with gate/up (their weights are moved next to
            each other, in place and without a copy that stays), and 2 to 16 rows with our own kernel: the shortest steps
            that were measured.
        lag: steps the host may run ahead of the stop check where the cache can take tokens back; the surplus is cropped.
    """

    def __init__(self, compile: str = "none", lag: int = 2):
        if compile not in ("none", *OPTIONS):
            raise OptionError(f"compile={compile!r}; choose one of 'none', {', '.join(map(repr, OPTIONS))}.")
        if lag < 0:
            raise OptionError(f"lag={lag}; choose 0 or more steps.")
        self.compile = compile
        self.lag = lag

    def __call__(self, model, input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus=False,
                 streamer=None, **model_kwargs):  # fmt: skip
        """Called by `generate()`; arguments and result are those of its sampling loop."""
        hidden = compat.generate_locals()
        streamer = streamer if streamer is not None else hidden.get("streamer")
        assistant = hidden.get("assistant_model")
        reason = _refusal(model, input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus, assistant,
                          model_kwargs)  # fmt: skip
        if reason is not None:
            logger.warning_once(f"fast_decode: {reason}; using Transformers' own decoding loop.")
            extra = {name: hidden[name] for name in ("assistant_model", "assistant_tokenizer", "tokenizer") if hidden.get(name)}
            return compat.plain_decoding(model, generation_config, assistant)(
                model, input_ids, logits_processor=logits_processor, stopping_criteria=stopping_criteria,
                generation_config=generation_config, synced_gpus=synced_gpus, streamer=streamer, **extra, **model_kwargs,
            )  # fmt: skip
        run = _Run(self, model, input_ids, list(logits_processor), stopping_criteria, generation_config, streamer)
        return run(model_kwargs)

    def forward_of(self, model) -> Any:
        """The forward that is captured: the model's own, or its compiled form."""
        if self.compile == "none":
            return model
        return compiled_forward(model, self.compile)


fast_decode = FastDecode()


def _refusal(model, input_ids, logits_processor, stopping_criteria, config, synced_gpus, assistant, model_kwargs) -> str | None:
    """Why this call must go to the plain loop; None when it need not."""
    cache = model_kwargs.get(compat.CACHE_ARGUMENT)
    mode = config.get_generation_mode(assistant)
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        return f"{mode.value} is not greedy search or sampling"
    if not isinstance(cache, SparseCache):
        return "the cache is not one of kvsparse_hf"
    if not cache.is_compileable:
        return f"{type(cache).__name__} on this model keeps layers that grow or think on the host"
    if synced_gpus:
        return "synced_gpus is set"
    if config.return_dict_in_generate and (config.output_attentions or config.output_hidden_states):
        return "attentions or hidden states are to be returned"
    for criterion in stopping_criteria:
        if type(criterion) not in (EosTokenCriteria, MaxLengthCriteria):
            return f"the stopping criterion {type(criterion).__name__} needs the host"
    if stopping_criteria.max_length is None:
        return "no maximum length is set"
    if len({layer.device for layer in cache.sparse_layers if layer.device is not None}) > 1 or _many_devices(model):
        return "the model is spread over several devices"
    return processors.refusal(list(logits_processor), input_ids.shape[1])


def _many_devices(model) -> bool:
    return len(set(getattr(model, "hf_device_map", {}).values())) > 1


class _Run:
    """One `generate()` call."""

    def __init__(self, how: FastDecode, model, input_ids: Tensor, logits_processor: list, stopping_criteria, config, streamer):
        self.how, self.model, self.config, self.streamer = how, model, config, streamer
        self.input_ids = input_ids
        self.captures = input_ids.device.type == "cuda"
        self.max_length = stopping_criteria.max_length
        eos = [c.eos_token_id for c in stopping_criteria if isinstance(c, EosTokenCriteria)]
        device = input_ids.device
        pad = config._pad_token_tensor
        self.choice = Choice(
            logits_processor,
            bool(config.do_sample),
            torch.cat([e.flatten() for e in eos]).to(device) if eos else None,
            pad.to(device) if pad is not None else None,
        )
        wants = config.return_dict_in_generate
        self.scores = [] if wants and config.output_scores else None
        self.logits = [] if wants and config.output_logits else None

    def __call__(self, model_kwargs: dict):
        model, config = self.model, self.config
        cache: SparseCache = model_kwargs[compat.CACHE_ARGUMENT]
        outputs = model._prefill(
            self.input_ids, config, model_kwargs, is_first_iteration=not getattr(config, "is_assistant", False)
        )
        model_kwargs = model._update_model_kwargs_for_generation(outputs, model_kwargs, is_encoder_decoder=False)
        prompt_length = self.input_ids.shape[1]
        step = DecodeStep(self.how.forward_of(model), {}, self.input_ids, self.max_length + self.how.lag + 1, self.choice)
        step.inputs["input_ids"] = self.input_ids.new_zeros(len(self.input_ids), 1)
        step.choose(outputs.logits[:, -1])
        del outputs
        watch = Watch(self.how.lag if cache.can_rewind else 0, self.input_ids.device, len(self.input_ids))
        new_tokens = self._loop(step, watch, cache, model_kwargs)
        sequences = step.ids[:, : prompt_length + new_tokens].clone()
        if self.streamer is not None:
            self.streamer.end()
        if not config.return_dict_in_generate:
            return sequences
        return GenerateDecoderOnlyOutput(
            sequences=sequences,
            scores=None if self.scores is None else tuple(self.scores[:new_tokens]),
            logits=None if self.logits is None else tuple(self.logits[:new_tokens]),
            **{compat.CACHE_ARGUMENT: cache},
        )

    def _loop(self, step: DecodeStep, watch: Watch, cache: SparseCache, model_kwargs: dict) -> int:
        """Runs to the end; returns the number of tokens that count. The first one is already chosen."""
        wanted = self.max_length - self.input_ids.shape[1]
        launched, counted, ended = 1, 0, False
        self._keep(step)
        watch.post(step.done, step.inputs["input_ids"][:, 0])
        optimize = getattr(self.model, "_optimize_model_for_decode", contextlib.nullcontext)
        with optimize(), _side_stream(self.input_ids.device):
            while not ended:
                for ended, tokens in watch.ready(drain=launched == wanted):
                    counted += 1
                    if self.streamer is not None:
                        self.streamer.put(tokens)
                    if ended or counted == wanted:
                        ended = True
                        break
                if ended:
                    break
                self._advance(step, cache, model_kwargs)
                launched += 1
                self._keep(step)
                watch.post(step.done, step.inputs["input_ids"][:, 0])
        cache.session.resync()
        if launched > counted:
            cache.crop(counted - launched)
        return counted

    def _advance(self, step: DecodeStep, cache: SparseCache, model_kwargs: dict) -> None:
        moved = cache.prepare_decode()
        if "position_ids" not in step.inputs:
            step.inputs.update(self._first_inputs(step, model_kwargs))
            step.run()  # real progress, and the warm-up that a capture needs
        elif moved or not self.captures:
            step.run()  # after a move also the warm-up of the next capture
            step.drop_graph()
        else:
            if not step.captured:
                cache.mark_prepared()
                self._capture(step)
            step.replay() if step.captured else step.run()

    def _capture(self, step: DecodeStep) -> None:
        try:
            step.capture()
        except RuntimeError as error:
            self.captures = False
            reason = str(error).strip().splitlines()[0]
            logger.warning_once(f"fast_decode: this step cannot be recorded as a CUDA graph ({reason}); running it without.")

    def _first_inputs(self, step: DecodeStep, model_kwargs: dict) -> dict:
        """Arguments of a one-token forward, as `generate()` itself would pass them, on fixed buffers."""
        ids = step.ids[:, : self.input_ids.shape[1] + 1]
        inputs = self.model.prepare_inputs_for_generation(ids, next_sequence_length=1, **model_kwargs)
        fixed = {name: value for name, value in inputs.items() if value is not None}
        fixed["input_ids"] = step.inputs["input_ids"]
        positions = fixed.get("position_ids")
        if positions is None:
            clock = model_kwargs[compat.CACHE_ARGUMENT].session.clock(ids.device)
            positions = clock.newest.long().unsqueeze(1) + 1
        fixed["position_ids"] = positions.clone()
        fixed["return_dict"] = True
        return fixed

    def _keep(self, step: DecodeStep) -> None:
        if self.scores is not None:
            self.scores.append(step.scores.clone())
        if self.logits is not None:
            self.logits.append(step.logits.clone())


@contextlib.contextmanager
def _side_stream(device: torch.device):
    """Warm-up, capture and replay on one stream that is not the default one, as graph capture requires."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream(device).wait_stream(stream)
