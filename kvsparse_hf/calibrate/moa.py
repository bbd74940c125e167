"""MoA's rules: how much the loss depends on attention at each distance, and the best spans of a given density."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..errors import KVSparseError
from ..hf.binding import Binding
from ..plans import Plan, fingerprint
from .planning import choose_rules, rule_grid
from .probe import observed_attention
from .resume import RunningSums, by_layer, text_mark


def calibrate_moa(
    model: PreTrainedModel,
    windows: dict[int, Sequence[Tensor]],
    path: str | Path,
    density: float = 0.5,
    block: int = 64,
    response: float = 0.25,
    time_limit: float = 120.0,
    progress: Callable[[int, int], None] | None = None,
) -> Plan:
    """Profiles the model, chooses a rule per key/value head and writes them for `MoACache(rules=path)`. An interrupted
    profile goes on where it stopped.

    The influence of an attention value is the first-order change of the loss when it is masked and its row renormalised. Its
    absolute value is summed over query heads of a group, by distance in blocks; the first block (the sinks) is never masked.
    The plan minimises what lies outside the spans, summed over the profiled lengths, with at most `density` of the text
    inside at every one of them and at most two rules per layer.

    The published profile takes the loss on answers of the dense model to long questions; this one on the last `response` of
    each text itself. The published search returns a front of plans and validates them at a further length; this one returns
    the best of equal weights.

    Args:
        windows: by length, token ids of exactly that length; at least one for each.
        block: granularity of distances; also how many first tokens count as sinks.
        time_limit: seconds for the solver.
        progress: called with windows done and windows in all.

    Raises:
        KVSparseError: lengths that are no multiples of `block`, or no windows, or no plan of that density.
    """
    samples = [(length, window) for length in sorted(windows) for window in windows[length]]
    for length in windows:
        if length % block or length < 4 * block or not windows[length]:
            raise KVSparseError(f"profiled lengths must be multiples of {block}, at least {4 * block}, and have texts; {length} is not so.")
    if not samples or not 0 < density <= 1 or not 0 < response < 1:
        raise KVSparseError("moa needs texts, a density in (0, 1] and a share of response tokens in (0, 1).")
    binding = Binding.of(model)
    settings = dict(lengths={n: len(w) for n, w in windows.items()}, block=block, response=response)
    mark = text_mark([window for _, window in samples])
    sums = RunningSums(path, {**settings, "model": fingerprint(model), "text": mark})
    for number in sums.remaining(len(samples)):
        length, window = samples[number]
        sums.add({str(length): profile(model, window, binding.layers, block, response)})
        if progress is not None:
            progress(sums.done, len(samples))
    influence = {length: sums.sums[str(length)] / len(windows[length]) for length in sorted(windows)}
    rules = rule_grid(sorted(windows), block)
    chosen, facts = choose_rules(influence, rules, density, block, time_limit)
    tensors = {name: torch.tensor([[rules[r][i] for r in layer] for layer in chosen]) for i, name in enumerate(("alphas", "betas"))}
    plan = Plan.of("moa", model, tensors, **settings, density=density, **facts)
    plan.save(path)
    sums.finish()
    return plan


def profile(model: PreTrainedModel, window: Tensor, layers: int, block: int, response: float) -> Tensor:
    """`[L, H, N / block]`: influence by distance of one text, the first block of keys left out."""
    window = window.view(1, -1).to(model.device)
    answered = max(1, int(response * window.shape[1]))
    found: dict[int, Tensor] = {}

    def observe(layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, out: Tensor) -> None:
        query, key, value = (tensor[0].detach() for tensor in (query, key, value))
        out.register_hook(lambda gradient: found.__setitem__(layer, _by_distance(query, key, value, gradient[0], scale, block)))

    frozen = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in frozen:
            parameter.requires_grad_(False)
        with torch.enable_grad(), observed_attention(model, observe):
            # The gradient is wanted at the attention outputs alone; the embeddings start the graph.
            embeds = model.get_input_embeddings()(window).detach().requires_grad_()
            logits = model(inputs_embeds=embeds, use_cache=False, logits_to_keep=answered + 1).logits[0, :-1]
            torch.nn.functional.cross_entropy(logits.float(), window[0, -answered:]).backward()
    finally:
        for parameter in frozen:
            parameter.requires_grad_(True)
    return by_layer({layer: value.cpu() for layer, value in found.items()}, layers)


def masking_effect(weights: Tensor, gradient: Tensor) -> Tensor:
    """First-order change of the loss when one attention value is masked and its row renormalised, for every value.

    Exact where the loss is linear in the attention.

    Args:
        weights: `[…, T, N]` rows that sum to 1; gradient: of the loss with respect to them.
    """
    mean = (gradient * weights).sum(-1, keepdim=True)
    alone = weights >= 1.0  # nothing is left to renormalise: the row's output becomes zero
    effect = weights * (mean - gradient) / (1.0 - weights.masked_fill(alone, 0.0))
    return torch.where(alone, -gradient * weights, effect)


def _by_distance(query: Tensor, key: Tensor, value: Tensor, gradient: Tensor, scale: float, block: int) -> Tensor:
    """`[H, N / block]` from `query [Hq, N, D]` and the gradient `[N, Hq, Dv]` at the attention's output."""
    heads, length = key.shape[:2]
    group, blocks = query.shape[0] // heads, length // block
    index = torch.arange(length, device=key.device)
    total = torch.zeros(heads, blocks, device=key.device)
    for head in range(heads):
        mine = slice(head * group, (head + 1) * group)
        keys, values = key[head].float().T, value[head].float().T
        for first in range(0, length, block):
            rows = index[first : first + block]
            logits = query[mine, rows].float() @ keys * scale
            weights = logits.masked_fill(index > rows.unsqueeze(-1), float("-inf")).softmax(-1)
            effect = masking_effect(weights, gradient[rows, mine].transpose(0, 1).float() @ values)
            per_block = effect.abs().sum((0, 1)).view(blocks, block).sum(-1)
            last = first // block
            total[head, : last + 1] += per_block[: last + 1].flip(0) * (torch.arange(last, -1, -1, device=key.device) > 0)
    return total
