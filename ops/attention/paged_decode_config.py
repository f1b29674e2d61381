"""Launch parameters of decode attention: presets measured on an H200, fitted to the head size and the GPU."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
from attrs import evolve, frozen

from engine.ops.common.launch import num_sms

MIN_M = 16
"""Minimum number of rows of a matrix product; the query heads of a KV head are padded to a multiple."""
FLOAT8_MIN_M = 8
"""The same for a float8 cache, whose products are transposed: query heads are columns, of which 8 suffice."""

MAX_ROTATED = 2048
"""Maximum numbers of all query heads for which the kernel rotates them itself. On an H200, steps of one sequence take 3
to 9 % less time behind projections of 8 MB (16/8 heads of 128, hidden states of 1024), as long behind those of 16 MB,
and 1 to 3 % longer behind larger ones, which models with more numbers have."""


@frozen(kw_only=True)
class DecodeConfig:
    """Launch parameters of the decode kernel."""

    block_n: int
    """Key positions per tile; a power of two, at least 16."""
    num_warps: int
    """Warps per program."""
    num_stages: int
    """Tiles of keys and values in flight or in use."""
    programs_per_sm: int
    """Programs per multiprocessor, whose shared memory must hold the tiles of all of them."""
    fold: int = 1
    """Adjacent KV heads that a program processes as one wide head; divides the number of KV heads."""
    extra_tiles: int = 0
    """Maximum number of tiles by which a range may be longer if then no sequence is divided among programs."""
    min_tiles: int = 1
    """Minimum tiles per range if the longest sequence would have more than 16 parts (MANY_PARTS)."""
    start_tiles: int = 0
    """What the start of a sequence costs, in tiles: where ranges have tiles of several sequences, a range with many
    starts has fewer tiles."""

    rotates: bool = False
    """Whether the kernel is faster if it norms, rotates and caches new tokens itself (paged_decode_rotation)."""

    def programs_per_head(self, num_kv_heads: int, device: torch.device) -> int:
        """Number of programs that run concurrently on `device` per `fold` KV heads."""
        return max(1, num_sms(device) * self.programs_per_sm * self.fold // num_kv_heads)

    def max_registers(self) -> int:
        """Maximum registers per thread with which all programs fit on a multiprocessor (16,384 per quarter)."""
        warps = -(-self.programs_per_sm * self.num_warps // 4)
        return min(255, 16384 // warps // 32 // 8 * 8)


@frozen
class Preset:
    """Launch parameters for batches up to a size, before they are fitted to a head size."""

    max_pairs: float
    """Maximum number of sequences times KV heads."""
    tile_bytes: int
    """Bytes of a tile of keys."""
    num_warps: int
    num_stages: int
    programs_per_sm: int
    row_bytes: int = 256
    """KV heads are folded up to this many bytes per position."""
    max_sequences: float = 0
    """Up to this many sequences, max_pairs does not apply."""
    min_result: int = 1
    """Minimum numbers of attention output per KV head, with query heads padded to a power of two."""
    max_result: float = math.inf
    min_query_heads: int = 1
    """Minimum query heads per program: those of all folded KV heads."""
    max_query_heads: float = math.inf
    extra_tiles: int = 0
    min_tiles: int = 1
    start_tiles: int = 0
    rotates: bool = False

    def limit(self, num_kv_heads: int) -> float:
        """Maximum number of sequences, not necessarily an integer."""
        return max(self.max_pairs / num_kv_heads, self.max_sequences)


PRESETS = (
    Preset(8, 8192, num_warps=4, num_stages=4, programs_per_sm=1, extra_tiles=2, max_sequences=1, rotates=True),
    Preset(127, 16384, num_warps=4, num_stages=4, programs_per_sm=2, extra_tiles=4, start_tiles=2),
    Preset(399, 4096, num_warps=1, num_stages=3, programs_per_sm=8, extra_tiles=16, max_result=256),
    Preset(528, 4096, num_warps=1, num_stages=3, programs_per_sm=8, extra_tiles=8, max_result=256, start_tiles=1),
    Preset(
        768, 16384, num_warps=2, num_stages=2, programs_per_sm=4, extra_tiles=2, min_result=257, start_tiles=1,
    ),
    Preset(math.inf, 4096, num_warps=1, num_stages=3, programs_per_sm=8, extra_tiles=16, start_tiles=1),
)  # fmt: skip
"""The fastest, or nearly, of those that benchmarks/attention.py --tune tries, on an H200. Extra tiles and the presets
of small results were chosen on an H100, within layers (h100-decode-ranges.json, h100-decode-presets.json).

