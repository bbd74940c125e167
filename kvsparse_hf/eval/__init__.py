"""Evaluation: tasks, metrics and the runs behind `kvsparse eval`, and a model type for lm-eval (`kvsparse_hf.eval.lm_eval`).

    from kvsparse_hf.eval.command import Request, run
    outcomes = run(Request("passkey", model="…", presets=("snapkv-512",), limit=8))

Importing this package needs none of the packages of the extra "eval"; each is asked for where it is used.
"""

from .metrics import get_metric, list_metrics
from .tasks import get_task, list_tasks

__all__ = ["get_metric", "get_task", "list_metrics", "list_tasks"]
