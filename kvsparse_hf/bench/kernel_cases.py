"""The cases of the kernel benchmark: inputs, backends, and the check against the fp32 reference."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from .. import ops

HEADS_Q, HEADS, DIM = 32, 8, 128  # the shape of Llama-3.1-8B
SCALE = DIM**-0.5
PAGE = 16
BUDGET = 2048
BF16 = torch.bfloat16


@dataclass
class Case:
    """One op on one shape.

    Attributes:
        name: "<op>/<mode>".
        nbytes: bytes the op must move, once each; 0 where that says nothing about its speed.
        footprint: bytes of the inputs.
        make: fresh inputs.
        backends: name -> function of the inputs.
        check: (inputs, result) -> relative error against the reference.
    """

    name: str
    shape: dict
    nbytes: int
    footprint: int
    make: Callable[[], tuple]
    backends: dict[str, Callable]
    check: Callable[[tuple, object], float]


def relative_error(got: Tensor, expected: Tensor) -> float:
    """In norm over what is finite; NaN when something is finite in one and not in the other."""
    finite = expected.isfinite()
    if not torch.equal(got.isfinite(), finite):
        return float("nan")
    got, expected = torch.where(finite, got, 0).double(), torch.where(finite, expected, 0).double()
    return ((got - expected).norm() / expected.norm().clamp(min=1e-30)).item()


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=BF16, device="cuda")


def _random_rows(count: int, of: int, take: int) -> Tensor:
    """[count, take] distinct ascending indices below ``of``."""
    return torch.stack([torch.randperm(of, device="cuda")[:take].sort().values for _ in range(count)])


# decode attention


def _decode_inputs(batch: int, length: int, ragged: bool = False, pages: int = 0) -> tuple:
    units = batch * HEADS
    start = (torch.arange(units, device="cuda") * length).view(batch, HEADS)
    lengths = torch.full((batch, HEADS), length, dtype=torch.int32, device="cuda")
    if ragged:
        lengths = (torch.linspace(0.05, 0.95, units, device="cuda").view(batch, HEADS) * length).int()
    table = _random_rows(units, length // PAGE, pages).view(batch, HEADS, pages).int() if pages else None
    rows = units * length
    return random(batch, HEADS_Q, DIM), random(rows, DIM), random(rows, DIM), start, lengths, table


def _decode(inputs: tuple, length: int, backend: str) -> Tensor:
    q, k, v, start, lengths, table = inputs
    return ops.decode_attention(q, k, v, start, lengths, max_len=length, scale=SCALE, pages=table,
                                page_size=0 if table is None else PAGE, backend=backend)[0]


def _check_decode(inputs: tuple, got: Tensor, length: int) -> float:
    """The first and the last row of the batch, one at a time: the reference copies what it reads in fp32."""
    q, k, v, start, lengths, table = inputs
    errors = []
    for b in {0, len(q) - 1}:
        rows = slice(b, b + 1)
        one = (q[rows], k, v, start[rows], lengths[rows], None if table is None else table[rows])
        errors.append(relative_error(got[rows], _decode(one, length, "torch")))
    return max(errors)


def _sdpa(inputs: tuple, length: int, backend: SDPBackend) -> Tensor:
    q, k, v, start, *_ = inputs
    dense = (*start.shape, length, DIM)
    with sdpa_kernel(backend):
        return torch.nn.functional.scaled_dot_product_attention(
            q.unsqueeze(2), k.view(dense), v.view(dense), scale=SCALE, enable_gqa=True).squeeze(2)


def _flashinfer(inputs: tuple, length: int) -> Tensor:
    import flashinfer

    q, k, v, *_ = inputs
    if len(q) != 1:
        raise ops.BackendError("flashinfer's kernel for a single request takes batch 1")
    dense = (HEADS, length, DIM)
    return flashinfer.single_decode_with_kv_cache(q[0], k.view(dense), v.view(dense), kv_layout="HND",
                                                  use_tensor_cores=True, sm_scale=SCALE).unsqueeze(0)


def _flash_name() -> str:
    return "fa3" if importlib.util.find_spec("flash_attn_interface") else "fa2-aten"


def decode_cases() -> Iterator[Case]:
    token_bytes = HEADS * DIM * 4  # keys and values
    for length in (2048, 8192, 32768, 131072):
        for batch in (1, 8, 32):
            backends = {
                "triton": functools.partial(_decode, length=length, backend="triton"),
                _flash_name(): functools.partial(_decode, length=length, backend="flash"),
                "sdpa-flash": functools.partial(_sdpa, length=length, backend=SDPBackend.FLASH_ATTENTION),
                "sdpa-cudnn": functools.partial(_sdpa, length=length, backend=SDPBackend.CUDNN_ATTENTION),
            }
            if importlib.util.find_spec("flashinfer"):
                backends["flashinfer"] = functools.partial(_flashinfer, length=length)
            size = batch * length * token_bytes
            shape = {"batch": batch, "context": length, "heads_q": HEADS_Q, "heads": HEADS, "dim": DIM}
            yield Case("decode_attention/dense", shape, size, size, functools.partial(_decode_inputs, batch, length),
                       backends, functools.partial(_check_decode, length=length))
    for batch, mean in ((1, 2048), (8, 2048), (32, 2048), (8, 16384)):
        capacity = 2 * mean
        shape = {"batch": batch, "context": mean, "capacity": capacity, "lengths": "0.1 to 1.9 of the mean"}
        yield Case(
            "decode_attention/ragged", shape, batch * mean * token_bytes, batch * capacity * token_bytes,
            functools.partial(_decode_inputs, batch, capacity, ragged=True),
            {name: functools.partial(_decode, length=capacity, backend=backend)
             for name, backend in (("triton", "triton"), (_flash_name(), "flash"))},
            functools.partial(_check_decode, length=capacity),
        )
    for batch, length in ((1, 32768), (8, 32768), (32, 32768)):
        shape = {"batch": batch, "context": length, "budget": BUDGET, "page": PAGE}
        yield Case("decode_attention/pages", shape, batch * BUDGET * token_bytes, batch * BUDGET * token_bytes,
                   functools.partial(_decode_inputs, batch, length, pages=BUDGET // PAGE),
                   {"triton": functools.partial(_decode, length=length, backend="triton")},
                   functools.partial(_check_decode, length=length))


# what happens once a prompt


def _score_inputs(length: int, window: int) -> tuple:
    return random(1, HEADS_Q, window, DIM), random(1, HEADS, length, DIM)


def _scores(inputs: tuple, op: Callable, backend: str) -> Tensor:
    return op(*inputs, scale=SCALE, backend=backend)


def _given_lse_inputs(length: int) -> tuple:
    """As after an attention kernel that told the softmax denominators."""
    lse = torch.arange(1, length + 1, device="cuda").log() + 0.5
    return *_score_inputs(length, length), lse.expand(1, HEADS_Q, length).contiguous()


def _given_lse(inputs: tuple, backend: str) -> Tensor:
    q, k, lse = inputs
    return ops.column_sums(q, k, scale=SCALE, lse=lse, backend=backend)


def _gather_inputs(length: int) -> tuple:
    index = _random_rows(HEADS, length, BUDGET).unsqueeze(0)
    start = (torch.arange(HEADS, device="cuda") * BUDGET).unsqueeze(0)
    source = (random(1, HEADS, length, DIM), random(1, HEADS, length, DIM))
    return *source, index, start, random(HEADS * BUDGET, DIM), random(HEADS * BUDGET, DIM)


def _gather(inputs: tuple) -> tuple:
    ops.gather_rows(*inputs, backend="triton")
    return inputs[4:]


def _check_gather(inputs: tuple, got: tuple) -> float:
    pick = inputs[2].unsqueeze(-1).expand(-1, -1, -1, DIM)
    expected = [source.gather(2, pick).flatten(0, 2) for source in inputs[:2]]
    return max(relative_error(a, b) for a, b in zip(got, expected, strict=True))


def _chunk_inputs(tokens: int, stored: int) -> tuple:
    return _decode_inputs(1, stored), random(1, HEADS_Q, tokens, DIM), random(1, HEADS, tokens, DIM)


def _chunk(inputs: tuple, backend: str) -> Tensor:
    (_, k, v, start, lengths, _), q, new = inputs
    return ops.chunk_attention(q, k, v, start, lengths, new, new, max_len=len(k) // HEADS, scale=SCALE,
                               backend=backend)


def prompt_cases() -> Iterator[Case]:
    key_bytes = HEADS * DIM * 2
    for op, lengths, window in ((ops.window_scores, (8192, 32768, 131072), 32), (ops.column_sums, (4096, 16384), 0)):
        for length in lengths:
            shape = {"batch": 1, "context": length} | ({"window": window} if window else {})
            yield Case(f"{op.__name__}/mean", shape, length * key_bytes if window else 0, length * key_bytes,
                       functools.partial(_score_inputs, length, window or length),
                       {"triton": functools.partial(_scores, op=op, backend="triton")},
                       lambda inputs, got, op=op: relative_error(got, _scores(inputs, op, "torch")))
    for length in (4096, 16384):
        yield Case("column_sums/given_lse", {"batch": 1, "context": length}, 0, length * key_bytes,
                   functools.partial(_given_lse_inputs, length),
                   {"triton": functools.partial(_given_lse, backend="triton")},
                   lambda inputs, got: relative_error(got, _given_lse(inputs, "torch")))
    for length in (8192, 32768):
        yield Case("gather_rows/-", {"batch": 1, "context": length, "budget": BUDGET}, 4 * BUDGET * key_bytes,
                   2 * length * key_bytes, functools.partial(_gather_inputs, length), {"triton": _gather},
                   _check_gather)
    for tokens, stored in ((8, 32768), (512, 32768), (2048, 8192)):
        yield Case("chunk_attention/-", {"batch": 1, "context": stored, "tokens": tokens}, 0, 2 * stored * key_bytes,
                   functools.partial(_chunk_inputs, tokens, stored),
                   {"triton": functools.partial(_chunk, backend="triton")},
                   lambda inputs, got: relative_error(got, _chunk(inputs, "torch")))


def _store_inputs(batch: int) -> tuple:
    """A full store, so that a token overwrites the first slot that is not pinned."""
    capacity, units = BUDGET + PAGE, batch * HEADS
    full = torch.full((batch, HEADS), capacity, dtype=torch.int32, device="cuda")
    start = (torch.arange(units, device="cuda") * capacity).view(batch, HEADS)
    summary = torch.zeros(batch, HEADS, capacity // PAGE, 2, DIM, dtype=BF16, device="cuda")
    position = torch.full((batch,), 7, dtype=torch.int32, device="cuda")
    return (random(units * capacity, DIM), random(units * capacity, DIM), position.new_zeros(units * capacity),
            random(batch, HEADS, DIM), random(batch, HEADS, DIM), position, start, full, full.clone(),
            torch.full_like(full, 4), torch.zeros_like(full), None, summary, PAGE)


def _check_store(inputs: tuple, _result: None) -> float:
    rows = (inputs[6] + 4).flatten()
    return max(relative_error(inputs[i][rows], inputs[i + 3].flatten(0, 1)) for i in (0, 1))


def store_cases() -> Iterator[Case]:
    for batch in (1, 32):
        yield Case("store_token/summary", {"batch": batch}, 0, batch * HEADS * BUDGET * DIM * 4,
                   functools.partial(_store_inputs, batch),
                   {"triton": lambda inputs: ops.store_token(*inputs, backend="triton")}, _check_store)


def linear_cases() -> Iterator[Case]:
    """The products of a decoder layer: q/k/v at once, o, gate/up at once, down."""
    for features, inner in ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)):
        for rows in (2, 8, 16):
            size = features * inner * 2
            yield Case("few_rows_linear/-", {"batch": rows, "features": features, "inner": inner}, size, size,
                       functools.partial(_linear_inputs, rows, features, inner),
                       {"triton": lambda inputs: ops.few_rows_linear(*inputs, backend="triton"),
                        "torch": lambda inputs: torch.nn.functional.linear(*inputs)},
                       lambda inputs, got: relative_error(got, ops.few_rows_linear(*inputs, backend="torch")))


def _linear_inputs(rows: int, features: int, inner: int) -> tuple:
    return random(rows, inner), random(features, inner)
