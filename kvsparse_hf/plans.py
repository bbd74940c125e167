"""Plan files: what was measured once per model (head tables, patterns, spans), with the model's fingerprint.

A plan is a safetensors file (tensors, and the facts as JSON in its metadata), or a YAML file that holds the same with the
tensors as nested lists.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from .calibrate.loki import fingerprint
from .errors import KVSparseError, PresetError
from .texts import read_json, read_yaml

_YAML = (".yaml", ".yml")
_PROBE_TOLERANCE = 0.3


@dataclass
class Plan:
    """The contents of a plan file.

    Attributes:
        kind: the method it is for: "headkv", "duo", "moa" or "kvsharer".
        model: fingerprint of the model it was made on.
        tensors: by name.
        facts: how it was made, as JSON values.
    """

    kind: str
    model: dict[str, Any]
    tensors: dict[str, Tensor]
    facts: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, kind: str, model: PreTrainedModel | PretrainedConfig, tensors: dict[str, Tensor], **facts) -> "Plan":
        """A plan made on `model`."""
        return cls(kind, fingerprint(model), tensors, facts)

    def save(self, path: str | Path) -> None:
        """Writes the file; the suffix (.yaml or anything else) chooses the format."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        head = {"kind": self.kind, "model": self.model, "facts": self.facts}
        if path.suffix in _YAML:
            lists = {name: tensor.tolist() for name, tensor in self.tensors.items()}
            path.write_text(yaml.safe_dump({**head, "tensors": lists}, sort_keys=False, default_flow_style=None), encoding="utf-8")
            return
        save_file({name: t.detach().cpu().contiguous() for name, t in self.tensors.items()}, path, {"kvsparse": json.dumps(head)})

    @classmethod
    def load(cls, path: str | Path, kind: str, model: PreTrainedModel | PretrainedConfig | None = None) -> "Plan":
        """Reads a plan.

        Args:
            kind: what it must be for.
            model: the model (or its config) it must have been made on; None: not checked.

        Raises:
            PresetError: no such file, not a plan, one for another method, or of another model.
        """
        path = Path(path)
        try:
            plan = _read_yaml(path) if path.suffix in _YAML else _read_safetensors(path)
        except (OSError, SafetensorError, UnicodeDecodeError, KVSparseError) as error:
            raise PresetError(f"plan {str(path)!r} is not readable: {error}") from error
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError) as error:
            raise PresetError(f"{str(path)!r} is no plan that `kvsparse calibrate` wrote.") from error
        if plan.kind != kind:
            raise PresetError(f"plan {str(path)!r} is one for {plan.kind!r}, not for {kind!r}.")
        if model is not None:
            _check_model(path, plan, fingerprint(model))
        return plan


def _read_safetensors(path: Path) -> Plan:
    with safe_open(path, "pt") as file:
        head = read_json((file.metadata() or {})["kvsparse"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}
    return Plan(head["kind"], head["model"], tensors, head["facts"])


def _read_yaml(path: Path) -> Plan:
    content = read_yaml(path.read_text(encoding="utf-8"))
    tensors = {name: torch.tensor(values) for name, values in content["tensors"].items()}
    return Plan(content["kind"], content["model"], tensors, content["facts"])


def _check_model(path: Path, plan: Plan, mine: dict[str, Any]) -> None:
    wrong = [f"{k}: made on {v}, here {mine.get(k)}" for k, v in plan.model.items() if k != "probe" and mine.get(k) != v]
    if wrong:
        raise PresetError(f"plan {str(path)!r} belongs to another model ({', '.join(wrong)}).")
    theirs, ours = plan.model.get("probe"), mine.get("probe")
    if theirs is None or ours is None:
        return
    # Loading in another precision, or quantized, moves the weights a little; another model's have nothing in common.
    theirs, ours = torch.tensor(theirs), torch.tensor(ours)
    if float((theirs - ours).norm()) > _PROBE_TOLERANCE * float(theirs.norm()):
        raise PresetError(
            f"plan {str(path)!r} was made on other weights of the same shape; make one for this model with "
            f"`kvsparse calibrate {plan.kind}`."
        )


def head_table(values: Any, layers: int, kv_heads: int, query_heads: int, what: str) -> Tensor:
    """A table with one number per layer and head, reduced to key/value heads by the mean over each group.

    Args:
        values: `[L, Hq]` or `[L, H]` numbers.
        what: names the table in errors.

    Returns:
        `[L, H]` fp64.

    Raises:
        PresetError: another shape (missing layers or heads), or numbers that are not finite.
    """
    try:
        table = torch.as_tensor(values, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise PresetError(f"{what} is no table of numbers with one row per layer: {error}") from error
    if table.dim() != 2 or table.shape[0] != layers or table.shape[1] not in (kv_heads, query_heads):
        raise PresetError(
            f"{what} has shape {tuple(table.shape)}; the model needs {layers} layers of {query_heads} query heads (or {kv_heads} "
            "key/value heads)."
        )
    if not bool(table.isfinite().all()):
        raise PresetError(f"{what} holds numbers that are not finite.")
    return table.unflatten(1, (kv_heads, -1)).mean(-1)
