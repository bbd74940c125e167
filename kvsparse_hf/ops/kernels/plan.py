"""Static launch plans: tile sizes and splits from shapes alone, so that they never change under a captured graph."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

TOPK_MOST = 16384  # scores of a row that fit the registers of one program
_WAVE = 2  # programs a multiprocessor holds at once, and needs to be kept busy; the lighter decode kernel fits 3 times


@dataclass(frozen=True)
class Tile:
    """Keys per tile, warps of a program, and pipeline depth."""

    keys: int
    warps: int
    stages: int


@dataclass(frozen=True)
class SplitPlan:
    """How a walk over the keys is cut: ``splits`` programs of ``tokens`` keys each, in tiles."""

    tile: Tile
    tokens: int
    splits: int


def _decode_tile(dim: int, itemsize: int, tokens: int, crowd: float, paged: bool) -> Tile:
    """dim: the larger head size as a power of two; tokens: keys of a walk; crowd: programs per multiprocessor."""
    if itemsize == 4:
        return Tile(keys=32 if dim <= 128 else 16, warps=4, stages=2)
    if paged:
        if 64 < dim <= 128:
            return Tile(keys=64, warps=2, stages=3)
        return Tile(keys=64 if tokens <= 64 or dim > 128 else 128, warps=4, stages=2)
    if dim > 128:
        return Tile(keys=32, warps=4, stages=3)
    if tokens <= 64:
        return Tile(keys=64, warps=2, stages=3)
    if dim <= 64:
        return Tile(keys=128, warps=4, stages=3)
    # as deep as lets all programs be on the chip at once: 2, 3 or 5 of them fit a multiprocessor
    return Tile(keys=64, warps=4, stages=4 if crowd <= 2 else 2 if 3 < crowd <= 5 else 3)


def _even_splits(total: int, most: int, least: int, unit: int) -> tuple[int, int]:
    """Cut ``total`` in pieces of a multiple of ``unit``: size and count of the finest even cut in least .. most."""
    cuts = []
    for count in range(most, least - 1, -1):
        size = -(-total // (count * unit)) * unit
        cuts.append((size, -(-total // size)))
        if cuts[-1][0] * cuts[-1][1] <= 1.05 * total:
            return cuts[-1]
    return min(cuts, key=lambda cut: cut[0] * cut[1])


@cache
def plan_decode(
    max_len: int, units: int, dim: int, itemsize: int, multiprocessors: int, paged: bool = False
) -> SplitPlan:
    """Splits of decode attention.

    Args:
        max_len: largest number of keys a KV head can hold.
        units: batch rows times KV heads.
        dim: the larger head size, padded to a power of two.
        itemsize: bytes of a stored element.
        paged: the keys are pages from all over the segment.

    A fixed number of *tokens* per split, not a fixed number of splits, keeps unequal heads balanced. All programs run
    at once, because a second, partly filled wave costs more than longer walks do; and there are enough of them that
    half still fill the chip, because lengths may be far below max_len.
    """
    max_len = max(1, max_len)
    most = max(1, (_WAVE if paged else 3) * multiprocessors // units)
    least = max(1, _WAVE * multiprocessors // units)
    tokens, splits = _even_splits(max_len, most, least, 64)
    tile = _decode_tile(dim, itemsize, tokens, units / multiprocessors if splits == 1 else 3, paged)
    tokens = -(-tokens // tile.keys) * tile.keys
    return SplitPlan(tile, tokens, -(-max_len // tokens))


@dataclass(frozen=True)
class ChunkPlan:
    """Query rows of a program, and the split plan of the keys (the last split is the new tokens')."""

    rows: int
    tile: Tile
    tokens: int
    splits: int


@cache
def plan_chunk(
    max_len: int, rows: int, units: int, dim: int, itemsize: int, multiprocessors: int
) -> ChunkPlan:
    """Splits of chunk attention.

    Args:
        max_len: largest number of stored keys of a KV head.
        rows: query rows of a KV head, tokens times group.
        units, dim, itemsize: as in :func:`plan_decode`.

    Few query rows leave multiprocessors idle, so the stored keys are split as in decoding; many fill them alone.
    """
    if itemsize == 4:
        block, tile = 16, Tile(keys=16, warps=4, stages=2)
    elif rows <= 16:
        block, tile = 16, Tile(keys=64 if dim <= 128 else 32, warps=4, stages=3)
    elif dim > 128:
        block, tile = 64, Tile(keys=32, warps=8, stages=3)
    else:
        block, tile = (32 if rows <= 32 else 64), Tile(keys=64, warps=4, stages=3)
    programs = units * -(-rows // block)
    if programs >= multiprocessors or max_len < 512:
        return ChunkPlan(block, tile, max_len, 1)
    wanted = max(1, _WAVE * multiprocessors // programs - 1)
    tokens = max(256, -(-max_len // wanted))
    tokens = -(-tokens // tile.keys) * tile.keys
    return ChunkPlan(block, tile, tokens, -(-max_len // tokens) + 1)


@dataclass(frozen=True)
class ScoresPlan:
    """Row blocks of ``heads`` x ``queries``; tiles and splits of the first pass; tile of the second, and how many of them
    a program takes.

    The first pass holds its queries and streams keys. With many row blocks the second holds its keys and streams queries,
    and needs as many of them as the first has queries: it is what it reads that bounds it.
    """

    heads: int
    queries: int
    query_blocks: int
    row_blocks: int
    tile: Tile
    tokens: int
    splits: int
    sums: Tile
    key_tiles: int


@cache
def plan_scores(
    total: int, window: int, group: int, units: int, dim: int, itemsize: int, multiprocessors: int
) -> ScoresPlan:
    """Blocks of the two score passes: ``total`` keys, ``window`` queries, ``group`` query heads per KV head."""
    rows_max = 16 if itemsize == 4 else (64 if dim > 128 else 128)
    queries = min(rows_max, max(16, 1 << (window - 1).bit_length()))
    heads = min(rows_max // queries, 1 << (group - 1).bit_length())
    query_blocks = -(-window // queries)
    row_blocks = query_blocks * -(-group // heads)
    small = itemsize == 4 or dim > 128
    tile = Tile(keys=32 if small else 64, warps=4, stages=2 if small else 3)
    sums = tile if small or row_blocks == 1 else Tile(keys=128, warps=8, stages=3)
    tiles = -(-total // tile.keys)
    # one wave of programs in either pass; with many row blocks they fill the chip unsplit
    programs = _WAVE * multiprocessors
    per_split = max(min(4, tiles), -(-tiles // max(1, programs // (units * row_blocks))))
    key_tiles = max(1, -(-tiles * units // programs)) if row_blocks == 1 else 1
    return ScoresPlan(heads, queries, query_blocks, row_blocks, tile, per_split * tile.keys, -(-tiles // per_split),
                      sums, key_tiles)


@dataclass(frozen=True)
class PagesPlan:
    """Pages of a program in the scoring pass and in the softmax pass, and warps of the scoring pass.

    ``eager``: read summaries before knowing how many are valid. It saves the time of one memory access and may read in
    vain, so it is for small ones.
    """

    pages: int
    warps: int
    softmax_pages: int
    eager: bool


@cache
def plan_pages(pages: int, units: int, itemsize: int, multiprocessors: int) -> PagesPlan:
    """The smallest blocks there can be, since many light programs read fastest; ``units`` is batch rows times KV heads."""
    eager = pages * units <= 512 * multiprocessors
    return PagesPlan(pages=16, warps=2 if itemsize == 4 else 1, softmax_pages=256 if pages > 4096 else 128, eager=eager)


@dataclass(frozen=True)
class TopkTiles:
    """Scores of a program, in registers: so many of each lane in a first and a second tile, powers of two (the second may have
    none), and its warps."""

    main: int
    tail: int
    warps: int


@cache
def topk_tiles(scores: int) -> TopkTiles:
    """Two tiles that hold ``scores``: for 2,080, 16 and 1 of each of 128 lanes, where one tile would have to be of 32."""
    warps = 4 if scores <= 3072 else 8
    each = -(-scores // (32 * warps))
    main = 1 << (each.bit_length() - 1)
    tail = 1 << (each - main - 1).bit_length() if each > main else 0
    return TopkTiles(2 * main, 0, warps) if tail == main else TopkTiles(main, tail, warps)


@cache
def topk_chunk(pages: int, k: int) -> int:
    """Size of the chunks whose best k are found first, or 0 to take a whole row at once.

    One program is slow on a long row and the chip has many; worth it for more than four chunks that leave at most half as
    candidates, which may be cut again. A row that no program can hold is cut into any chunks that leave so few.
    """
    for chunk in (1024, 4096, TOPK_MOST // 2, TOPK_MOST):
        if pages > min(4 * chunk, TOPK_MOST) and -(-pages // chunk) * k <= pages // 2:
            return chunk
    return 0


@dataclass(frozen=True)
class LinearPlan:
    """Rows, output features and inner length of a tile; warps; stages of the pipeline."""

    rows: int
    features: int
    inner: int
    warps: int
    stages: int


@cache
def plan_linear(rows: int, itemsize: int) -> LinearPlan:
    """Narrow tiles, so that few features already fill the chip, and a deep pipeline, so that enough is in flight."""
    block = 8 if rows <= 8 else 16
    if itemsize == 4:
        return LinearPlan(16, 32, 32, warps=4, stages=3)
    return LinearPlan(block, 32, 256, warps=2, stages=4)
