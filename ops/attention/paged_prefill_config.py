"""Launch parameters of prefill attention, by the size of the work and what the GPU has."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import triton
from attrs import evolve, frozen

from engine.ops.attention import persistent_prefill, persistent_steps
from engine.ops.common.launch import has_wgmma


@frozen(kw_only=True)
class PrefillConfig:
    """Launch parameters of a prefill kernel."""

    block_m: int
    """Rows per tile, a row being one query head of one token; a power of two, at least 16 and the group size."""
    block_n: int
    """Key positions per block; a power of two, at least 16."""
    num_warps: int
    """Warps per program; of the persistent kernel, warps in each of its three groups."""
    num_stages: int
    """Blocks of keys and values in flight or in use."""
    persistent: bool = False
    """Whether a persistent kernel runs."""
    across_tiles: bool = False
    """Whether the persistent kernel is that of persistent_short, not that of persistent_prefill."""

    def tokens(self, group: int) -> int:
        """New tokens per tile, with `group` query heads per KV head."""
        return self.block_m // group


PERSISTENT = PrefillConfig(block_m=128, block_n=128, num_warps=4, num_stages=2, persistent=True)
"""The fastest, or nearly, of those that benchmarks/attention.py --tune tries, on an H200."""
PERSISTENT_NARROW = evolve(PERSISTENT, num_stages=4)
"""For heads of up to NARROW_HEAD_DIM, whose blocks are small enough for four stages."""
NARROW_HEAD_DIM = 64
SHORT_KEYS = 300
"""Maximum mean number of keys per new token for which the kernel of persistent_short is chosen."""
SHORT_KEYS_OF_MANY = 750
"""The same where programs have at least MANY_TILES tiles each: more steps per tile cost time where the longest tile
determines the time."""
SHORT_KEYS_OF_MANY_NARROW = 580
"""The same for heads of up to NARROW_HEAD_DIM."""
MANY_TILES = 1.5
SHORT_KEYS_ORDERED = 200
"""As SHORT_KEYS, where persistent_prefill is faster than otherwise: see PrefillWork.ordered."""
SHORT_KEYS_OF_MANY_ORDERED = 400
MANY_TILES_ORDERED = 2.5
SHORT_KEYS_OF_WINDOW = 900
"""The same where the window limits at least LIMITED_SHARE of the new tokens. Their tiles begin within a block, so
more of larger blocks is computed in vain, and all take the same time."""
LIMITED_SHARE = 0.25


def can_persist(keys: torch.Tensor, dtype: torch.dtype, group: int) -> bool:
    """Whether the persistent kernel supports queries of `dtype` and `group` query heads per KV head over such keys.

    keys: [..., block_size, kv_heads, head_dim].
    """
    block_size, _, head_dim = keys.shape[-3:]
    return (
        has_wgmma(keys.device)
        and keys.dtype == dtype
        and dtype.itemsize == 2
        and head_dim in persistent_prefill.HEAD_DIMS
        and block_size % persistent_steps.RUN == 0
        and group <= PERSISTENT.block_m
    )


@frozen(kw_only=True)
class PrefillWork:
    """The size of a prefill, by which launch parameters are chosen."""

    longest: int
    """Maximum number of new tokens per sequence."""
    keys: float
    """Mean number of keys that a new token sees; with a window, at most the window and the tokens of a tile."""
    tiles: float
    """Tiles of PERSISTENT.block_m rows per multiprocessor, over all KV heads."""
    limited: float = 0.0
    """Share of the new tokens that see fewer keys because of the window."""
    ordered: bool = False
    """Whether persistent_prefill has an order of work (`prefill_order`): keys and values that TMA loads, or that are
    more than the GPU's cache holds."""

    @classmethod
    def of(
        cls,
        query_lens: npt.NDArray[np.int32],
        context_lens: npt.NDArray[np.int32],
        *,
        group: int,
        kv_heads: int,
        sms: int,
        window: int | None = None,
        ordered: bool = False,
    ) -> PrefillWork:
        """The work of sequences, of which each has new tokens. sms: number of multiprocessors."""
        queries = query_lens.astype(np.int64)
        tokens = max(PERSISTENT.tokens(group), 1)
        doubled = (queries * (2 * context_lens - queries + 1)).sum()  # twice the sum of keys
        limited = 0
        if window is not None:
            hidden = context_lens - (window + tokens)  # keys before those of a sequence's last tile
            beyond = np.clip(hidden, 0, queries)  # new tokens of tiles that do not see all keys
            doubled -= (beyond * (2 * hidden - beyond + 1)).sum()
            limited = beyond.sum()
        count = queries.sum()
        return cls(
            longest=int(queries.max()),
            keys=float(doubled / (2 * count)),
            tiles=int((-(-queries // tokens)).sum()) * kv_heads / sms,
            limited=float(limited / count),
            ordered=ordered,
        )


def persistent_config(head_dim: int, work: PrefillWork) -> PrefillConfig:
    """Launch parameters of the persistent kernels."""
    narrow = head_dim <= NARROW_HEAD_DIM
    config = PERSISTENT_NARROW if narrow else PERSISTENT
    if work.ordered:
        most = SHORT_KEYS_OF_MANY_ORDERED if work.tiles >= MANY_TILES_ORDERED else SHORT_KEYS_ORDERED
    elif work.tiles >= MANY_TILES:
        most = SHORT_KEYS_OF_MANY_NARROW if narrow else SHORT_KEYS_OF_MANY
    else:
        most = SHORT_KEYS
    if work.limited >= LIMITED_SHARE:
        most = SHORT_KEYS_OF_WINDOW
    if work.keys > most:
        return config
    return evolve(config, block_n=config.block_n // 2, num_stages=2 * config.num_stages, across_tiles=True)


def prefill_config(
    work: PrefillWork,
    group: int,
    head_dim: int,
    itemsize: int,
    shared_memory: int,
    *,
    persistent: bool = False,
) -> PrefillConfig:
    """Choose the launch parameters.

    group: query heads per KV head; itemsize: bytes per number; shared_memory: bytes per multiprocessor; persistent: the
    result of `can_persist`.

    128 rows with 8 warps are two warp groups of Hopper's matrix instruction. Few new tokens, and float32, which runs
    without tensor cores, take smaller tiles. The first candidate whose queries, keys and values fit into shared memory
    is chosen. The persistent kernels serve all but few new tokens.
    """
    wanted = [(128, 64, 8, 3), (128, 64, 8, 2), (64, 64, 4, 3), (64, 64, 4, 2), (64, 32, 4, 2), (32, 32, 4, 2)]
    if itemsize == 4:
        wanted = [(32, 32, 4, 2)]
    elif work.longest * group <= 64:
        wanted = wanted[2:]
    elif persistent:
        return persistent_config(head_dim, work)
    row_bytes = triton.next_power_of_2(head_dim) * itemsize
    min_m = max(16, triton.next_power_of_2(group))
    configs = [PrefillConfig(block_m=max(m, min_m), block_n=n, num_warps=w, num_stages=s) for m, n, w, s in wanted]
    smallest = PrefillConfig(block_m=min_m, block_n=16, num_warps=4, num_stages=2)
    room = shared_memory - 2048

    def fits(config: PrefillConfig) -> bool:
        return bool((config.block_m + 2 * config.num_stages * config.block_n) * row_bytes <= room)

    return next(filter(fits, configs), smallest)
