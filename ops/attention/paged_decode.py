"""Attention of one query a sequence over the paged KV cache, in one kernel without a plan.

The work is cut into tiles of TILE positions. All tiles of the batch stand in one row, sequence after sequence, and each
of the grid's programs takes an equal stretch of that row for one KV head: it finds its stretch from the lengths on the
device, so that a captured launch suits every batch, ragged ones are balanced, and none of the programs is idle. A
sequence inside one stretch is written out at once. One that crosses stretches is left in pieces (unnormalized sums with
their maxima) in the workspace, and whichever program brings the last piece puts them together.

The query heads of one KV head are the rows of the matrix product, so keys and values are read once for all of them.
A float8 cache with 16-bit queries has its own loop, _attend_float8, and launches.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from attrs import frozen

from engine.ops.common.fast_math import PTX
from engine.ops.common.launch import dependent_launch, num_sms, release, wait

ROWS = 16
"""Rows of the smallest matrix product: query heads of a KV head are padded to a multiple of it."""
FLOAT8_ROWS = 8
"""The same for a float8 cache: there query heads are the columns of the matrix product, which may be fewer."""
Q_EXPONENT = tl.constexpr(14)
"""Queries converted to float16 are scaled so that the largest element of each is between 2^14 and 2^15."""
P_EXPONENT = tl.constexpr(15)
"""Softmax weights converted to float16 are scaled so that none exceeds 2^15; weights from 2^-29 of it on are normal."""


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
    fold: int = 1
    """Neighbouring KV heads that a program reads as one wide head; divides the number of KV heads."""

    def programs_a_head(self, num_kv_heads: int, device: torch.device) -> int:
        """Programs that run concurrently on `device` per `fold` KV heads."""
        return max(1, num_sms(device) * self.programs * self.fold // num_kv_heads)

    def registers(self) -> int:
        """Maximum registers per thread with which `programs` fit on a multiprocessor (16,384 per quarter)."""
        warps = -(-self.programs * self.warps // 4)
        return min(255, 16384 // warps // 32 // 8 * 8)


@frozen
class Sizes:
    """Of a launch, whatever the heads: how many sequences it is for, at most; bytes of a tile of keys; the others as in
    DecodeConfig."""

    most_sequences: float
    tile_bytes: int
    warps: int
    stages: int
    programs: int
    row_bytes: int = 128
    """Float8 caches only: narrower KV heads are folded up to this many bytes per position."""


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
FLOAT8_LAUNCHES = (
    Sizes(48, 16384, warps=4, stages=3, programs=2),
    Sizes(192, 8192, warps=2, stages=3, programs=4),
    Sizes(math.inf, 8192, warps=1, stages=2, programs=8, row_bytes=256),
)
"""The same for a float8 cache (h200-float8-decode.json). Eight warps per multiprocessor have 128 KB in flight and, with
more than 168 registers per thread, are exactly as many as fit. If more fit, programs are distributed unevenly: they
start while the previous kernel ends, wherever there is room. 64 contexts of 4096 then take 159 us, and 130 otherwise.
"""


def decode_configs(
    head_dim: int, itemsize: int, shared_memory: int, heads: tuple[int, int] = (1, 1)
) -> tuple[tuple[float, DecodeConfig], ...]:
    """The launches for heads of `head_dim` in a cache of `itemsize` bytes a number, each with the most sequences it is
    for, in their order.

    shared_memory: bytes of a multiprocessor, for the tiles in flight of all its programs. One stage is in registers;
    queries, weights and sums between warps take under 1 KB a warp and 4 more. heads: numbers of query and KV heads.
    """
    found = []
    for sizes in LAUNCHES if itemsize > 1 else FLOAT8_LAUNCHES:
        numbers = triton.next_power_of_2(head_dim) * itemsize
        fold, others = 1, 4096 + 1024 * sizes.warps
        if itemsize == 1:
            fold = folded_heads(numbers, heads, sizes.row_bytes)
            numbers *= fold
            rows = max(FLOAT8_ROWS, triton.next_power_of_2(fold * heads[0] // heads[1]))
            others = 1024 + 2 * rows * numbers + 512 * (sizes.warps if sizes.warps > 1 else 0)
        tile = max(16, min(128, sizes.tile_bytes // numbers))
        stage = 2 * tile * numbers
        stages = max(2, min(sizes.stages, 1 + (shared_memory - others) // stage))
        programs = max(1, min(sizes.programs, shared_memory // ((stages - 1) * stage + others)))
        config = DecodeConfig(tile=tile, warps=sizes.warps, stages=stages, programs=programs, fold=fold)
        found.append((sizes.most_sequences, config))
    return tuple(found)


def folded_heads(head_bytes: int, heads: tuple[int, int], row_bytes: int) -> int:
    """Number of neighbouring KV heads that a program reads as one from a float8 cache, a power of two.

    Memory is slower for rows of less than 128 bytes, and slightly slower for less than 256. In return every query head
    of the folded KV heads is multiplied by all of their dimensions: up to FLOAT8_ROWS of them cost nothing, and twice
    as many still pay off for the shorter rows. A key that is NaN makes all folded heads NaN.
    """
    num_heads, num_kv_heads = heads
    group, fold = num_heads // num_kv_heads, 1
    while num_kv_heads % (2 * fold) == 0 and 2 * fold * head_bytes <= row_bytes:
        if 2 * fold * group > (2 if 2 * fold * head_bytes <= 128 else 1) * FLOAT8_ROWS:
            break
        fold *= 2
    return fold


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
    num_kv_heads, width = num_kv_heads // config.fold, head_dim * config.fold
    group = q.shape[1] // num_kv_heads
    programs = len(workspace.arrivals)
    words = keys.dtype == torch.float8_e4m3fn and q.dtype.itemsize == 2
    # The registers that _merge takes limit how many programs of the other 16-bit launches fit: see FLOAT8_LAUNCHES.
    in_threads = words or config.programs == 1
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
        DIM=width,
        FOLD=config.fold,
        PAGE=block_size,
        WINDOWED=window is not None,
        SOFTCAP=softcap is not None,
        TILE=config.tile,
        BLOCK_SEQUENCES=pad_sequences(num_sequences),
        BLOCK_ROWS=max(FLOAT8_ROWS if words else ROWS, triton.next_power_of_2(group)),
        BLOCK_GROUP=triton.next_power_of_2(group),
        BLOCK_DIM=triton.next_power_of_2(width),
        MERGE=(pieces_in_flight if in_threads else pieces_at_once)(group, head_dim, config),
        IN_THREADS=in_threads,
        WORDS=words,
        num_warps=config.warps,
        num_stages=config.stages,
        **({"maxnreg": config.registers()} if words and q.is_cuda and torch.version.hip is None else {}),
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


def pieces_in_flight(group: int, head_dim: int, config: DecodeConfig) -> int:
    """The same for `_merge_in_threads`: at most half of the registers that a thread has where all programs fit."""
    size: int = triton.next_power_of_2(group) * triton.next_power_of_2(head_dim)
    room: int = config.registers() // 2 * 32 * config.warps
    return max(1, min(16, 1 << (room // size).bit_length() - 1 if room >= size else 1))


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
    FOLD: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOWED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_SEQUENCES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    MERGE: tl.constexpr,
    IN_THREADS: tl.constexpr,
    WORDS: tl.constexpr,
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
        WIDTH: tl.constexpr = DIM // FOLD
        own = columns
        if FOLD != 1:  # a query head has the columns of its own KV head; zeros and unused sums elsewhere
            real = real & (rows[:, None] // (GROUP // FOLD) == columns[None, :] // WIDTH)
            own = columns % WIDTH
        at_head = head * DIM + columns[None, :]
        factor = score_factor(scale, SOFTCAP)

        for sequence in range(first_sequence, last_sequence + 1):
            length = tl.load(lengths_ptr + sequence)
            table_ptr = tables_ptr + sequence * table_stride
            first_tile = _first_tile(length, window, WINDOWED, TILE)
            count = tl.cdiv(length, TILE) - first_tile
            start = tl.maximum(begin - before, 0)
            stop = tl.minimum(end - before, count)

            heads = (head * GROUP + rows[:, None]) * WIDTH + own[None, :]
            q = tl.load(q_ptr + sequence * q_stride + heads, mask=real, other=0.0)
            if WORDS:
                acc, top, weight = _attend_float8(
                    q, keys_ptr, values_ptr, table_ptr, head, first_tile + start, first_tile + stop, length, window,
                    scale, softcap, HEADS, DIM, PAGE, WINDOWED, SOFTCAP, TILE, BLOCK_ROWS, BLOCK_DIM,
                )  # fmt: skip
            else:
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

            result_ptr = out_ptr + sequence * out_stride + head * GROUP * WIDTH
            if (start == 0) & (stop == count):
                result = (acc / weight[:, None] * value_scale).to(out_ptr.dtype.element_ty)
                tl.store(result_ptr + rows[:, None] * WIDTH + own[None, :], result, mask=real)
            else:
                piece = (program * 2 + (start == 0).to(tl.int32)) * HEADS + head
                tl.store(sums_ptr + (piece * GROUP + rows[:, None]) * WIDTH + own[None, :], acc, mask=real)
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
                    if IN_THREADS:
                        _merge_in_threads(
                            sums_ptr, stats_ptr, result_ptr, first_program, pieces, head, value_scale, HEADS, GROUP,
                            WIDTH, BLOCK_GROUP, BLOCK_DIM // FOLD, MERGE,
                        )  # fmt: skip
                    else:
                        _merge(
                            sums_ptr, stats_ptr, result_ptr, first_program, pieces, head, value_scale, HEADS, GROUP,
                            WIDTH, BLOCK_GROUP, BLOCK_DIM // FOLD, MERGE,
                        )  # fmt: skip
                    tl.store(arrivals, 0)
            before += count


@triton.jit
def _attend_float8(
    q,
    keys_ptr,
    values_ptr,
    table_ptr,
    head,
    first,
    last,
    length,
    window,
    scale,
    softcap,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOWED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """Attention of one sequence over the tiles [first, last) of a float8 cache: FlashAttention's acc, m_i and l_i.

    The softmax weights in acc and l_i count 2^P_EXPONENT times, and m_i is less by P_EXPONENT.

    Both products are computed in float16, to which GPUs convert two float8 numbers per instruction, and transposed
    (K q^T, V^T p^T), which pads query heads to 8 instead of 16. The second product needs pairs of positions in a
    register, and ldmatrix transposes 16-bit units only: so values are loaded as words of two dimensions, and even and
    odd dimensions are separate products.
    """
    columns = tl.arange(0, BLOCK_DIM)
    pairs = tl.arange(0, BLOCK_DIM // 2)
    offsets = tl.arange(0, TILE)
    words_ptr = values_ptr.to(tl.pointer_type(tl.int16))
    q, unit = _scaled_to_float16(q)
    q = tl.trans(q)
    if SOFTCAP:
        factor = tl.full([BLOCK_ROWS], 1.0, tl.float32) * score_factor(scale, SOFTCAP)
    else:
        factor = unit * score_factor(scale, SOFTCAP)
    m_i = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    # Per position of the tile, so that lanes exchange sums after the loop only.
    l_i = tl.zeros([TILE, BLOCK_ROWS], tl.float32)
    even = tl.zeros([BLOCK_DIM // 2, BLOCK_ROWS], tl.float32)
    odd = tl.zeros([BLOCK_DIM // 2, BLOCK_ROWS], tl.float32)

    # A tile's blocks are looked up one tile early: its keys need not wait for them.
    blocks = _blocks_of_tile(table_ptr, first, offsets, length, TILE, PAGE)
    for tile in range(first, last):
        positions = tile * TILE + offsets
        slots, starts = positions % PAGE, blocks.to(tl.int64) * PAGE
        # Slots that do not depend on the tile make all offsets from `starts` loop-invariant.
        if PAGE % TILE == 0:
            slots, starts = offsets, starts + tile * TILE % PAGE
        elif TILE % PAGE == 0:
            slots = offsets % PAGE
        starts = starts * (HEADS * DIM)
        blocks = _blocks_of_tile(table_ptr, tile + 1, offsets, length, TILE, PAGE)

        inside = positions[:, None] < length
        inside_words = positions[None, :] < length
        if BLOCK_DIM != DIM:
            inside = inside & (columns[None, :] < DIM)
            inside_words = inside_words & (pairs[:, None] < DIM // 2)
        at = starts[:, None] + (slots[:, None] * (HEADS * DIM) + (head * DIM + columns[None, :]))
        words_at = (starts // 2)[None, :] + (slots[None, :] * (HEADS * DIM // 2) + (head * (DIM // 2) + pairs[:, None]))
        k = tl.load(keys_ptr + at, mask=inside, other=0.0).to(tl.float16)
        words = tl.load(words_ptr + words_at, mask=inside_words, other=0)
        v_even, v_odd = _float16_pairs(words)

        scores = tl.dot(k, q)
        if SOFTCAP:
            scores = capped(scores * (unit * scale)[None, :], softcap)
        seen = positions < length
        if WINDOWED:
            seen = seen & (positions >= length - window)
        scores = tl.where(seen[:, None], scores, float("-inf"))

        # Every tile holds a position that is seen, so the new maximum is finite.
        new_m_i = tl.maximum(m_i, tl.max(scores, 0) * factor - P_EXPONENT)
        p = tl.exp2(scores * factor[None, :] - new_m_i[None, :])
        alpha = tl.exp2(m_i - new_m_i)
        l_i = l_i * alpha[None, :] + p
        p = p.to(tl.float16)
        even = tl.dot(v_even, p, even * alpha[None, :])
        odd = tl.dot(v_odd, p, odd * alpha[None, :])
        m_i = new_m_i
    return tl.interleave(tl.trans(even), tl.trans(odd)), m_i, tl.sum(l_i, 0)


@triton.jit
def _blocks_of_tile(table_ptr, tile, offsets, length, TILE: tl.constexpr, PAGE: tl.constexpr):
    """Block of each position of a tile; 0 from `length` on. One look-up per block unless blocks cross tiles."""
    if PAGE % TILE == 0:
        first = tile * TILE
        blocks = offsets * 0 + tl.load(table_ptr + first // PAGE, mask=first < length, other=0)
    elif TILE % PAGE == 0 and TILE // PAGE <= 8:
        first = tile * (TILE // PAGE)
        blocks = offsets * 0
        for i in tl.static_range(TILE // PAGE):
            block = tl.load(table_ptr + first + i, mask=(first + i) * PAGE < length, other=0)
            blocks = tl.where(offsets // PAGE == i, block, blocks)
    else:
        positions = tile * TILE + offsets
        blocks = tl.load(table_ptr + positions // PAGE, mask=positions < length, other=0)
    return blocks


@triton.jit
def _scaled_to_float16(q):
    """Each query times a power of two, in float16, and the inverse powers: exact, and within float16's range."""
    wide = q.to(tl.float32)
    # Biased exponent of the largest element; at least that of 2^-40, so that no factor underflows.
    exponent = tl.maximum(tl.max(tl.abs(wide), 1).to(tl.int32, bitcast=True) >> 23, 127 - 40)
    power = ((2 * 127 - exponent + Q_EXPONENT) << 23).to(tl.float32, bitcast=True)
    inverse = ((exponent - Q_EXPONENT) << 23).to(tl.float32, bitcast=True)
    return (wide * power[:, None]).to(tl.float16), inverse


