"""Attention of one query a sequence over the paged KV cache, in one kernel without a plan.

The work is cut into tiles of TILE positions. All tiles of the batch stand in one row, sequence after sequence, and each
of the grid's programs takes an equal stretch of that row for one KV head: it finds its stretch from the lengths on the
device, so that a captured launch suits every batch, ragged ones are balanced, and none of the programs is idle. A
sequence inside one stretch is written out at once. One that crosses stretches is left in pieces (unnormalized sums with
their maxima) in the workspace, and whichever program brings the last piece puts them together.

The query heads of one KV head are the rows of the matrix product, so keys and values are read once for all of them.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from attrs import frozen

from engine.ops.common.launch import dependent_launch, num_sms, release, wait

ROWS = 16
"""Rows of the smallest matrix product: query heads of a KV head are padded to a multiple of it."""


@frozen(kw_only=True)
class DecodeConfig:
    """How the kernel is launched."""

    tile: int
    """Positions a tile; a power of two, at least 16."""
    warps: int
    stages: int
    """Tiles of keys and values in flight or in use."""
    programs: int
    """Programs a multiprocessor; their tiles must fit into its shared memory together."""

    def programs_a_head(self, num_kv_heads: int, device: torch.device) -> int:
        """Programs that run on `device` at once, for each KV head."""
        return max(1, num_sms(device) * self.programs // num_kv_heads)


@frozen
class Sizes:
    """Of a launch, whatever the heads: how many sequences it is for, at most; bytes of a tile of keys; the others as in
    DecodeConfig."""

    most_sequences: float
    tile_bytes: int
    warps: int
    stages: int
    programs: int


LAUNCHES = (
    Sizes(1, 8192, warps=4, stages=4, programs=1),
    Sizes(63, 16384, warps=4, stages=4, programs=2),
    Sizes(96, 16384, warps=2, stages=2, programs=4),
    Sizes(math.inf, 4096, warps=1, stages=3, programs=8),
)
"""The fastest, or nearly, of those that benchmarks/attention.py --tune tries, on an H200.

One sequence goes to few programs, since pieces take their time to be put together: 2048 tokens take 9.8 us a layer, and
17.4 in twice as many. Many go through small tiles in small programs, so that little is left over at the end of each and
programs fill each other's gaps: 256 contexts of 210 tokens take 58.7 us, and 64.8 by tiles four times as large.
"""
FLOAT8_LAUNCHES = (*LAUNCHES[:2], Sizes(math.inf, 4096, warps=1, stages=3, programs=10))
"""The same of caches of one byte a number: 256 contexts of 640 take 143.8 us by small tiles, 243.9 by large ones."""


def decode_configs(head_dim: int, itemsize: int, shared_memory: int) -> tuple[tuple[float, DecodeConfig], ...]:
    """The launches for heads of `head_dim` in a cache of `itemsize` bytes a number, each with the most sequences it is
    for, in their order.

    shared_memory: bytes of a multiprocessor, for the tiles in flight of all its programs. One stage is in registers;
    queries, weights and sums between warps take under 1 KB a warp and 4 more.
    """
    numbers = triton.next_power_of_2(head_dim) * itemsize
    found = []
    for sizes in LAUNCHES if itemsize > 1 else FLOAT8_LAUNCHES:
        tile = max(16, min(128, sizes.tile_bytes // numbers))
        stage, others = 2 * tile * numbers, 4096 + 1024 * sizes.warps
        stages = max(2, min(sizes.stages, 1 + (shared_memory - others) // stage))
        programs = max(1, min(sizes.programs, shared_memory // ((stages - 1) * stage + others)))
        config = DecodeConfig(tile=tile, warps=sizes.warps, stages=stages, programs=programs)
        found.append((sizes.most_sequences, config))
    return tuple(found)


@frozen
class DecodeWorkspace:
    """Where programs leave the pieces of sequences that they share; one serves all layers, one launch at a time."""

    sums: torch.Tensor
    """[programs, 2, kv_heads, group, head_dim] float32: weighted sums of values; of each program's stretch the piece of
    a sequence that began before it, and of one that begins in it."""
    stats: torch.Tensor
    """[programs, 2, kv_heads, 2, group] float32: each piece's largest score (in base 2) and sum of weights."""
    arrivals: torch.Tensor
    """[programs, kv_heads] int32: pieces there of the sequence that begins in this stretch; 0 between launches."""

    @classmethod
    def make(
        cls, programs: int, num_heads: int, num_kv_heads: int, head_dim: int, device: torch.device | str
    ) -> DecodeWorkspace:
        """For launches of `programs` a KV head."""
        group = num_heads // num_kv_heads
        return cls(
            torch.empty((programs, 2, num_kv_heads, group, head_dim), dtype=torch.float32, device=device),
            torch.empty((programs, 2, num_kv_heads, 2, group), dtype=torch.float32, device=device),
            torch.zeros((programs, num_kv_heads), dtype=torch.int32, device=device),
        )