One sequence is divided among few programs, because merging their partial results takes time: 2048 tokens take 9.8 us
per layer, and 17.4 us with twice as many programs. Large batches use small tiles and small programs: little of the last
tile is wasted, and programs hide each other's latency. 256 contexts of 210 tokens take 58.7 us, and 64.8 us with tiles
four times as large. In between, with 8 KV heads, 16 contexts of up to 2048 tokens take 31.9 us with both the second
preset and that of two warps; 32 of 512 take 24.3 and 22.7 us; 48 of 4096, 148.3 and 145.9 us.

Small programs merge small results in little time. With two query heads per KV head, 32 contexts of 190 tokens take
12.8 us with them and 14.1 us with two warps; 32 of up to 2048, 58.4 and 59.7 us. With four query heads, 14.1 and 13.9
us, 60.4 and 60.0 us. From 400 to 528 pairs, where two warps have a program per pair, sequences of very unequal lengths
are divided: undivided, they would occupy half of the programs that fit.

With more than 768 pairs, the small programs take 78 contexts of up to 151 tokens of 48/12 heads in 19.1 us, two warps
in 22.2; 70 of up to 600 of 60/12 heads in 59.2 and 55.5 us, the only one of 18 cases that is more than 2 % slower.
"""
WIDE_PRESETS = (
    evolve(PRESETS[0], rotates=False),
    PRESETS[1],
    Preset(math.inf, 16384, num_warps=2, num_stages=2, programs_per_sm=4, extra_tiles=2, start_tiles=1),
)
"""As PRESETS, for heads of more than 128 numbers, whose sums do not fit into the registers of one warp
(h100-decode-presets.json)."""
NARROW_PRESETS = (
    Preset(
        8, 8192, num_warps=4, num_stages=4, programs_per_sm=1, row_bytes=128, extra_tiles=2, max_sequences=1,
        rotates=True,
    ),
    Preset(47, 16384, num_warps=4, num_stages=4, programs_per_sm=2, row_bytes=128, extra_tiles=2),
    Preset(127, 8192, num_warps=4, num_stages=4, programs_per_sm=3, row_bytes=128, extra_tiles=5, start_tiles=1),
    Preset(
        399, 8192, num_warps=4, num_stages=4, programs_per_sm=3, row_bytes=128, extra_tiles=10, min_result=129,
        start_tiles=1,
    ),
    Preset(math.inf, 4096, num_warps=1, num_stages=3, programs_per_sm=8, extra_tiles=16, start_tiles=1),
)  # fmt: skip
"""As PRESETS, for heads of at most 128 bytes per position, such as 64 of 16 bits.

Folding halves the number of heads, and so each program's results are merged with twice as many others: with few
sequences that costs more than wider rows gain. 4 contexts of up to 8192 tokens of 8 KV heads take 22.1 us, and 26.1 us
folded; 60 of 200 take 17.8 us, and 13.1 us folded in small tiles. On an H100, with four query heads per KV head, 32
contexts of 190 tokens take 7.9 us with the fourth preset, and 10.3 us with two heads folded, two warps and tiles of 64
keys; 32 of 512 take 16.8 and 18.7 us; but 32 of 1024 to 2048 take 43.6 and 42.2 us.
"""
FLOAT8_PRESETS = (
    Preset(
        79, 16384, num_warps=4, num_stages=3, programs_per_sm=2, row_bytes=64, extra_tiles=2, min_tiles=2,
        start_tiles=2, min_query_heads=5,
    ),
    Preset(
        264, 16384, num_warps=4, num_stages=4, programs_per_sm=2, row_bytes=128, extra_tiles=2, min_tiles=2,
        start_tiles=2, max_query_heads=1,
    ),
    Preset(
        264, 16384, num_warps=4, num_stages=3, programs_per_sm=2, row_bytes=128, extra_tiles=2, min_tiles=2,
        start_tiles=2, min_query_heads=2, max_query_heads=8,
    ),
    Preset(
        264, 8192, num_warps=4, num_stages=3, programs_per_sm=3, row_bytes=128, extra_tiles=4, min_tiles=4,
        start_tiles=2, min_query_heads=9,
    ),
    Preset(1543, 8192, num_warps=2, num_stages=3, programs_per_sm=4, row_bytes=128, extra_tiles=4, start_tiles=1),
    Preset(math.inf, 8192, num_warps=1, num_stages=2, programs_per_sm=8, extra_tiles=2, start_tiles=1),
)  # fmt: skip
"""As PRESETS, for a float8 cache (h200-float8-decode.json).

Eight warps per multiprocessor have 128 KB in flight. With more than 168 registers per thread, exactly eight warps fit.
If more fitted, programs would be distributed unevenly, because they start wherever there is room while the previous
kernel ends: 64 contexts of 4096 tokens then take 159 us instead of 130.

A program with one query head needs so few registers that three would fit: a fourth stage leaves room for two. 8
contexts of 4000 to 8000 tokens of 32 heads then take 98 us, and 126 us with three stages; 3 of 300, 7.2 and 6.6.