@triton.jit
def _float16_pairs(words):
    """The low and the high bytes of `words`, float8 numbers (e4m3), as float16."""
    if PTX:
        # Two words per call: their low bytes make one pair, their high bytes the other.
        low, high = tl.inline_asm_elementwise(
            "{ .reg .b32 t; .reg .b16 l, h; prmt.b32 t, $2, 0, 0x3120; mov.b32 {l, h}, t;"
            " cvt.rn.f16x2.e4m3x2 $0, l; cvt.rn.f16x2.e4m3x2 $1, h; }",
            "=r,=r,r",
            [words],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        low = words.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
        high = (words >> 8).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    return low, high


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
def _merge_in_threads(
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
    """`_merge` without exchange between warps: each thread reads its own elements of all pieces, MERGE in flight."""
    rows = tl.arange(0, BLOCK_GROUP)
    columns = tl.arange(0, BLOCK_DIM)
    real = rows < GROUP
    at = rows[:, None] * DIM + columns[None, :]
    # Finite where there is nothing, so that no row computes infinity less infinity.
    top = tl.full([BLOCK_GROUP], -1e30, tl.float32)
    weight = tl.zeros([BLOCK_GROUP], tl.float32)
    acc = tl.zeros([BLOCK_GROUP, BLOCK_DIM], tl.float32)
    for base in range(0, pieces, MERGE):
        new_top = top
        for i in tl.static_range(MERGE):
            piece = _piece(first_program, base + i, head, HEADS)
            there = real & (base + i < pieces)
            # Past the first-level cache, which other programs' stores do not reach.
            piece_top = tl.load(stats_ptr + piece * 2 * GROUP + rows, mask=there, other=-1e30, cache_modifier=".cg")
            new_top = tl.maximum(new_top, piece_top)
        fade = tl.exp2(top - new_top)
        weight = weight * fade
        acc = acc * fade[:, None]
        for i in tl.static_range(MERGE):
            piece = _piece(first_program, base + i, head, HEADS)
            there = real & (base + i < pieces)
            stats = stats_ptr + piece * 2 * GROUP + rows
            piece_top = tl.load(stats, mask=there, other=-1e30, cache_modifier=".cg")
            piece_weight = tl.load(stats + GROUP, mask=there, other=1.0, cache_modifier=".cg")
            sums = tl.load(
                sums_ptr + piece * (GROUP * DIM) + at,
                mask=there[:, None] & (columns < DIM)[None, :],
                other=0.0,
                cache_modifier=".cg",
            )
            factor = tl.exp2(piece_top - new_top)
            weight += piece_weight * factor
            acc += sums * factor[:, None]
        top = new_top
    result = (acc / weight[:, None] * value_scale).to(result_ptr.dtype.element_ty)
    tl.store(
        result_ptr + rows[:, None] * DIM + columns[None, :],
        result,
        mask=(rows < GROUP)[:, None] & (columns < DIM)[None, :],
    )


@triton.jit
def _piece(first_program, number, head, HEADS: tl.constexpr):
    """Index in the workspace of piece `number` of a sequence that begins in the stretch of `first_program`."""
    return ((first_program + number) * 2 + 1 - tl.minimum(number, 1)) * HEADS + head


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