def paged_decode(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    out: torch.Tensor,
    *,
    num_sequences: int,
    scale: float,
    softcap: float | None,
    window: int | None,
    value_scale: float = 1.0,
    workspace: DecodeWorkspace,
    config: DecodeConfig,
) -> None:
    """Attention of q's first `num_sequences` rows into the same rows of out.

    q, out: [at least num_sequences, heads, head_dim], last two dimensions dense; keys, values: [blocks, block_size,
    kv_heads, head_dim]; tables: [sequences, most blocks] int32; lengths: [sequences] int32, at least 1: positions that
    the query sees, its own the last. What is in `values` counts value_scale times.
    """
    block_size, num_kv_heads, head_dim = keys.shape[1:]
    group = q.shape[1] // num_kv_heads
    programs = len(workspace.arrivals)
    _decode_kernel[(programs * num_kv_heads,)](
        q,
        keys,
        values,
        tables,
        lengths,
        out,
        workspace.sums,
        workspace.stats,
        workspace.arrivals,
        q.stride(0),
        out.stride(0),
        tables.stride(0),
        num_sequences,
        programs,
        scale,
        softcap or 0.0,
        window or 0,
        value_scale,
        HEADS=num_kv_heads,
        GROUP=group,
        DIM=head_dim,
        PAGE=block_size,
        WINDOWED=window is not None,
        SOFTCAP=softcap is not None,
        TILE=config.tile,
        BLOCK_SEQUENCES=pad_sequences(num_sequences),
        BLOCK_ROWS=max(ROWS, triton.next_power_of_2(group)),
        BLOCK_GROUP=triton.next_power_of_2(group),
        BLOCK_DIM=triton.next_power_of_2(head_dim),
        MERGE=pieces_at_once(group, head_dim, config),
        num_warps=config.warps,
        num_stages=config.stages,
        **dependent_launch(q.device),
    )


@triton.jit
def as_type(cached, DTYPE: tl.constexpr):
    """Keys or values in the type of queries. Float8 goes by way of float32: a GPU converts float16, which the compiler
    makes of it otherwise, to bfloat16 at an eighth of the speed."""
    if cached.dtype.is_fp8():
        cached = cached.to(tl.float32)
    return cached.to(DTYPE)


def pad_sequences(count: int) -> int:
    """Length of the vector of lengths in a program: few different ones, since each is a kernel to compile."""
    return 16 if count <= 16 else max(256, triton.next_power_of_2(count))


