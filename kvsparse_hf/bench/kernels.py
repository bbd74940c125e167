"""Benchmark of the kernels: each is checked against the fp32 reference in the same run, then timed cold.

Suite ``kernels``, cases ``<op>/<mode>/<backend>``, metrics ``us`` and ``TB_per_s`` (bytes the op must move, once each).
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import pathlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from .. import ops
from .timing import Results, cold_copies, time_graph

HEADS_Q, HEADS, DIM = 32, 8, 128  # the shape of Llama-3.1-8B
SCALE = DIM**-0.5
BF16 = torch.bfloat16
LIMIT = 1e-2  # relative error in norm, bf16


@dataclass
class Case:
    """One op on one shape.

    make(): fresh inputs; backends: name -> function of the inputs; check(inputs, result): relative error.
    """

    name: str
    shape: dict
    nbytes: int
    make: Callable[[], tuple]
    backends: dict[str, Callable]
    check: Callable[[tuple, object], float]
    footprint: int = field(default=0)

    def __post_init__(self):
        self.footprint = self.footprint or self.nbytes


def _randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=BF16, device="cuda")


def _error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative error in norm; infinities must agree, NaN gives NaN."""
    finite = expected.isfinite()
    if not torch.equal(got.isfinite(), finite):
        return float("nan")
    got, expected = torch.where(finite, got, 0).double(), torch.where(finite, expected, 0).double()
    return ((got - expected).norm() / expected.norm().clamp(min=1e-30)).item()


