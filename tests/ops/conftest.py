"""Where the op tests run: the torch reference on the CPU, the Triton kernels in the interpreter, and on a GPU.

    pytest tests/ops                      references
    TRITON_INTERPRET=1 pytest tests/ops   references and kernels, small shapes
    pytest tests/ops -m gpu               kernels on a GPU, small and real shapes
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from kvsparse_hf.ops.backend import HAS_TRITON, interpreting


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs a CUDA device")
    if interpreting():
        _let_the_interpreter_count()
        for expected in ("All-NaN slice", "overflow encountered in exp2"):  # numpy on what the tests provoke
            config.addinivalue_line("filterwarnings", f"ignore:{expected}:RuntimeWarning")


def _let_the_interpreter_count() -> None:
    """Triton 3.6's interpreter holds loop bounds in arrays of one element, which numpy >= 2.4 makes no ints of."""
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patched


@dataclass(frozen=True)
class Target:
    backend: str
    device: str

    def runnable(self, dtype: torch.dtype) -> torch.dtype:
        """The interpreter computes with numpy, which has no bfloat16: there float16 stands in for it."""
        interpreted = self.backend == "triton" and self.device == "cpu"
        return torch.float16 if interpreted and dtype == torch.bfloat16 else dtype


def require_cuda() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    if interpreting():
        pytest.skip("TRITON_INTERPRET is set: kernels do not run on the GPU")


def require_interpreter() -> None:
    if not HAS_TRITON:
        pytest.skip("triton is not installed")
    if not interpreting():
        pytest.skip("set TRITON_INTERPRET=1 to run the Triton kernels on the CPU")


@pytest.fixture(
    params=[
        pytest.param(Target("torch", "cpu"), id="torch"),
        pytest.param(Target("triton", "cpu"), id="interpreter"),
        pytest.param(Target("triton", "cuda"), id="gpu", marks=pytest.mark.gpu),
    ]
)
def target(request) -> Target:
    """Every test body that takes ``target`` checks the reference and the kernel against the same oracle."""
    if request.param.device == "cuda":
        require_cuda()
    elif request.param.backend == "triton":
        require_interpreter()
    return request.param


@pytest.fixture
def cuda() -> str:
    require_cuda()
    return "cuda"


@pytest.fixture(autouse=True)
def _one_thread_one_seed_and_poisoned_memory():
    """Besides the seed: fresh tensors are full of NaN, so that whatever a kernel leaves unwritten shows."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)


@pytest.fixture
def interpreter_only() -> None:
    require_interpreter()
