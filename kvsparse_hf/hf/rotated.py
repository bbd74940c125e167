"""Which layers rotate their keys, and whether the keys are then left as they are: what `positions="cache"` may turn."""

import ast
import functools
import inspect
import sys
from collections.abc import Callable

from transformers import PretrainedConfig

from ..errors import UnsupportedModelError

Rule = Callable[[PretrainedConfig, int], bool]


def _sliding_alone(config: PretrainedConfig, layer: int) -> bool:
    return config.layer_types[layer] == "sliding_attention"


def _sliding_alone_if_any(config: PretrainedConfig, layer: int) -> bool:
    return config.sliding_window is None or _sliding_alone(config, layer)


# Attention modules that rotate on a condition, by model type; all others do so always.
_RULES: dict[str, Rule] = {
    "afmoe": _sliding_alone,
    "cohere2": _sliding_alone,
    "exaone4": _sliding_alone_if_any,
    "exaone_moe": _sliding_alone_if_any,
    "flint": _sliding_alone,
    "granitemoehybrid": lambda config, layer: config.position_embedding_type == "rope",
    "lara_mini": _sliding_alone,
    "llama4_text": lambda config, layer: bool(config.no_rope_layers[layer]),
    "olmo_hybrid": lambda config, layer: getattr(config, "rope_parameters", None) is not None,
    "smollm3": lambda config, layer: bool(config.no_rope_layers[layer]),
}
# Read conditions that say nothing about the keys of an owner.
_HARMLESS = ("self.is_kv_shared_layer", "self.config.rope_interleave", "self.rotary_dim is not None")
# These normalise the rotated keys without weights, which turning does not change.
_NORMALISED = ("llama4_text", "nanochat")


def rotates(config: PretrainedConfig, model_class: type | None, layer: int) -> bool:
    """Whether the keys of a full-attention layer carry a rotation, in the model of this (decoder) config.

    Raises:
        UnsupportedModelError: the model rotates some layers alone, or changes the rotated keys, and this library does not know
            which or how.
    """
    kind = config.model_type
    rule = _RULES.get(kind)
    if model_class is not None:
        condition, changed = _read_attention(sys.modules[model_class.__module__])
        if changed and kind not in _NORMALISED:
            raise UnsupportedModelError(f"{kind} multiplies its keys by learned weights after rotating them")
        if condition and rule is None:
            raise UnsupportedModelError(
                f"{kind} rotates some of its layers alone ({condition}), and it is not known which"
            )
    return rule is None or rule(config, layer)


@functools.cache
def _read_attention(module) -> tuple[str, bool]:
    """The condition on which the attention modules of a model's file rotate, "" for none, and whether they normalise keys after
    that."""
    try:
        tree = ast.parse(inspect.getsource(module))
    except (OSError, TypeError):  # no source to read
        return "", False
    condition, changed = "", False
    for node in ast.walk(tree):
        forward = _cached_forward(node)
        if forward is None:
            continue
        rotated = False
        for statement in forward.body:
            text = ast.unparse(statement)
            if isinstance(statement, ast.If) and _turns(statement) and ast.unparse(statement.test) not in _HARMLESS:
                condition = ast.unparse(statement.test)
            changed |= rotated and not _turns(statement) and "norm(" in text and "key" in text
            rotated |= _turns(statement)
    return condition, changed


def _cached_forward(node: ast.AST) -> ast.FunctionDef | None:
    """The forward of an attention class that has a cache."""
    if (
        not isinstance(node, ast.ClassDef)
        or "Attention" not in node.name
        or "Flash" in node.name
        or "Sdpa" in node.name
    ):
        return None
    forward = next((item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == "forward"), None)
    return forward if forward is not None and ".update(" in ast.unparse(forward) else None


def _turns(statement: ast.AST) -> bool:
    calls = (node.func for node in ast.walk(statement) if isinstance(node, ast.Call))
    return any(
        isinstance(called, ast.Name) and called.id.startswith("apply_") and "rot" in called.id for called in calls
    )