def _decode_inputs(batch: int, length: int, ragged: bool = False, pages: int = 0, page_size: int = 16) -> tuple:
    rows = batch * HEADS * length
    start = (torch.arange(batch * HEADS, device="cuda") * length).view(batch, HEADS)
    lengths = torch.full((batch, HEADS), length, dtype=torch.int32, device="cuda")
    if ragged:  # from a tenth to nineteen tenths of the mean, within twice the mean
        share = torch.linspace(0.05, 0.95, batch * HEADS, device="cuda").view(batch, HEADS)
        lengths = (share * length).int()
    table = None
    if pages:
        chosen = [torch.randperm(length // page_size, device="cuda")[:pages].sort().values for _ in range(len(start.flatten()))]
        table = torch.stack(chosen).view(batch, HEADS, pages).int()
    return _randn(batch, HEADS_Q, DIM), _randn(rows, DIM), _randn(rows, DIM), start, lengths, table


def _decode(inputs: tuple, length: int, backend: str, page_size: int = 0) -> torch.Tensor:
    q, k, v, start, lengths, table = inputs
    return ops.decode_attention(q, k, v, start, lengths, max_len=length, scale=SCALE, pages=table,
                                page_size=page_size if table is not None else 0, backend=backend)[0]


def _check_decode(inputs: tuple, got: torch.Tensor, length: int, page_size: int = 0) -> float:
    """The first and the last row of the batch against the reference, one at a time: its fp32 copies are large."""
    q, k, v, start, lengths, table = inputs
    errors = []
    for b in {0, len(q) - 1}:
        rows = slice(b, b + 1)
        one = (q[rows], k, v, start[rows], lengths[rows], None if table is None else table[rows])
        errors.append(_error(got[rows], _decode(one, length, "torch", page_size)))
    return max(errors)


def _sdpa(inputs: tuple, length: int, backend: SDPBackend) -> torch.Tensor:
    q, k, v, start, *_ = inputs
    dense = (*start.shape, length, DIM)
    with sdpa_kernel(backend):
        return torch.nn.functional.scaled_dot_product_attention(
            q.unsqueeze(2), k.view(dense), v.view(dense), scale=SCALE, enable_gqa=True).squeeze(2)


def _decode_cases(quick: bool) -> Iterator[Case]:
    shapes = [(1, 2048), (8, 2048), (32, 2048)]
    shapes += [(b, n) for b in (1, 8, 32) for n in (8192, 32768, 131072) if b * n <= 32 * 131072]
    for batch, length in shapes[:4] if quick else shapes:
        decode = functools.partial(_decode, length=length)
        backends = {
            "triton": functools.partial(decode, backend="triton"),
            "fa2-aten": functools.partial(decode, backend="flash"),
            "sdpa-flash": functools.partial(_sdpa, length=length, backend=SDPBackend.FLASH_ATTENTION),
            "sdpa-cudnn": functools.partial(_sdpa, length=length, backend=SDPBackend.CUDNN_ATTENTION),
        }
        if importlib.util.find_spec("flash_attn_interface"):
            backends["fa3"] = backends.pop("fa2-aten")
        if importlib.util.find_spec("flashinfer"):
            backends["flashinfer"] = functools.partial(_flashinfer, length=length)
        nbytes = batch * HEADS * length * DIM * 4
        shape = {"batch": batch, "context": length, "heads_q": HEADS_Q, "heads": HEADS, "dim": DIM}
        yield Case("decode_attention/dense", shape, nbytes, functools.partial(_decode_inputs, batch, length),
                   backends, functools.partial(_check_decode, length=length))
    for batch, mean in [(1, 2048), (8, 2048), (32, 2048), (8, 16384)][: 1 if quick else None]:
        capacity = 2 * mean
        decode = functools.partial(_decode, length=capacity)
        shape = {"batch": batch, "context": mean, "capacity": capacity, "lengths": "0.1x to 1.9x of the mean"}
        yield Case("decode_attention/ragged", shape, batch * HEADS * mean * DIM * 4,
                   functools.partial(_decode_inputs, batch, capacity, ragged=True),
                   {name: functools.partial(decode, backend=backend)
                    for name, backend in (("triton", "triton"), ("fa2-aten", "flash"))},
                   functools.partial(_check_decode, length=capacity), footprint=batch * HEADS * capacity * DIM * 4)
    for batch, length in [(1, 32768), (8, 32768), (32, 32768)][: 1 if quick else None]:
        shape = {"batch": batch, "context": length, "budget": 2048, "page": 16}
        yield Case("decode_attention/pages", shape, batch * HEADS * 2048 * DIM * 4,
                   functools.partial(_decode_inputs, batch, length, pages=128),
                   {"triton": functools.partial(_decode, length=length, backend="triton", page_size=16)},
                   functools.partial(_check_decode, length=length, page_size=16))


def _flashinfer(inputs: tuple, length: int) -> torch.Tensor:
    import flashinfer

    q, k, v, start, *_ = inputs
    if len(q) != 1:
        raise ops.BackendError("the single-request kernel of flashinfer takes batch 1")
    dense = (HEADS, length, DIM)
    return flashinfer.single_decode_with_kv_cache(q[0], k.view(dense), v.view(dense), kv_layout="HND",
                                                  use_tensor_cores=True, sm_scale=SCALE).unsqueeze(0)


def _page_inputs(batch: int, pages: int) -> tuple:
    summary = _randn(batch, HEADS, pages, 2, DIM).sort(3, descending=True).values
    return _randn(batch, HEADS_Q, DIM), summary, torch.full((batch, HEADS), pages * 16, dtype=torch.int32, device="cuda")


def _page_scores(inputs: tuple, how: str, backend: str = "triton") -> torch.Tensor:
    return ops.page_scores(*inputs, page_size=16, scale=SCALE, group_reduce=how, backend=backend)


def _selection_cases(quick: bool) -> Iterator[Case]:
    for batch, pages in [(1, 2048), (1, 8192), (8, 2048), (8, 8192)][: 1 if quick else None]:
        shape = {"batch": batch, "context": pages * 16, "page": 16, "pages": pages}
        for how, mode in (("softmax_mean", "softmax_mean"), ("max", "max")):
            yield Case(f"page_scores/{mode}", shape, batch * HEADS * pages * DIM * 4,
                       functools.partial(_page_inputs, batch, pages), {"triton": functools.partial(_page_scores, how=how)},
                       lambda inputs, got, how=how: _error(got, _page_scores(inputs, how, "torch")))
        k = 128
        yield Case("topk_pages/-", shape | {"k": k}, 0, lambda b=batch, p=pages: (torch.rand(b, HEADS, p, device="cuda"),),
                   {"triton": lambda inputs: ops.topk_pages(inputs[0], k, backend="triton"),
                    "torch": lambda inputs: torch.topk(inputs[0], k, dim=-1, sorted=False).indices.sort(-1).values.int(),
                    "torch-unsorted": lambda inputs: torch.topk(inputs[0], k, dim=-1, sorted=False).indices},
                   lambda inputs, got: _error(got.sort(-1).values, ops.topk_pages(inputs[0], k, backend="torch")),
                   footprint=batch * HEADS * pages * 4)


def _score_inputs(length: int, window: int) -> tuple:
    return _randn(1, HEADS_Q, window, DIM), _randn(1, HEADS, length, DIM)


def _prompt_cases(quick: bool) -> Iterator[Case]:
    for length in (8192, 32768, 131072)[: 1 if quick else None]:
        shape = {"batch": 1, "context": length, "window": 32}
        yield Case("window_scores/mean", shape, HEADS * length * DIM * 2,
                   functools.partial(_score_inputs, length, 32),
                   {"triton": lambda inputs: ops.window_scores(*inputs, scale=SCALE, backend="triton")},
                   lambda inputs, got: _error(got, ops.window_scores(*inputs, scale=SCALE, backend="torch")))
        yield Case("gather_rows/-", {"batch": 1, "context": length, "budget": 2048}, 2 * HEADS * 2048 * DIM * 4,
                   functools.partial(_gather_inputs, length), {"triton": _gather}, _check_gather,
                   footprint=HEADS * length * DIM * 4)
    for length in (4096, 16384)[: 1 if quick else None]:
        yield Case("column_sums/mean", {"batch": 1, "context": length}, 0,
                   functools.partial(_score_inputs, length, length),
                   {"triton": lambda inputs: ops.column_sums(*inputs, scale=SCALE, backend="triton")},
                   lambda inputs, got: _error(got, ops.column_sums(*inputs, scale=SCALE, backend="torch")),
                   footprint=HEADS * length * DIM * 2)
    for tokens, stored in [(8, 32768), (512, 32768), (2048, 8192)][: 1 if quick else None]:
        yield Case("chunk_attention/-", {"batch": 1, "context": stored, "tokens": tokens}, HEADS * stored * DIM * 4,
                   lambda t=tokens, s=stored: (_decode_inputs(1, s), _randn(1, HEADS_Q, t, DIM), _randn(1, HEADS, t, DIM)),
                   {"triton": _chunk}, lambda inputs, got: _error(got, _chunk(inputs, "torch")))


def _chunk(inputs: tuple, backend: str = "triton") -> torch.Tensor:
    (_, k, v, start, lengths, _), q, new = inputs
    return ops.chunk_attention(q, k, v, start, lengths, new, new, max_len=len(k) // HEADS, scale=SCALE, backend=backend)


def _gather_inputs(length: int) -> tuple:
    source = _randn(1, HEADS, length, DIM), _randn(1, HEADS, length, DIM)
    index = torch.stack([torch.randperm(length, device="cuda")[:2048].sort().values for _ in range(HEADS)]).unsqueeze(0)
    start = (torch.arange(HEADS, device="cuda") * 2048).unsqueeze(0)
    return *source, index, start, _randn(HEADS * 2048, DIM), _randn(HEADS * 2048, DIM)


def _gather(inputs: tuple) -> tuple:
    ops.gather_rows(*inputs, backend="triton")
    return inputs[4:]


def _check_gather(inputs: tuple, got: tuple) -> float:
    source_k, source_v, index = inputs[:3]
    pick = index.unsqueeze(-1).expand(-1, -1, -1, DIM)
    return max(_error(dst, src.gather(2, pick).flatten(0, 2)) for dst, src in zip(got, (source_k, source_v), strict=True))


def _store_inputs(batch: int) -> tuple:
    capacity = 2064
    per_head = torch.zeros(batch, HEADS, dtype=torch.int32, device="cuda")
    rows = batch * HEADS * capacity
    start = (torch.arange(batch * HEADS, device="cuda") * capacity).view(batch, HEADS)
    return (_randn(rows, DIM), _randn(rows, DIM), torch.zeros(rows, dtype=torch.int32, device="cuda"),
            _randn(batch, HEADS, DIM), _randn(batch, HEADS, DIM), per_head[:, 0] + 7, start, per_head + capacity,
            per_head + capacity, per_head + 4, per_head.clone(), None,
            torch.zeros(batch, HEADS, capacity // 16, 2, DIM, dtype=BF16, device="cuda"), 16)


def _store_cases(quick: bool) -> Iterator[Case]:
    for batch in (1, 32)[: 1 if quick else None]:
        def check(inputs, _):
            rows = (inputs[6] + 4).flatten()  # the first overwritten slot is the first one that is not pinned
            return max(_error(inputs[i][rows], inputs[i + 3].flatten(0, 1)) for i in (0, 1))

        yield Case("store_token/summary", {"batch": batch}, 0, functools.partial(_store_inputs, batch),
                   {"triton": lambda inputs: ops.store_token(*inputs, backend="triton")}, check,
                   footprint=batch * HEADS * 2064 * DIM * 4)


def _run_case(case: Case, results: Results, log: Callable[[str], None]) -> None:
    for name, function in case.backends.items():
        label = f"{case.name}/{name}"
        try:
            copies = [case.make() for _ in range(cold_copies(case.footprint))]
            error = case.check(copies[0], function(copies[0]))
            if not error <= LIMIT:
                raise AssertionError(f"{label} {case.shape}: relative error {error:.3g} against the reference")
            timing = time_graph([functools.partial(function, inputs) for inputs in copies])
        except (RuntimeError, ops.BackendError) as problem:  # a backend that cannot run here is reported, not timed
            log(f"{label:38s} {_short(case.shape)}: not run: {str(problem).splitlines()[0][:100]}")
            continue
        finally:
            copies = None
            torch.cuda.empty_cache()
        results.add_timing(label, timing, case.nbytes, case.shape)
        speed = f"{timing.bandwidth(case.nbytes):6.2f} TB/s" if case.nbytes else ""
        log(f"{label:38s} {_short(case.shape)} {timing.us:10.2f} us {speed}  error {error:.1e}")


def _short(shape: dict) -> str:
    return " ".join(f"{name}={value}" for name, value in shape.items() if name in ("batch", "context", "pages", "tokens"))


@contextlib.contextmanager
def _progress(total: int) -> Iterator[tuple[Callable[[str], None], Callable[[], None]]]:
    """A progress bar where rich is installed: yields a function that prints a line and one that advances."""
    try:
        from rich.progress import Progress
    except ImportError:
        yield print, lambda: None
        return
    with Progress() as progress:
        task = progress.add_task("kernels", total=total)
        yield functools.partial(progress.console.print, highlight=False), lambda: progress.advance(task)


def _plot(rows: list[dict], path: pathlib.Path) -> None:
    """Bandwidth of the dense decode backends, where matplotlib is installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    dense = [r for r in rows if r["metric"] == "TB_per_s" and r["case"].startswith("decode_attention/dense/")]
    shapes = list(dict.fromkeys((r["shape"]["batch"], r["shape"]["context"]) for r in dense))
    names = list(dict.fromkeys(r["case"].rsplit("/", 1)[1] for r in dense))
    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots()
    for i, name in enumerate(names):
        values = {(r["shape"]["batch"], r["shape"]["context"]): r["value"] for r in dense if r["case"].endswith("/" + name)}
        axes.bar([x + (i - len(names) / 2 + 0.5) * 0.8 / len(names) for x in range(len(shapes))],
                 [values.get(shape, 0) for shape in shapes], 0.8 / len(names), label=name)
    axes.set_xticks(range(len(shapes)), [f"{n // 1024}K\nB={b}" for b, n in shapes])
    axes.set_ylabel("TB/s")
    axes.set_title("Decode attention, 32 query and 8 KV heads of 128, bf16")
    axes.legend()
    figure.savefig(path, dpi=130)


def run(output: str | pathlib.Path = "examples/results", quick: bool = False, only: str = "") -> list[dict]:
    """Check and time the kernels; append rows to ``<output>/kernels.jsonl`` and draw ``kernels.png`` beside it.

    Args:
        quick: one shape of each op.
        only: run only cases whose name contains this.

    Returns:
        The rows of this run.
    """
    if not torch.cuda.is_available():
        raise ops.BackendError("the kernel benchmark needs a CUDA device")
    groups = (_decode_cases, _selection_cases, _prompt_cases, _store_cases)
    cases = [case for group in groups for case in group(quick) if only in case.name]
    results = Results(output, "kernels")
    with torch.no_grad(), _progress(len(cases)) as (log, advance):
        for case in cases:
            torch.manual_seed(0)
            _run_case(case, results, log)
            advance()
    _plot(results.rows, pathlib.Path(output) / "kernels.png")
    return results.rows
