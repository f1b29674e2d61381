"""Two Gluon kernels for the experts of up to 8 tokens on Hopper, whose time is that of reading the weights.

Both multiply as the kernels for linear layers of few rows (ops/gemm/w4a16_few_rows.py): the 16 bytes that a thread
loads of a row of W, and what it loads of a row of x, are its own operands of mma.sync, so that no data moves between
threads. Warps do not wait for each other until their sums are added.

The first kernel computes gate, up and activation: a program multiplies some rows of W of one expert by the tokens that
chose this expert. The second kernel computes the outputs: a program computes some of them for all experts. Its warps
divide the experts among them, or also the inputs of an expert, and add the products times the factors of the routing
in a fixed order. It loads its first weights while the first kernel ends.

Pairs (token, slot) are not sorted. An expert that several tokens chose is computed once, for all of them, by the
program (in the second kernel: by the warps) of the first pair that has this expert.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from engine.ops.activation.act_and_mul import activate
from engine.ops.common.l1_cache import prefer_l1_cache
from engine.ops.common.launch import release, wait
from engine.ops.experts.few_tokens_weights import (
    FLOAT8,
    FP4,
    HALF,
    WORDS_PER_BLOCK,
    add_products,
    load_entry,
    load_inputs,
    load_words,
    pairs_per_block,
    word_offsets,
)
from engine.ops.gemm.few_rows import COLUMNS, with_one
from engine.ops.gemm.persistent_w4a16 import RUN, row_of_lane
from engine.ops.gemm.skinny import GATED


@gluon.jit
def _slots(experts, expert, m, tokens, TOP_K: gl.constexpr):
    """The slot in which each token m chose an expert; -1 where it did not choose this expert."""
    found = m * 0 - 1 + expert * 0
    for slot in gl.static_range(TOP_K):
        chosen = gl.load(experts + m * TOP_K + slot, mask=m < tokens, other=-1)
        found = gl.where((chosen == expert) & (expert >= 0), slot, found)
    return found


@gluon.jit(do_not_specialize=["tokens"])
def experts_gate_up_kernel(
    out,
    x,
    values,
    scales,
    matrix_factors,
    bias,
    experts,
    tokens,
    outputs,
    inputs,
    row_words,
    blocks,
    TOP_K: gl.constexpr,
    KIND: gl.constexpr,
    SCALE_ROWS: gl.constexpr,
    ACTIVATION: gl.constexpr,
    BIAS: gl.constexpr,
    ONE: gl.constexpr,
    TILE: gl.constexpr,
    AHEAD: gl.constexpr,
    PDL: gl.constexpr,
):
    """out [tokens * TOP_K, outputs] = act(gate) * up. Grid: (tiles of W's rows, tokens * TOP_K).

    x: [tokens, inputs / 2] int32, pairs of numbers of out's dtype. experts: [tokens, TOP_K] int32; -1: none. values:
    int32, the words of W, which has 2 * outputs rows per expert: [experts, rows, row_words]; in 4 bits
    [experts, blocks, rows, HALF]. scales: float32, [experts, rows], or with SCALE_ROWS > 0 one per SCALE_ROWS rows and
    128 inputs; in 4 bits int32, [experts, blocks, rows]. matrix_factors: [experts] float32, read for KIND FP4 only.
    bias: [experts, rows], read with BIAS only.

    TILE: rows of W per program, a multiple of 16. AHEAD: blocks that each warp loads before it multiplies the first.
    ONE: whether there is one token.
    """
    WARPS: gl.constexpr = gl.num_warps()
    DTYPE: gl.constexpr = out.dtype.element_ty
    EPILOGUE: gl.constexpr = GATED + ACTIVATION
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    WORDS: gl.constexpr = gl.DotOperandLayout(0, MMA, 4)
    X: gl.constexpr = gl.DotOperandLayout(1, MMA, 8 if KIND == FLOAT8 else 4)
    X_WORDS: gl.constexpr = 64 if KIND == FLOAT8 else 32
    weight_rows = outputs * 2
    first = gl.program_id(0) * TILE
    pair = gl.program_id(1)

    # Places in W of expert 0
    warp = gl.expand_dims(gl.expand_dims(gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, WORDS))), 1), 2)
    row = row_of_lane(first, gl.arange(0, TILE, gl.SliceLayout(0, gl.SliceLayout(2, WORDS))), weight_rows, EPILOGUE)
    row = gl.expand_dims(gl.expand_dims(row, 0), 2)
    k = gl.arange(0, WORDS_PER_BLOCK, gl.SliceLayout(0, gl.SliceLayout(1, WORDS)))
    k = gl.expand_dims(gl.expand_dims(k, 0), 1)
    offsets = word_offsets(row, k, weight_rows, row_words, KIND) + warp * 0
    if KIND >= FP4:
        HALVES: gl.constexpr = gl.SliceLayout(3, gl.reshape(offsets, [WARPS, TILE, 2, HALF]).type.layout)
        e_block = gl.expand_dims(
            gl.expand_dims(gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, HALVES))), 1), 2
        )
        e_lane = gl.arange(0, TILE, gl.SliceLayout(0, gl.SliceLayout(2, HALVES)))
        e_row = gl.expand_dims(gl.expand_dims(row_of_lane(first, e_lane, weight_rows, EPILOGUE), 0), 2)
        half = gl.expand_dims(gl.expand_dims(gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, HALVES))), 0), 1)
    else:
        R_MMA: gl.constexpr = gl.SliceLayout(2, MMA)
        e_block = gl.expand_dims(gl.arange(0, WARPS, gl.SliceLayout(1, R_MMA)), 1)
        e_row = gl.expand_dims(
            row_of_lane(first, gl.arange(0, TILE, gl.SliceLayout(0, R_MMA)), weight_rows, EPILOGUE), 0
        )
        half = 0

    x_warp = gl.expand_dims(gl.expand_dims(gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, X))), 1), 2)
    x_k = gl.expand_dims(gl.expand_dims(gl.arange(0, X_WORDS, gl.SliceLayout(0, gl.SliceLayout(2, X))), 0), 2)
    m = gl.arange(0, COLUMNS, gl.SliceLayout(0, gl.SliceLayout(1, X)))
    x_places = x + gl.expand_dims(gl.expand_dims(m * (inputs // 2), 0), 1)

    wait(PDL)
    expert = gl.load(experts + pair)
    runs = expert >= 0
    if ONE:
        chosen = m == 0
    else:
        chosen = _slots(experts, expert, m, tokens, TOP_K) >= 0
        runs = runs & (gl.min(gl.where(chosen, m, COLUMNS), 0) == pair // TOP_K)
    if runs:
        present = gl.expand_dims(gl.expand_dims(chosen, 0), 1)
        matrix = expert.to(gl.int64)
        begin = matrix * weight_rows
        places = values + (begin * blocks * HALF if KIND >= FP4 else begin * row_words) + offsets
        words = ()
        entries = ()
        for number in gl.static_range(AHEAD):
            loaded = load_words(places, number * WARPS, warp, k, weight_rows, row_words, blocks, True, KIND)
            words = words + (loaded,)  # type: ignore[assignment]  # noqa: RUF005
            loaded = load_entry(
                scales,
                matrix,
                number * WARPS,
                e_block,
                half,
                e_row,
                weight_rows,
                blocks,
                True,
                KIND,
                SCALE_ROWS,
            )
            entries = entries + (loaded,)  # type: ignore[assignment]  # noqa: RUF005
        coming = load_inputs(x_places, 0, x_warp, x_k, inputs // 2, present, KIND)
        total = gl.zeros([WARPS, TILE, COLUMNS], gl.float32, MMA)
        steps = gl.cdiv(inputs, 2 * pairs_per_block(KIND) * WARPS * AHEAD)
        for step in range(steps):
            if step == steps - 1:
                release(PDL)  # all loads of W are in progress
            for number in gl.static_range(AHEAD):
                base = (step * AHEAD + number) * WARPS
                here = coming
                coming = load_inputs(x_places, base + WARPS, x_warp, x_k, inputs // 2, present, KIND)
                total = add_products(total, words[number], entries[number], here, KIND, SCALE_ROWS, LEFT, RIGHT, DTYPE)
                later = base + AHEAD * WARPS
                loaded = load_words(places, later, warp, k, weight_rows, row_words, blocks, True, KIND)
                words = with_one(words, number, loaded)
                loaded = load_entry(
                    scales, matrix, later, e_block, half, e_row, weight_rows, blocks, True, KIND, SCALE_ROWS
                )
                entries = with_one(entries, number, loaded)
        sums = gl.sum(total, axis=0)
        lane = row_of_lane(first, gl.arange(0, TILE, gl.SliceLayout(1, sums.type.layout)), weight_rows, EPILOGUE)
        if KIND == FLOAT8 and SCALE_ROWS == 0:
            sums *= gl.expand_dims(gl.load(scales + begin + lane), 1)
        if KIND == FP4:
            sums *= gl.load(matrix_factors + expert)
        if BIAS:
            sums += gl.expand_dims(gl.load(bias + begin + lane).to(gl.float32), 1)
        gate, up = sums.reshape((TILE // (2 * RUN), 2, RUN, COLUMNS)).permute((0, 2, 3, 1)).split()
        value = activate(gate, up, ACTIVATION).reshape((TILE // 2, COLUMNS))
        output = gl.expand_dims(first // 2 + gl.arange(0, TILE // 2, gl.SliceLayout(1, value.type.layout)), 1)
        column = gl.arange(0, COLUMNS, gl.SliceLayout(0, value.type.layout))
        slot = gl.where(column == 0, pair, -1) if ONE else _slots(experts, expert, column, tokens, TOP_K)
        slot = gl.expand_dims(slot, 0)
        target = (gl.expand_dims(column, 0) * TOP_K + slot) * outputs + output
        gl.store(out + target, value.to(DTYPE), mask=(output < outputs) & (slot >= 0))


@gluon.jit
def _load_expert(experts, pair, tokens, TOP_K: gl.constexpr):
    """The expert of each pair; -1 beyond the last."""
    return gl.load(experts + pair, mask=pair < tokens * TOP_K, other=-1)


@gluon.jit
def _of_entries(expert, KIND: gl.constexpr, LAYOUT: gl.constexpr):
    """The expert of each warp, [warps], with as many dimensions as the result of `load_entry`."""
    found = gl.expand_dims(gl.convert_layout(expert, LAYOUT, assert_trivial=True), 1)
    if KIND >= FP4:
        found = gl.expand_dims(found, 2)
    return found


@gluon.jit(do_not_specialize=["tokens"])
def experts_down_kernel(
    out,
    x,
    values,
    scales,
    matrix_factors,
    bias,
    experts,
    factors,
    tokens,
    outputs,
    inputs,
    row_words,
    blocks,
    TOP_K: gl.constexpr,
    KIND: gl.constexpr,
    SCALE_ROWS: gl.constexpr,
    BIAS: gl.constexpr,
    ONE: gl.constexpr,
    TILE: gl.constexpr,
    AHEAD: gl.constexpr,
    K_WARPS: gl.constexpr,
    PDL: gl.constexpr,
):
    """out [tokens, outputs] = the sum of each token's experts' outputs times their factors. Grid: (tiles of W's rows,).

    x: [tokens * TOP_K, inputs / 2] int32, what experts_gate_up_kernel wrote. factors: [tokens, TOP_K] float32. K_WARPS:
    warps that divide the inputs of one expert. There are num_warps / K_WARPS such groups of warps, each of which
    computes one expert at a time, in rounds. The other arguments are as in experts_gate_up_kernel, for a W with
    `outputs` rows per expert.
    """
    WARPS: gl.constexpr = gl.num_warps()
    DTYPE: gl.constexpr = out.dtype.element_ty
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    WORDS: gl.constexpr = gl.DotOperandLayout(0, MMA, 4)
    X: gl.constexpr = gl.DotOperandLayout(1, MMA, 8 if KIND == FLOAT8 else 4)
    X_WORDS: gl.constexpr = 64 if KIND == FLOAT8 else 32
    W_X: gl.constexpr = gl.SliceLayout(1, X)
    W_MMA: gl.constexpr = gl.SliceLayout(1, MMA)
    R_MMA: gl.constexpr = gl.SliceLayout(2, MMA)
    first = gl.program_id(0) * TILE
    rounds = gl.cdiv(tokens * TOP_K, WARPS // K_WARPS)

    warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, WORDS)))
    row = first + gl.arange(0, TILE, gl.SliceLayout(0, gl.SliceLayout(2, WORDS)))
    row = gl.expand_dims(gl.expand_dims(gl.where(row < outputs, row, 0), 0), 2)
    k = gl.arange(0, WORDS_PER_BLOCK, gl.SliceLayout(0, gl.SliceLayout(1, WORDS)))
    k = gl.expand_dims(gl.expand_dims(k, 0), 1)
    block = gl.expand_dims(gl.expand_dims(warp % K_WARPS, 1), 2)
    offsets = word_offsets(row, k, outputs, row_words, KIND) + block * 0
    if KIND >= FP4:
        HALVES: gl.constexpr = gl.SliceLayout(3, gl.reshape(offsets, [WARPS, TILE, 2, HALF]).type.layout)
        E_E: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, HALVES))
        e_row = first + gl.arange(0, TILE, gl.SliceLayout(0, gl.SliceLayout(2, HALVES)))
        e_row = gl.expand_dims(gl.expand_dims(gl.where(e_row < outputs, e_row, 0), 0), 2)
        e_block = gl.expand_dims(gl.expand_dims(gl.arange(0, WARPS, E_E) % K_WARPS, 1), 2)
        half = gl.expand_dims(gl.expand_dims(gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, HALVES))), 0), 1)
    else:
        E_E: gl.constexpr = gl.SliceLayout(1, R_MMA)  # type: ignore[no-redef]
        e_row = first + gl.arange(0, TILE, gl.SliceLayout(0, R_MMA))
        e_row = gl.expand_dims(gl.where(e_row < outputs, e_row, 0), 0)
        e_block = gl.expand_dims(gl.arange(0, WARPS, E_E) % K_WARPS, 1)
        half = 0

    x_warp = gl.arange(0, WARPS, gl.SliceLayout(1, W_X))
    x_block = gl.expand_dims(gl.expand_dims(x_warp % K_WARPS, 1), 1)
    x_k = gl.expand_dims(gl.expand_dims(gl.arange(0, X_WORDS, gl.SliceLayout(0, gl.SliceLayout(2, X))), 0), 2)
    m = gl.expand_dims(gl.arange(0, COLUMNS, gl.SliceLayout(0, W_X)), 0)

    r_warp = gl.arange(0, WARPS, gl.SliceLayout(1, R_MMA))
    t_m = gl.expand_dims(gl.arange(0, COLUMNS, gl.SliceLayout(0, W_MMA)), 0)
    lane = first + gl.arange(0, TILE, gl.SliceLayout(0, R_MMA))
    lane = gl.expand_dims(gl.where(lane < outputs, lane, 0), 0)

    # What the first kernel's predecessor wrote, the routing, may be read before `wait`: see ops/common/launch.py.
    pair = x_warp // K_WARPS
    expert = _load_expert(experts, pair, tokens, TOP_K)
    if ONE:
        slot = gl.where(m == 0, gl.expand_dims(gl.where(expert >= 0, pair, -1), 1), -1)
        valid = expert >= 0
    else:
        slot = _slots(experts, gl.expand_dims(expert, 1), m, tokens, TOP_K)
        valid = (expert >= 0) & (gl.min(gl.where(slot >= 0, m, COLUMNS), 1) == pair // TOP_K)
    E_W: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, WORDS))
    E_T: gl.constexpr = gl.SliceLayout(1, W_MMA)
    w_expert = gl.convert_layout(gl.where(valid, expert, -1), E_W, assert_trivial=True)
    w_expert = gl.expand_dims(gl.expand_dims(w_expert, 1), 2)
    e_expert = _of_entries(gl.where(valid, expert, -1), KIND, E_E)
    matrix = (blocks if KIND >= FP4 else row_words).to(gl.int64) * (outputs * HALF if KIND >= FP4 else outputs)
    places = values + w_expert * matrix + offsets
    words = ()
    entries = ()
    for number in gl.static_range(AHEAD):
        loaded = load_words(places, number * K_WARPS, block, k, outputs, row_words, blocks, w_expert >= 0, KIND)
        words = words + (loaded,)  # type: ignore[assignment]  # noqa: RUF005
        loaded = load_entry(
            scales, e_expert.to(gl.int64), number * K_WARPS, e_block, half, e_row, outputs, blocks, e_expert >= 0, KIND,
            SCALE_ROWS,
        )  # fmt: skip
        entries = entries + (loaded,)  # type: ignore[assignment]  # noqa: RUF005
    total = gl.zeros([WARPS, TILE, COLUMNS], gl.float32, MMA)
    steps = gl.cdiv(inputs, 2 * pairs_per_block(KIND) * K_WARPS * AHEAD)
    x_rows = gl.expand_dims((m * TOP_K + slot) * (inputs // 2), 1)
    present = gl.expand_dims((slot >= 0) & gl.expand_dims(valid, 1), 1)
    wait(PDL)
    coming = load_inputs(x + x_rows, 0, x_block, x_k, inputs // 2, present, KIND)
    for number_of_round in range(rounds):
        # The expert, slots and places of the next round
        next_pair = (number_of_round + 1) * (WARPS // K_WARPS) + x_warp // K_WARPS
        next_expert = _load_expert(experts, next_pair, tokens, TOP_K)
        if ONE:
            next_slot = gl.where(m == 0, gl.expand_dims(gl.where(next_expert >= 0, next_pair, -1), 1), -1)
            next_valid = next_expert >= 0
        else:
            next_slot = _slots(experts, gl.expand_dims(next_expert, 1), m, tokens, TOP_K)
            next_first = gl.min(gl.where(next_slot >= 0, m, COLUMNS), 1)
            next_valid = (next_expert >= 0) & (next_first == next_pair // TOP_K)
        next_w = gl.convert_layout(gl.where(next_valid, next_expert, -1), E_W, assert_trivial=True)
        next_w = gl.expand_dims(gl.expand_dims(next_w, 1), 2)
        next_e = _of_entries(gl.where(next_valid, next_expert, -1), KIND, E_E)
        next_rows = gl.expand_dims((m * TOP_K + next_slot) * (inputs // 2), 1)
        next_present = gl.expand_dims((next_slot >= 0) & gl.expand_dims(next_valid, 1), 1)
        # The factors of this round
        t_expert = gl.convert_layout(gl.where(valid, expert, -1), E_T, assert_trivial=True)
        t_pair = gl.convert_layout(pair, E_T, assert_trivial=True)
        if ONE:
            t_slot = gl.where(t_m == 0, gl.expand_dims(gl.where(t_expert >= 0, t_pair, -1), 1), -1)
        else:
            t_slot = _slots(experts, gl.expand_dims(t_expert, 1), t_m, tokens, TOP_K)
        factor = gl.load(factors + t_m * TOP_K + t_slot, mask=t_slot >= 0, other=0.0)
        known = gl.convert_layout(gl.where(valid, expert, 0), gl.SliceLayout(1, R_MMA), assert_trivial=True)
        known = gl.expand_dims(known, 1)
        part = gl.zeros([WARPS, TILE, COLUMNS], gl.float32, MMA)
        for step in range(steps):
            is_last = step == steps - 1
            if is_last & (number_of_round == rounds - 1):
                release(PDL)  # all loads of W are in progress
            w_now = gl.where(is_last, next_w, w_expert)
            e_now = gl.where(is_last, next_e, e_expert)
            now = values + w_now * matrix + offsets
            for number in gl.static_range(AHEAD):
                base = (step * AHEAD + number) * K_WARPS
                here = coming
                if number == AHEAD - 1:
                    x_at = x + gl.where(is_last, next_rows, x_rows)
                    x_present = gl.where(is_last, next_present.to(gl.int32), present.to(gl.int32)) != 0
                    x_base = gl.where(is_last, 0, base + K_WARPS)
                    coming = load_inputs(x_at, x_base, x_block, x_k, inputs // 2, x_present, KIND)
                else:
                    coming = load_inputs(x + x_rows, base + K_WARPS, x_block, x_k, inputs // 2, present, KIND)
                part = add_products(part, words[number], entries[number], here, KIND, SCALE_ROWS, LEFT, RIGHT, DTYPE)
                later = gl.where(is_last, number * K_WARPS, base + AHEAD * K_WARPS)
                loaded = load_words(now, later, block, k, outputs, row_words, blocks, w_now >= 0, KIND)
                words = with_one(words, number, loaded)
                loaded = load_entry(
                    scales, e_now.to(gl.int64), later, e_block, half, e_row, outputs, blocks, e_now >= 0, KIND,
                    SCALE_ROWS,
                )  # fmt: skip
                entries = with_one(entries, number, loaded)
        if KIND == FLOAT8 and SCALE_ROWS == 0:
            part *= gl.expand_dims(gl.load(scales + known * outputs + lane), 2)
        if KIND == FP4:
            part *= gl.expand_dims(gl.load(matrix_factors + known), 2)
        if BIAS:
            added = gl.load(bias + known * outputs + lane).to(gl.float32)
            added = gl.where(gl.expand_dims(r_warp % K_WARPS == 0, 1), added, 0.0)
            part += gl.expand_dims(added, 2)
        total += part * gl.expand_dims(factor, 1)
        pair, expert, valid, slot = next_pair, next_expert, next_valid, next_slot
        w_expert, e_expert, x_rows, present = next_w, next_e, next_rows, next_present
    sums = gl.sum(total, axis=0)
    output = gl.expand_dims(first + gl.arange(0, TILE, gl.SliceLayout(1, sums.type.layout)), 1)
    column = gl.expand_dims(gl.arange(0, COLUMNS, gl.SliceLayout(0, sums.type.layout)), 0)
    gl.store(out + column * outputs + output, sums.to(DTYPE), mask=(output < outputs) & (column < tokens))


# Programs on the same multiprocessor read the same x.
prefer_l1_cache(experts_gate_up_kernel)
prefer_l1_cache(experts_down_kernel)