def pieces_at_once(group: int, head_dim: int, config: DecodeConfig) -> int:
    """Pieces that a program reads in one go when it puts a sequence together, a power of two.

    They take 64 registers a thread for one program a multiprocessor, and less for more, which must share its registers.
    """
    size: int = triton.next_power_of_2(group) * triton.next_power_of_2(head_dim)
    room: int = 64 // triton.next_power_of_2(config.programs) * 32 * config.warps
    return max(1, min(16, room // size))


@triton.jit(do_not_specialize=["table_stride", "num_sequences", "programs", "window"])
def _decode_kernel(
    q_ptr,
    keys_ptr,
    values_ptr,
    tables_ptr,
    lengths_ptr,
    out_ptr,
    sums_ptr,
    stats_ptr,
    arrivals_ptr,
    q_stride,
    out_stride,
    table_stride,
    num_sequences,
    programs,
    scale,
    softcap,
    window,
    value_scale,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOWED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_SEQUENCES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    MERGE: tl.constexpr,
    PDL: tl.constexpr,
):
    # Heads change fastest: programs that run together read the same tokens, which are neighbours in memory.
    head = tl.program_id(0) % HEADS
    program = tl.program_id(0) // HEADS
    indices = tl.arange(0, BLOCK_SEQUENCES)
    lengths = tl.load(lengths_ptr + indices, mask=indices < num_sequences, other=0)
    counts = tl.cdiv(lengths, TILE) - _first_tile(lengths, window, WINDOWED, TILE)
    ends = tl.cumsum(counts, 0)
    total = tl.sum(counts, 0)
    share = tl.cdiv(total, programs)
    begin = program * share
    end = tl.minimum(begin + share, total)
    earlier = ends <= begin
    first_sequence = tl.sum(earlier.to(tl.int32), 0)
    # Tiles of the sequences before the one at hand.
    before = tl.sum(tl.where(earlier, counts, 0), 0)
    last_sequence = tl.sum((ends < end).to(tl.int32), 0)
    wait(PDL)  # not for the lengths: see kernels.launch
    release(PDL)
    if begin < total:
        rows = tl.arange(0, BLOCK_ROWS)
        columns = tl.arange(0, BLOCK_DIM)
        offsets = tl.arange(0, TILE)
        real = rows[:, None] < GROUP
        if BLOCK_DIM != DIM:
            real = real & (columns[None, :] < DIM)
        at_head = head * DIM + columns[None, :]
        factor = score_factor(scale, SOFTCAP)

        for sequence in range(first_sequence, last_sequence + 1):
            length = tl.load(lengths_ptr + sequence)
            table_ptr = tables_ptr + sequence * table_stride
            first_tile = _first_tile(length, window, WINDOWED, TILE)
            count = tl.cdiv(length, TILE) - first_tile
            start = tl.maximum(begin - before, 0)
            stop = tl.minimum(end - before, count)

            heads = (head * GROUP + rows[:, None]) * DIM + columns[None, :]
            q = tl.load(q_ptr + sequence * q_stride + heads, mask=real, other=0.0)
            top = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
            weight = tl.zeros([BLOCK_ROWS], tl.float32)
            acc = tl.zeros([BLOCK_ROWS, BLOCK_DIM], tl.float32)

            # A tile's blocks are looked up one tile early: its keys need not wait for them.
            positions = (first_tile + start) * TILE + offsets
            blocks = tl.load(table_ptr + positions // PAGE, mask=positions < length, other=0)
            for tile in range(first_tile + start, first_tile + stop):
                positions = tile * TILE + offsets
                slots = blocks.to(tl.int64) * PAGE + positions % PAGE
                following = positions + TILE
                blocks = tl.load(table_ptr + following // PAGE, mask=following < length, other=0)

                inside = positions[:, None] < length
                if BLOCK_DIM != DIM:
                    inside = inside & (columns[None, :] < DIM)
                at = slots[:, None] * (HEADS * DIM) + at_head
                k = as_type(tl.load(keys_ptr + at, mask=inside, other=0.0), q.dtype)
                v = as_type(tl.load(values_ptr + at, mask=inside, other=0.0), q.dtype)

                scores = tl.dot(q, tl.trans(k), input_precision="ieee")
                if SOFTCAP:
                    scores = capped(scores * scale, softcap)
                seen = positions < length
                if WINDOWED:
                    seen = seen & (positions >= length - window)
                scores = tl.where(seen[None, :], scores, float("-inf"))

                # Every tile holds a position that is seen, so the new maximum is finite.
                new_top = tl.maximum(top, tl.max(scores, 1) * factor)
                p = tl.exp2(scores * factor - new_top[:, None])
                fade = tl.exp2(top - new_top)
                weight = weight * fade + tl.sum(p, 1)
                acc = tl.dot(p.to(q.dtype), v, acc * fade[:, None], input_precision="ieee")
                top = new_top

            result_ptr = out_ptr + sequence * out_stride + head * GROUP * DIM
            if (start == 0) & (stop == count):
                result = (acc / weight[:, None] * value_scale).to(out_ptr.dtype.element_ty)
                tl.store(result_ptr + rows[:, None] * DIM + columns[None, :], result, mask=real)
            else:
                piece = (program * 2 + (start == 0).to(tl.int32)) * HEADS + head
                tl.store(sums_ptr + (piece * GROUP + rows[:, None]) * DIM + columns[None, :], acc, mask=real)
                tl.store(stats_ptr + piece * 2 * GROUP + rows, top, mask=rows < GROUP)
                tl.store(stats_ptr + (piece * 2 + 1) * GROUP + rows, weight, mask=rows < GROUP)
                # The barrier puts all threads' stores before the atomic; it releases them to the others on the device,
                # and acquires theirs.
                tl.debug_barrier()
                first_program = before // share
                pieces = (before + count - 1) // share - first_program + 1
                arrivals = arrivals_ptr + first_program * HEADS + head
                if tl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu") == pieces - 1:
                    tl.debug_barrier()
                    _merge(
                        sums_ptr, stats_ptr, result_ptr, first_program, pieces, head, value_scale, HEADS, GROUP, DIM,
                        BLOCK_GROUP, BLOCK_DIM, MERGE,
                    )  # fmt: skip
                    tl.store(arrivals, 0)
            before += count


@triton.jit
def _merge(
    sums_ptr,
    stats_ptr,
    result_ptr,
    first_program,
    pieces,
    head,
    value_scale,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    MERGE: tl.constexpr,
):
    """One sequence and KV head from its pieces: the first program's second, and the first of each that follows."""
    rows = tl.arange(0, BLOCK_GROUP)
    columns = tl.arange(0, BLOCK_DIM)
    # Finite where there is nothing, so that no row computes infinity less infinity.
    top = tl.full([BLOCK_GROUP], -1e30, tl.float32)
    weight = tl.zeros([BLOCK_GROUP], tl.float32)
    acc = tl.zeros([BLOCK_GROUP, BLOCK_DIM], tl.float32)
    for base in range(0, pieces, MERGE):
        number = base + tl.arange(0, MERGE)
        piece = ((first_program + number) * 2 + (number == 0).to(tl.int32)) * HEADS + head
        there = (number < pieces)[:, None] & (rows < GROUP)[None, :]
        # Past the first-level cache, which other programs' stores do not reach.
        stats = stats_ptr + piece[:, None] * (2 * GROUP) + rows[None, :]
        tops = tl.load(stats, mask=there, other=-1e30, cache_modifier=".cg")
        weights = tl.load(stats + GROUP, mask=there, other=1.0, cache_modifier=".cg")
        sums = tl.load(
            sums_ptr + (piece[:, None, None] * GROUP + rows[None, :, None]) * DIM + columns[None, None, :],
            mask=there[:, :, None] & (columns < DIM)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        new_top = tl.maximum(top, tl.max(tops, 0))
        fade = tl.exp2(top - new_top)
        factors = tl.exp2(tops - new_top[None, :])
        weight = weight * fade + tl.sum(weights * factors, 0)
        acc = acc * fade[:, None] + tl.sum(sums * factors[:, :, None], 0)
        top = new_top
    result = (acc / weight[:, None] * value_scale).to(result_ptr.dtype.element_ty)
    tl.store(
        result_ptr + rows[:, None] * DIM + columns[None, :],
        result,
        mask=(rows < GROUP)[:, None] & (columns < DIM)[None, :],
    )


@triton.jit
def _first_tile(lengths, window, WINDOWED: tl.constexpr, TILE: tl.constexpr):
    """The tile of the first position that is seen."""
    first = lengths * 0
    if WINDOWED:
        first = tl.maximum(lengths - window, 0) // TILE
    return first


@triton.jit
def score_factor(scale, SOFTCAP: tl.constexpr):
    """What makes a score an exponent of 2; capped scores are scaled already."""
    factor = 1.4426950408889634
    if not SOFTCAP:
        factor = factor * scale
    return factor


@triton.jit
def capped(scores, softcap):
    """softcap * tanh(scores / softcap), by way of exp2: tanh(x) = 1 - 2 / (exp(2 x) + 1)."""
    return softcap * (1.0 - 2.0 / (tl.exp2(scores * (2.0 * 1.4426950408889634 / softcap)) + 1.0))