Programs of 9 and more query heads compute products of 16 columns. From 80 pairs on, three of them with tiles of half
the size are 3 to 16 % faster (h100-decode-presets.json); for fewer pairs up to 13 % faster or slower.

With five to eight query heads per KV head of 64, folding doubles the columns to 16. Few pairs take up to 38 % less time
without: 2 contexts of up to 118 tokens of 70/10 heads 2.8 us instead of 4.1 (h200-decode-narrow.json).

The presets for up to 264 pairs have a program per pair on 132 multiprocessors. On an H100, with 8 KV heads, 40 contexts
of 190 tokens take 13.2 us with that of 2 to 8 query heads and 9.8 us with the next; 40 of 100 to 2048, 40.5 and 41.5.
"""


def decode_configs(
    head_dim: int, itemsize: int, shared_memory: int, heads: tuple[int, int] = (1, 1)
) -> tuple[tuple[float, DecodeConfig], ...]:
    """List (maximum number of sequences, launch parameters), smallest batches first.

    itemsize: bytes per number in the cache; shared_memory: bytes per multiprocessor;
    heads: numbers of query and KV heads.
    """
    configs: list[tuple[float, DecodeConfig]] = []
    for preset in presets_of(head_dim, itemsize):
        config = fit_preset(preset, head_dim, itemsize, shared_memory, heads)
        result = triton.next_power_of_2(heads[0] // heads[1]) * head_dim
        limit = preset.limit(heads[1])
        # The first preset for batches of a size counts.
        if limit < 1 or (configs and configs[-1][0] >= limit) or not preset.min_result <= result <= preset.max_result:
            continue
        if not preset.min_query_heads <= config.fold * heads[0] // heads[1] <= preset.max_query_heads:
            continue
        if configs and configs[-1][1] == config:
            configs.pop()
        configs.append((limit, config))
    return tuple(configs)


def presets_of(head_dim: int, itemsize: int) -> Sequence[Preset]:
    """The presets for a size of heads and of the cache's numbers, in bytes."""
    if itemsize == 1:
        return FLOAT8_PRESETS
    if triton.next_power_of_2(head_dim) * itemsize <= 128:
        return NARROW_PRESETS
    return PRESETS if head_dim <= 128 else WIDE_PRESETS


def fit_preset(
    preset: Preset, head_dim: int, itemsize: int, shared_memory: int, heads: tuple[int, int]
) -> DecodeConfig:
    """A preset's launch parameters for heads like these. Arguments as of `decode_configs`."""
    head_bytes = triton.next_power_of_2(head_dim) * itemsize
    fold = folded_heads(head_bytes, heads, preset.row_bytes, MIN_M if itemsize > 1 else FLOAT8_MIN_M)
    head_bytes *= fold
    # Shared memory per program besides the tiles: queries, softmax weights and sums exchanged between warps.
    other_bytes = 4096 + 1024 * preset.num_warps
    if itemsize == 1:
        block_m = max(FLOAT8_MIN_M, triton.next_power_of_2(fold * heads[0] // heads[1]))
        other_bytes = 1024 + 2 * block_m * head_bytes + 512 * (preset.num_warps if preset.num_warps > 1 else 0)
    block_n = max(16, min(128, preset.tile_bytes // head_bytes))
    # One of the stages is in registers.
    stage_bytes = 2 * block_n * head_bytes
    num_stages = max(2, min(preset.num_stages, 1 + (shared_memory - other_bytes) // stage_bytes))
    program_bytes = (num_stages - 1) * stage_bytes + other_bytes
    return DecodeConfig(
        block_n=block_n,
        num_warps=preset.num_warps,
        num_stages=num_stages,
        programs_per_sm=max(1, min(preset.programs_per_sm, shared_memory // program_bytes)),
        fold=fold,
        extra_tiles=preset.extra_tiles,
        min_tiles=preset.min_tiles,
        start_tiles=preset.start_tiles,
        rotates=preset.rotates and heads[0] * head_dim <= MAX_ROTATED,
    )


def folded_heads(head_bytes: int, heads: tuple[int, int], row_bytes: int, min_m: int) -> int:
    """Choose how many adjacent KV heads a program processes as one, a power of two.

    Reading rows of less than 128 bytes is slow, and of less than 256 bytes slightly slow. Folding makes rows longer,
    computes the softmax of fewer scores per byte, and multiplies every query head with the dimensions of all folded KV
    heads. That is free for up to `min_m` query heads, to which they are padded anyway, and pays off for up to twice
    that many if rows have at most 128 bytes.

    A NaN in a key makes the results of all folded heads NaN.
    """
    num_heads, num_kv_heads = heads
    group, fold = num_heads // num_kv_heads, 1
    while num_kv_heads % (2 * fold) == 0 and 2 * fold * head_bytes <= row_bytes:
        if 2 * fold * group > (2 if 2 * fold * head_bytes <= 128 else 1) * min_m:
            break
        fold *= 2
    return fold
