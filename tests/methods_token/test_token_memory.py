"""What a long prompt costs while it is compressed."""

import weakref

import pytest
import torch
from token_driver import tiny_config
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaForCausalLM

from kvsparse_hf import FullCache, H2OCache, RKVCache, ScissorhandsCache
from kvsparse_hf.hf.compat import CACHE_ARGUMENT


class PeakMemory(TorchDispatchMode):
    """Bytes of all tensor storages alive at once that were made in the block."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self.largest = 0
        self.known = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return out

    def _count(self, storage) -> None:
        key = storage._cdata
        if key in self.known:
            return
        size = storage.nbytes()
        self.known[key] = size
        self.now += size
        self.largest = max(self.largest, size)
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._free, key)

    def _free(self, key) -> None:
        self.now -= self.known.pop(key, 0)


def prefill(cache_class, length, **options) -> PeakMemory:
    torch.manual_seed(0)
    model = LlamaForCausalLM(tiny_config(2, 1, dim=64, layers=2)).eval()
    cache = cache_class(model, **options)
    ids = torch.randint(0, 16, (1, length))
    with PeakMemory() as memory:
        model(ids, logits_to_keep=1, **{CACHE_ARGUMENT: cache})
    return memory


def test_h2o_reads_16k_tokens_in_linear_memory():
    """16384² weights of two heads in fp32 alone would be 2 GiB."""
    full, h2o = prefill(FullCache, 16384), prefill(H2OCache, 16384, budget=1024)
    extra = h2o.peak - full.peak
    assert extra < 2**30, f"{extra / 2**20:.0f} MiB"
    assert h2o.largest < 16384 * 16384 * 4 / 4


@pytest.mark.parametrize("method", [ScissorhandsCache, RKVCache])
def test_other_scorers_make_no_square_matrix(method):
    memory = prefill(method, 4096, budget=256)
    assert memory.peak < 2**30
