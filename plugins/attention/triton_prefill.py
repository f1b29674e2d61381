"""Plans prefill attention of the Triton backend: tiles, launch parameters, and blocks to convert beforehand."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from attrs import frozen

from engine.core.attention import AttentionSpec, ForwardBatch, KVPool
from engine.core.transfer import to_device

MIN_CONVERTED_ROWS = 512
"""Minimum rows (new tokens times query heads per KV head) of a sequence whose keys and values are converted once, to 16
bits or to tiles of float8: four tiles of queries, each of which would convert them again."""
MAX_CONVERTED_BYTES = 2**28
"""Maximum memory of the converted keys and values of one layer, bytes; sequences beyond it are read from the cache."""


@frozen
class PrefillPart:
    """Prefilling sequences that are computed by one launch per layer."""

    tiles: torch.Tensor
    """[tiles, 4] int32, from `prefill_tiles`; if config.across_tiles, [turns + 2, programs, 4], from
    `prefill_schedule`."""
    tables: torch.Tensor
    """[sequences, blocks] int32: the block tables that tiles refer to."""
    config: Any
    """A PrefillConfig."""
    widened: torch.Tensor | None = None
    """[blocks] int32: blocks of a float8 cache to widen first, `tables` holding indices into this list; None: `tables`
    hold blocks of the cache."""
    order: torch.Tensor | None = None
    """[turns, programs] int32, from `prefill_order`; None: tiles in their order."""


@frozen
class Float8Part:
    """Prefilling sequences that one launch per layer computes in float8."""

    tiles: torch.Tensor
    """[tiles, 4] int32, as of `persistent_float8.float8_prefill`."""
    blocks: torch.Tensor
    """[blocks] int32: blocks of the cache to gather into tiles of keys and values first."""
    spans: torch.Tensor
    """[tiles of keys, 3] int32, as of `float8_tiles.gather_tiles`."""


class PrefillPlanner:
    """Plans the prefilling sequences of a batch for all layers of one cache group.

    The persistent kernel reads 16-bit keys and values. With a float8 cache, those of a sequence are first widened
    (ops.attention.widen_blocks), if the sequence has enough new tokens for this to pay. If asked for, the float8 kernel
    computes such sequences instead and reads tiles (ops.attention.float8_tiles). The other sequences are read in place,
    and computed in the type of the activations.
    """

    def __init__(self, spec: AttentionSpec, pool: KVPool, *, float8: bool = False) -> None:
        """float8: whether to use the float8 kernel, where `float8_prefill_refusal` has no objection."""
        from engine.ops.attention.paged_prefill_config import can_persist, persistent_config
        from engine.ops.common.launch import num_sms

        self._spec = spec
        self._group = spec.num_heads // spec.num_kv_heads
        keys, dtype = pool.keys[0], getattr(torch, spec.dtype)
        self._itemsize = dtype.itemsize
        self._shared_memory = shared_memory(keys.device)
        self._cache_bytes = cache_bytes(keys.device)
        self._persistent = can_persist(keys, dtype, self._group)
        self._sms = num_sms(keys.device)
        windows = spec.sliding_windows
        self._window = None if None in windows else max(filter(None, windows))
        """The largest window; None if a layer has none."""
        self.choose_widened_config: Callable[[Any], Any] | None = None
        """Launch parameters for widened sequences, by their PrefillWork; None: none is widened."""
        if pool.is_float8 and can_persist(torch.empty_like(keys[:0], dtype=dtype), dtype, self._group):
            self.choose_widened_config = partial(persistent_config, spec.head_dim)
        self._float8 = float8
        self._blocks_per_tile = 1
        """Blocks that are converted together, if any: a tile of keys of the float8 kernel, or a block."""
        if float8:
            from engine.ops.attention.float8_tiles import TILE

            self._blocks_per_tile = TILE // spec.block_size
        self.min_converted_rows = MIN_CONVERTED_ROWS
        itemsize = keys.itemsize if float8 else dtype.itemsize
        self.max_converted_blocks = _power_of_2_below(MAX_CONVERTED_BYTES // (2 * keys[0].numel() * itemsize))
        """A power of two, since that many are allocated."""

    def plan(self, batch: ForwardBatch) -> tuple[PrefillPart | Float8Part, ...]:
        """The launches for all sequences behind the decoding ones."""
        sequences = np.arange(batch.num_decodes, batch.num_sequences)
        if self.choose_widened_config is None and not self._float8:
            return (self._direct(batch, sequences),)
        converted = self._find_converted(batch, sequences)
        rest = np.setdiff1d(sequences, converted)
        parts: list[PrefillPart | Float8Part] = []
        if len(converted):
            parts.append(self._tiled(batch, converted) if self._float8 else self._widened(batch, converted))
        return (*parts, self._direct(batch, rest)) if len(rest) else tuple(parts)

    def _direct(self, batch: ForwardBatch, sequences: npt.NDArray[np.int64]) -> PrefillPart:
        """Read the cache's blocks in place."""
        from engine.ops.attention.paged_prefill import prefill_tiles
        from engine.ops.attention.paged_prefill_config import prefill_config

        queries = batch.query_lens_host
        # Without TMA an order gains nothing where the GPU's cache holds all keys and values.
        size = 2 * int(batch.context_lens_host[sequences].sum()) * self._spec.num_kv_heads * self._spec.head_dim
        ordered = size * self._itemsize > self._cache_bytes
        config = prefill_config(
            self._work(batch, sequences, ordered=ordered),
            self._group,
            self._spec.head_dim,
            self._itemsize,
            self._shared_memory,
            persistent=self._persistent,
        )
        tiles = prefill_tiles(
            queries, batch.context_lens_host, sequences, config.tokens(self._group), self._block_n(config)
        )
        tiles, order = self._distribute(tiles, config, ordered=ordered)
        [sent], sent_order = _send([tiles], order, batch.tokens.device)
        return PrefillPart(sent, batch.block_tables, config, order=sent_order)

    def _distribute(
        self, tiles: npt.NDArray[np.int32], config: Any, *, ordered: bool
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32] | None]:
        """The schedule of persistent_short instead of the tiles, if `config` is for it; otherwise the tiles and, if
        `ordered`, the order of persistent_prefill in layers without a window, if any layer is for it."""
        from engine.ops.attention.paged_prefill import prefill_order
        from engine.ops.attention.prefill_schedule import prefill_schedule

        heads = self._spec.num_kv_heads
        if config.across_tiles:
            return prefill_schedule(tiles, heads, self._sms, config.block_n, window=self._window), None
        if not ordered or self._window is not None or not config.persistent:
            return tiles, None
        return tiles, prefill_order(tiles, heads, self._sms)

    def _block_n(self, config: Any) -> int | None:
        """Keys per block, if tiles may be moved to have fewer blocks (`prefill_tiles`); None if layers have windows."""
        return config.block_n if config.persistent and self._window is None else None

    def _work(self, batch: ForwardBatch, sequences: npt.NDArray[np.int64], *, ordered: bool) -> Any:
        """The PrefillWork of sequences."""
        from engine.ops.attention.paged_prefill_config import PrefillWork

        lengths = batch.query_lens_host[sequences], batch.context_lens_host[sequences]
        return PrefillWork.of(
            *lengths,
            group=self._group,
            kv_heads=self._spec.num_kv_heads,
            sms=self._sms,
            window=self._window,
            ordered=ordered,
        )

    def _find_converted(self, batch: ForwardBatch, sequences: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The sequences to convert, in ascending order: those with the most new tokens, as far as there is room."""
        queries, room, found = batch.query_lens_host, self.max_converted_blocks, []
        for sequence in sequences[np.argsort(-queries[sequences], kind="stable")]:
            if queries[sequence] * self._group < self.min_converted_rows:
                break
            blocks = self._converted_blocks(batch, sequence)
            if blocks <= room:
                room -= blocks
                found.append(sequence)
        return np.array(sorted(found), np.int64)

    def _converted_blocks(self, batch: ForwardBatch, sequence: int) -> int:
        """Memory that the conversion of a sequence takes, in blocks: for the float8 kernel, whole tiles of keys."""
        begin, end = self._tiles_of_keys(batch, sequence)
        return (end - begin) * self._blocks_per_tile

    def _tiles_of_keys(self, batch: ForwardBatch, sequence: int) -> tuple[int, int]:
        """The range of tiles, of `_blocks_per_tile` blocks each, that contain any of `_blocks`."""
        begin, end = self._blocks(batch, sequence)
        return begin // self._blocks_per_tile, -(-end // self._blocks_per_tile)

    def _blocks(self, batch: ForwardBatch, sequence: int) -> tuple[int, int]:
        """The range of a sequence's block table that its new tokens see in any layer."""
        context = int(batch.context_lens_host[sequence])
        begin = 0
        if self._window is not None:
            first_position = context - int(batch.query_lens_host[sequence])
            begin = max(first_position + 1 - self._window, 0) // self._spec.block_size
        return begin, -(-context // self._spec.block_size)

    def _widened(self, batch: ForwardBatch, sequences: npt.NDArray[np.int64]) -> PrefillPart:
        """Read these sequences from widened blocks, numbered consecutively over all sequences."""
        from engine.ops.attention.paged_prefill import prefill_tiles

        assert self.choose_widened_config is not None
        ranges = [self._blocks(batch, sequence) for sequence in sequences]
        tables = np.zeros((len(sequences), max(end for _, end in ranges)), np.int32)
        parts: list[npt.NDArray[np.int32]] = []
        count = 0
        for table, sequence, (begin, end) in zip(tables, sequences, ranges, strict=True):
            table[begin:end] = np.arange(count, count + end - begin)
            parts.append(batch.block_tables_host[sequence, begin:end])
            count += end - begin
        blocks = np.concatenate(parts)
        queries, contexts = batch.query_lens_host, batch.context_lens_host
        config = self.choose_widened_config(self._work(batch, sequences, ordered=True))
        tiles = prefill_tiles(queries, contexts, sequences, config.tokens(self._group), self._block_n(config))
        tiles[:, 0] = np.searchsorted(sequences, tiles[:, 0])
        tiles, order = self._distribute(tiles, config, ordered=True)
        (sent_tiles, sent_tables, sent_blocks), sent_order = _send([tiles, tables, blocks], order, batch.tokens.device)
        return PrefillPart(sent_tiles, sent_tables, config, sent_blocks, sent_order)

    def _tiled(self, batch: ForwardBatch, sequences: npt.NDArray[np.int64]) -> Float8Part:
        """Read these sequences from tiles, numbered consecutively over all sequences."""
        from engine.ops.attention.float8_tiles import TILE
        from engine.ops.attention.paged_prefill import prefill_tiles
        from engine.ops.attention.persistent_float8 import BLOCK_M

        per_tile = self._blocks_per_tile
        blocks: list[npt.NDArray[np.int32]] = []
        spans: list[npt.NDArray[np.int32]] = []
        origins = []
        count = 0
        for sequence in sequences:
            _, end = self._blocks(batch, sequence)
            context = int(batch.context_lens_host[sequence])
            numbers = np.arange(*self._tiles_of_keys(batch, sequence), dtype=np.int32)
            of_tiles = np.zeros(len(numbers) * per_tile, np.int32)
            part = batch.block_tables_host[sequence, numbers[0] * per_tile : end]
            of_tiles[: len(part)] = part
            blocks.append(of_tiles)
            first_new = np.full_like(numbers, context - batch.query_lens_host[sequence])
            spans.append(np.stack([numbers * TILE, first_new, np.full_like(numbers, context)], axis=1))
            origins.append(count - numbers[0])
            count += len(numbers)
        lengths = batch.query_lens_host, batch.context_lens_host
        tiles = prefill_tiles(*lengths, sequences, BLOCK_M // self._group)
        tiles[:, 0] = np.array(origins)[np.searchsorted(sequences, tiles[:, 0])]
        arrays = [tiles, np.concatenate(blocks), np.concatenate(spans)]
        return Float8Part(*to_device(arrays, batch.tokens.device))


def _power_of_2_below(number: int) -> int:
    """The largest power of two that is at most `number`; 0 for 0."""
    return 1 << number.bit_length() - 1 if number else 0


def _send(
    arrays: list[npt.NDArray[np.int32]], order: npt.NDArray[np.int32] | None, device: torch.device
) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """Arrays and an order, if there is one, on the device: in one copy."""
    if order is None:
        return to_device(arrays, device), None
    *sent, sent_order = to_device([*arrays, order], device)
    return sent, sent_order


def shared_memory(device: torch.device) -> int:
    """Shared memory per multiprocessor, bytes; on a CPU, where the interpreter has no limit, the least of any GPU."""
    return torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor if device.type == "cuda" else 65536


def cache_bytes(device: torch.device) -> int:
    """Size of the GPU's L2 cache; 0 for a CPU."""
    return torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 0
