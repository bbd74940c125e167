"""`kvsparse eval` as a process of torchrun, of which rank 1 fails at its second batch.

torchrun --nproc-per-node 2 failing_rank.py eval ARGUMENTS
"""

import os

from kvsparse_hf import KVSparseError
from kvsparse_hf.cli import app
from kvsparse_hf.eval.engine import Engine

answer, batches = Engine.answer, []


def failing(self, examples, cache):
    batches.append(examples)
    if os.environ["RANK"] == "1" and len(batches) == 2:
        raise KVSparseError("this rank fails on purpose")
    return answer(self, examples, cache)


if __name__ == "__main__":
    Engine.answer = failing
    app()
