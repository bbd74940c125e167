"""Static launch plans: tile sizes and splits from shapes alone, so that they never change under a captured graph."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache


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


def _decode_tile(dim: int, itemsize: int, tokens: int) -> Tile:
    """dim: the larger head size, padded to a power of two; tokens: keys a program walks over."""
    if itemsize == 4:
        return Tile(keys=32 if dim <= 128 else 16, warps=4, stages=2)
    if dim > 128:
        return Tile(keys=64, warps=4, stages=2)
    if tokens <= 64:
        return Tile(keys=64, warps=4, stages=2)
    return Tile(keys=64, warps=4, stages=3)


@cache
def plan_decode(max_len: int, units: int, dim: int, itemsize: int, multiprocessors: int) -> SplitPlan:
    """Splits of decode attention.

    Args:
        max_len: largest number of keys a KV head can hold.
        units: batch rows times KV heads.
        dim: the larger head size, padded to a power of two.
        itemsize: bytes of a stored element.

    A fixed number of *tokens* per split, not a fixed number of splits, keeps unequal heads balanced. Several programs
    per multiprocessor hide latency and even out the last wave; past that, splits only cost merging.
    """
    max_len = max(1, max_len)
    smallest = 64
    wanted = max(1, -(-multiprocessors * 6 // units))
    tokens = max(smallest, -(-max_len // wanted))
    tile = _decode_tile(dim, itemsize, tokens)
    tokens = -(-tokens // tile.keys) * tile.keys
    splits = -(-max_len // tokens)
    return SplitPlan(tile, tokens, splits)


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
        block, tile = (16 if rows <= 16 else 32), Tile(keys=32 if dim <= 128 else 16, warps=4, stages=2)
    elif rows <= 16:
        block, tile = 16, _decode_tile(dim, itemsize, max_len)
    elif rows <= 64 or dim > 128:
        block, tile = (64 if rows > 32 else 32), Tile(keys=64 if dim <= 128 else 32, warps=4, stages=3)
    else:
        block, tile = 128, Tile(keys=64, warps=8, stages=3)
    programs = units * -(-rows // block)
    if programs >= multiprocessors or max_len < 512:
        return ChunkPlan(block, tile, max_len, 1)
    wanted = -(-multiprocessors * 2 // programs)
    tokens = max(256, -(-max_len // wanted))
    tokens = -(-tokens // tile.keys) * tile.keys
    return ChunkPlan(block, tile, tokens, -(-max_len // tokens) + 1)


@dataclass(frozen=True)
class ScoresPlan:
    """Row blocks of ``heads`` x ``queries``, splits of the first pass, key tiles per program of the second."""

    heads: int
    queries: int
    query_blocks: int
    row_blocks: int
    tile: Tile
    tokens: int
    splits: int
    key_tiles: int



@cache
def plan_scores(
    total: int, window: int, group: int, units: int, dim: int, itemsize: int, multiprocessors: int
) -> ScoresPlan:
    """Blocks of the two score passes: ``total`` keys, ``window`` queries, ``group`` query heads per KV head."""
    rows_max = 32 if itemsize == 4 else (64 if dim > 128 else 128)
    queries = min(rows_max, max(16, 1 << (window - 1).bit_length()))
    heads = min(rows_max // queries, 1 << (group - 1).bit_length())
    query_blocks = -(-window // queries)
    row_blocks = query_blocks * -(-group // heads)
    if itemsize == 4:
        tile = Tile(keys=32, warps=4, stages=2)
    else:
        tile = Tile(keys=128 if dim <= 128 else 64, warps=8 if heads * queries > 64 else 4, stages=2)
    tiles = -(-total // tile.keys)
    # first pass: enough programs to fill the chip a few times over; with many row blocks they do so unsplit
    wanted = max(1, multiprocessors * 4 // (units * row_blocks))
    per_split = max(min(4, tiles), -(-tiles // wanted))
    key_tiles = max(1, min(8, tiles * units // (multiprocessors * 4))) if row_blocks == 1 else 1
    return ScoresPlan(heads, queries, query_blocks, row_blocks, tile, per_split * tile.keys, -(-tiles // per_split),
                      key_tiles)
