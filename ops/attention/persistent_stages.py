"""Shared memory, barriers and first and last steps of the persistent prefill kernels.

A group of warps copies queries into buffers, and keys and values into stages; two other groups multiply. Each buffer
and each stage has two barriers: one completes when it is filled, the other when both multiplying groups have read it.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
)

from engine.ops.attention.persistent_steps import RUN, soften, thread_sums

_RUN = gl.constexpr(RUN)


COPYING_THREADS = gl.constexpr(128)
"""Threads of the warps that copy, in the kernels of 16 bits."""


@gluon.jit
def make_barriers(BUFFERS: gl.constexpr, STAGES: gl.constexpr, ARRIVALS: gl.constexpr):
    """Barriers of BUFFERS buffers of queries, filled and free, and those of STAGES stages.

    ARRIVALS: number of arrivals that fill a buffer or a stage. One thread of each multiplying group frees it.
    """
    q_filled = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    q_free = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    filled = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for buffer in gl.static_range(BUFFERS):
        mbarrier.init(q_filled.index(buffer), count=ARRIVALS)
        mbarrier.init(q_free.index(buffer), count=2)
    for stage in gl.static_range(STAGES):
        mbarrier.init(filled.index(stage), count=ARRIVALS)
        mbarrier.init(free.index(stage), count=2)
    return q_filled, q_free, filled, free


@gluon.jit
def make_stages(
    dtype: gl.constexpr, BUFFERS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, HEAD_DIM: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Shared memory of the kernels of 16 bits: halves of BUFFERS tiles of queries, stages of keys and of values, and
    the four kinds of barriers. Each copying thread arrives when its copies are complete."""
    swizzled: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    q_halves = gl.allocate_shared_memory(dtype, [2 * BUFFERS, BLOCK_M // 2, HEAD_DIM], swizzled)
    k_stages = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HEAD_DIM], swizzled)
    v_stages = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HEAD_DIM], swizzled)
    q_filled, q_free, filled, free = make_barriers(BUFFERS, STAGES, COPYING_THREADS)
    return q_halves, k_stages, v_stages, q_filled, q_free, filled, free


@gluon.jit
def wait_until_filled(filled, number):
    """Wait for what is loaded as `number`, counted from 0: into the buffers or stages of these barriers in turn."""
    COUNT: gl.constexpr = filled.shape[0]
    mbarrier.wait(filled.index(number % COUNT), number // COUNT & 1)


@gluon.jit
def wait_until_free(free, number):
    """Wait until what is loaded as `number` has a place: what was there before has been read."""
    COUNT: gl.constexpr = free.shape[0]
    mbarrier.wait(free.index(number % COUNT), (number // COUNT & 1) ^ 1)


@gluon.jit
def wait_for_stage(filled, step):
    """Wait for the keys and values of a step, which threads have copied."""
    wait_until_filled(filled, step)
    fence_async_shared()  # what threads copied, which wgmma reads; TMA would need none


@gluon.constexpr_function
def run_layout(head_dim, num_warps):
    """The layout of a copied block: [runs, keys of a run, numbers of a head]."""
    threads = [256 // head_dim, 1, head_dim // 8]
    return gl.BlockedLayout([1, RUN, 8], threads, [num_warps, 1, 1], [2, 1, 0])


@gluon.constexpr_function
def product_layout(columns, k):
    """The layout of a multiplying group's result. k: inner size of the instruction, 32 bytes."""
    return gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, k])


@gluon.jit
def look_up(table, positions, end, BLOCK_SIZE: gl.constexpr):
    """Blocks of the cache that hold these positions of a sequence; 0 from position `end` on."""
    return gl.load(table + positions // BLOCK_SIZE, mask=positions < end, other=0)


@gluon.jit
def find_offsets(block_ids, positions, BLOCK_SIZE: gl.constexpr, KV_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Offsets of these positions in the cache, of KV head 0."""
    return (block_ids.to(gl.int64) * BLOCK_SIZE + positions % BLOCK_SIZE) * (KV_HEADS * HEAD_DIM)


@gluon.jit
def begin_rows(zeros, HEAD_DIM: gl.constexpr):
    """m_i, l_i and acc of rows that have seen no key; zeros: like their scores."""
    ROWS: gl.constexpr = zeros.shape[0]
    # Finite, so that a row that sees no key of a block does not compute inf - inf.
    m_i = gl.full([ROWS], -1e30, gl.float32, gl.SliceLayout(1, zeros.type.layout))
    acc = gl.zeros([ROWS, HEAD_DIM], gl.float32, product_layout(HEAD_DIM, 16))
    return m_i, thread_sums(zeros), acc


@gluon.jit
def start_scores(q, k_stages, step, zeros):
    """Start the product of queries and the keys of a step."""
    keys = k_stages.index(step % k_stages.shape[0]).permute((1, 0))
    return warpgroup_mma(q, keys, zeros, use_acc=False, is_async=True)


@gluon.jit
def start_step(
    q, shared, acc, qk, m_i, l_i, step, q_positions, start_n, scale, softcap, window, needs_mask,
    WINDOWED: gl.constexpr, SOFTCAP: gl.constexpr, LOADED: gl.constexpr = False,
):  # fmt: skip
    """Start both products of a step; qk: scores of the previous step, of the block from `start_n` on.

    LOADED: whether TMA has loaded the step's keys and values, which needs no memory fence. Without one the compiler
    also computes the sums of weights during the products.
    Returns the sums and the new scores, both in flight, and the new m_i and l_i.
    """
    _, k_stages, v_stages, _, _, filled, _ = shared
    STAGES: gl.constexpr = k_stages.shape[0]
    qk_layout: gl.constexpr = qk.type.layout
    WAITS_EARLY: gl.constexpr = STAGES > 2  # with two stages, a copy takes about as long as the softmax
    if WAITS_EARLY:
        if LOADED:
            wait_until_filled(filled, step)
        else:
            wait_for_stage(filled, step)
    p, acc, m_i, l_i = soften(
        qk, acc, m_i, l_i, q_positions, start_n, scale, softcap, window, needs_mask, WINDOWED, SOFTCAP
    )
    left = gl.convert_layout(p.to(q.dtype), gl.DotOperandLayout(0, acc.type.layout, 2))
    zeros = gl.zeros(qk.shape, gl.float32, qk_layout)
    if not WAITS_EARLY:
        if LOADED:
            wait_until_filled(filled, step)
        else:
            wait_for_stage(filled, step)
    acc = warpgroup_mma(left, v_stages.index(step % STAGES), acc, is_async=True)
    qk = start_scores(q, k_stages, step, zeros)
    return acc, qk, m_i, l_i


@gluon.jit
def add_sink(l_i, m_i, sinks, rows, head, GROUP_SIZE: gl.constexpr):
    """Add the weight of the attention sink of each row's query head to its sum."""
    sink = gl.load(sinks + head * GROUP_SIZE + rows % GROUP_SIZE)
    return l_i + gl.exp2(sink * 1.4426950408889634 - m_i)


@gluon.jit
def total(l_i, m_i, sinks, rows, head, GROUP_SIZE: gl.constexpr, SINKS: gl.constexpr):
    """Sums of rows, from those of threads, with the attention sink if there is one."""
    l_i = gl.convert_layout(gl.sum(l_i, 1), m_i.type.layout)
    if SINKS:
        l_i = add_sink(l_i, m_i, sinks, rows, head, GROUP_SIZE)
    return l_i
