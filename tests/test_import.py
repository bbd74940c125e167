"""`import kvsparse_hf` needs no Triton, no network and no GPU, and changes nothing in Transformers."""

import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).parent.parent


def _run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_without_triton_network_and_gpu():
    out = _run(
        """
        import socket, sys

        for name in ("triton", "flash_attn", "datasets", "evaluate", "lm_eval", "matplotlib", "rapidfuzz", "rouge"):
            sys.modules[name] = None  # importing it now raises ModuleNotFoundError

        def refuse(*args, **kwargs):
            raise AssertionError("network")

        socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse
        import transformers
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

        before = dict(ALL_ATTENTION_FUNCTIONS), dict(ALL_MASK_ATTENTION_FUNCTIONS), dict(vars(transformers.GenerationMixin))
        import kvsparse_hf
        import kvsparse_hf.eval.command
        import torch

        after = dict(ALL_ATTENTION_FUNCTIONS), dict(ALL_MASK_ATTENTION_FUNCTIONS), dict(vars(transformers.GenerationMixin))
        assert before == after, "import registered or patched something"
        assert not torch.cuda.is_initialized()
        assert sys.modules["triton"] is None
        config = transformers.LlamaConfig(vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                                          num_attention_heads=2, num_key_value_heads=1, pad_token_id=0, eos_token_id=None)
        model = transformers.LlamaForCausalLM(config).eval()
        ids = torch.arange(3, 40)[None]
        for name in kvsparse_hf.list_presets():
            assert isinstance(name, str)
        cache = kvsparse_hf.SnapKVCache(model, budget=12, window=4)
        from kvsparse_hf.hf.compat import CACHE_ARGUMENT
        print(model.generate(ids, max_new_tokens=4, do_sample=False, **{CACHE_ARGUMENT: cache}).shape[1])
        """
    )
    assert out.strip().splitlines()[-1] == "41"


def test_public_names_exist():
    import kvsparse_hf

    assert all(hasattr(kvsparse_hf, name) for name in kvsparse_hf.__all__)
    assert sorted(kvsparse_hf.__all__) == list(dict.fromkeys(sorted(kvsparse_hf.__all__)))
    for name in kvsparse_hf.list_methods():
        cls = kvsparse_hf.get_method(name)
        assert cls.method == name and getattr(kvsparse_hf, cls.__name__) is cls
        assert cls.action in {"none", "evict", "offload", "quantize", "skip", "share"}
        assert all(field.description for field in cls.Options.model_fields.values())
