"""Attention in plain PyTorch: gathers each sequence's keys and values and calls scaled_dot_product_attention.

Runs wherever torch runs; the reference for the other backends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from attrs import frozen

from engine.core.attention import AttentionBackend, AttentionSpec, ForwardBatch, GraphSlot, KVPool, layers_by_window
from engine.core.device import DeviceInfo
from engine.plugins.attention.refusals import kv_dtype_refusal

MAX_TILE = 1024
"""Maximum queries per tile."""
MIN_TILE = 16
"""Minimum queries per tile, whatever the length of the context."""
MAX_MASK_ELEMENTS = 2**25
"""Maximum size of a tile's mask on a GPU: 64 MiB in 16-bit types. On a CPU a mask is a view of a vector."""
MAX_SCORES = 2**23
"""Maximum number of scores of a tile, over all heads, where scores are kept in memory (soft cap, sinks): 32 MiB."""


@frozen
class Tile:
    """Adjacent queries of a prefilling sequence, and the keys that any of them sees."""

    queries: slice
    keys: slice
    mask: torch.Tensor
    """[queries, keys]: 0 where a query sees a key, -inf elsewhere."""


@frozen
class Group:
    """Sequences computed in one call, their queries and their keys each padded to a common length."""

    query_rows: torch.Tensor | slice
    """[sequences * queries]: rows of q; a slice where the rows are adjacent."""
    num_sequences: int
    slots: torch.Tensor
    """[sequences * keys]: slots of keys and values in the pool; padding repeats a visible key."""
    mask: torch.Tensor | None
    """[sequences, 1, queries, keys]: 0 where a query sees a key, -inf elsewhere; None: every key, or causal."""
    causal: bool
    """Whether attention is plainly causal, with as many queries as keys."""
    tiles: Sequence[Tile] = ()
    """If any, what to compute, one tile after the other. `slots` are then those of the sequence's keys from the last to
    the first."""


class TorchAttention(AttentionBackend[None, Mapping[int, Sequence[Group]]]):
    """Paged, grouped-query, causal attention with optional sliding window, soft cap and sinks."""

    api = "2"
    reads_float8 = True
    reads_latent = True
    reads_sinks = True

    @classmethod
    def refuses(cls, spec: AttentionSpec, device: DeviceInfo) -> str | None:
        return kv_dtype_refusal(spec)

    def __init__(self, spec: AttentionSpec, pool: KVPool, options: Any) -> None:
        self._spec = spec
        self._windows = layers_by_window(spec)
        self._sinks: Sequence[torch.Tensor | None] = (None,) * spec.num_layers
        self._keeps_scores = spec.softcap is not None or any(spec.sinks)
        """Whether any layer computes its scores here, rather than in scaled_dot_product_attention."""
        self._scales = pool.scales
        self._dtype = getattr(torch, spec.dtype)
        # Float8 is gathered as bytes: torch does not gather float8 on every device.
        stored = torch.uint8 if pool.is_float8 else self._dtype
        self._kv_dtype = getattr(torch, spec.kv_dtype)
        self._keys = [keys.view(stored).flatten(0, 1) for keys in pool.keys]
        self._values = [values.view(stored).flatten(0, 1) for values in pool.values]
        # Gathered into buffers that are kept: fresh memory pages from the system cost more than the copy itself.
        self._gathered_keys = self._keys[0].new_empty(0, spec.num_kv_heads, spec.head_dim)
        self._gathered_values = self._keys[0].new_empty(0, spec.num_kv_heads, spec.output_dim)

    def set_sinks(self, sinks: Sequence[torch.Tensor | None]) -> None:
        self._sinks = sinks

    def plan(self, batch: ForwardBatch, graph: GraphSlot | None = None) -> Mapping[int, Sequence[Group]]:
        prefills = self.plan_prefill(batch)
        plans: dict[int, Sequence[Group]] = {}
        for window, layers in self._windows.items():
            groups = [*self._decode_groups(batch, window), *prefills[layers[0]]]
            plans.update(dict.fromkeys(layers, groups))
        return plans

    def plan_prefill(self, batch: ForwardBatch) -> Mapping[int, Sequence[Group]]:
        """Plan the prefilling sequences alone, for a backend that computes decodes itself."""
        plans: dict[int, Sequence[Group]] = {}
        for window, layers in self._windows.items():
            plans.update(dict.fromkeys(layers, self._prefill_groups(batch, window)))
        return plans

    def forward(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Mapping[int, Sequence[Group]]
    ) -> torch.Tensor:
        groups = plan[layer]
        if len(groups) == 1:
            return self._attend(layer, q, groups[0])
        out = q.new_empty(*q.shape[:2], self._spec.output_dim)
        self.forward_groups(layer, q, groups, out)
        return out

    def forward_into(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        plan: Mapping[int, Sequence[Group]],
        out: torch.Tensor,
    ) -> None:
        self.forward_groups(layer, q, plan[layer], out)

    def forward_groups(self, layer: int, q: torch.Tensor, groups: Sequence[Group], out: torch.Tensor) -> None:
        """Compute attention for the groups' rows of q into the same rows of out.

        q: [tokens, heads, head_dim]; out: [tokens, heads, output_dim].
        """
        for group in groups:
            out[group.query_rows] = self._attend(layer, q[group.query_rows], group)

    def _attend(self, layer: int, q: torch.Tensor, group: Group) -> torch.Tensor:
        """q: [sequences * queries, heads, head_dim], one sequence after the other -> [same, heads, output_dim]."""
        count = group.num_sequences
        keys, values, queries = (
            part.view(count, -1, *part.shape[1:]).transpose(1, 2) for part in (*self._gather(layer, group.slots), q)
        )
        scale, sinks = self._spec.scale * self._scales[layer].key, self._sinks[layer]
        if group.tiles:
            out = queries.new_empty(*queries.shape[:-1], self._spec.output_dim)
            for tile in group.tiles:
                # On a GPU, the kernels need a mask whose rows are aligned.
                mask = tile.mask if tile.mask.device.type == "cpu" else tile.mask.contiguous()
                part = keys[:, :, tile.keys], values[:, :, tile.keys]
                out[:, :, tile.queries] = self._attend_to(queries[:, :, tile.queries], *part, mask, scale, sinks)
        else:
            out = self._attend_to(queries, keys, values, group.mask, scale, sinks, causal=group.causal)
        if self._scales[layer].value != 1:
            out = out * self._scales[layer].value
        return out.transpose(1, 2).flatten(0, 1)

    def _attend_to(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        scale: float,
        sinks: torch.Tensor | None,
        *,
        causal: bool = False,
    ) -> torch.Tensor:
        """Compute attention. q, k: [sequences, heads, length, head_dim]; v: [..., output_dim]; sinks: [heads]."""
        if self._spec.softcap is not None or sinks is not None:
            return _attend_by_scores(q, k, v, mask, scale, self._spec.softcap, sinks)
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )

    def _gather(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Gather the (possibly quantized) keys and values of `slots`, converted to the activations' type.

        Returns keys [len(slots), kv_heads, head_dim] and values [..., output_dim], valid until the next call.
        """
        count = len(slots)
        if count > len(self._gathered_keys):
            self._gathered_keys = self._gathered_keys.new_empty(count, *self._gathered_keys.shape[1:])
            if not self._spec.latent:
                self._gathered_values = self._gathered_values.new_empty(count, *self._gathered_values.shape[1:])
        keys = self._gathered_keys[:count]
        torch.index_select(self._keys[layer], 0, slots, out=keys)
        if self._spec.latent:
            return keys, keys[..., : self._spec.output_dim]
        values = self._gathered_values[:count]
        torch.index_select(self._values[layer], 0, slots, out=values)
        return keys.view(self._kv_dtype).to(self._dtype), values.view(self._kv_dtype).to(self._dtype)

    def _decode_groups(self, batch: ForwardBatch, window: int | None) -> list[Group]:
        """Group decoding sequences of similar lengths, so that padding at most doubles the work."""
        if not batch.num_decodes:
            return []
        ends = batch.context_lens_host[: batch.num_decodes].astype(np.int64)
        starts = np.zeros_like(ends) if window is None else np.maximum(ends - window, 0)
        lengths = ends - starts
        buckets = np.frexp(np.maximum(lengths - 1, 1))[1]
        groups = []
        for bucket in np.unique(buckets):
            members = np.flatnonzero(buckets == bucket)
            count, keys = len(members), int(lengths[members].max())
            offsets = np.arange(keys)
            padding = offsets >= lengths[members, None]
            positions = starts[members, None] + np.where(padding, 0, offsets)
            mask = None
            if padding.any():
                mask = self._to_device(np.where(padding, -np.inf, 0.0)).to(self._dtype).view(count, 1, 1, keys)
            adjacent = members[-1] - members[0] + 1 == count
            rows = slice(int(members[0]), int(members[-1]) + 1) if adjacent else self._to_device(members)
            slots = self._slots(batch, members, positions)
            groups.append(Group(query_rows=rows, num_sequences=count, slots=slots, mask=mask, causal=False))
        return groups

    def _prefill_groups(self, batch: ForwardBatch, window: int | None) -> list[Group]:
        """Make one group per prefilling sequence."""
        groups = []
        row = batch.num_decodes
        for sequence in range(batch.num_decodes, batch.num_sequences):
            queries = int(batch.query_lens_host[sequence])
            end = int(batch.context_lens_host[sequence])
            first = end - queries
            start = 0 if window is None else max(first + 1 - window, 0)
            whole = first == 0 and (window is None or window >= end)
            causal = whole and not self._keeps_scores
            positions = np.arange(start, end) if causal else np.arange(end - 1, start - 1, -1)
            groups.append(
                Group(
                    query_rows=slice(row, row + queries),
                    num_sequences=1,
                    slots=self._slots(batch, np.array([sequence]), positions[None]),
                    mask=None,
                    causal=causal,
                    tiles=() if causal else self._tiles(queries, end - start, window),
                )
            )
            row += queries
        return groups

    def _tiles(self, queries: int, keys: int, window: int | None) -> list[Tile]:
        """Divide the queries of a sequence, which come last among its keys, into tiles of bounded memory.

        Whether a query sees a key depends on their distance only. With the keys from the last to the first, entry
        [i, j] of every tile's mask therefore depends on i + j only: all masks are views of one vector.
        """
        device = self._keys[0].device
        size = MAX_TILE
        if device.type != "cpu":
            size = min(size, MAX_MASK_ELEMENTS // keys)
        if self._keeps_scores:
            size = min(size, MAX_SCORES // (keys * self._spec.num_heads))
        size = min(max(size, MIN_TILE), queries)
        visible = torch.full((size + keys,), -torch.inf, dtype=self._dtype, device=device)
        visible[size - 1 : None if window is None else size - 1 + window] = 0.0
        tiles = []
        for begin in range(0, queries, size):
            end = min(begin + size, queries)
            count = end - begin
            first = queries - end  # keys behind the tile's last query
            last = keys if window is None else min(keys, first + count - 1 + window)
            mask = visible.as_strided((count, last - first), (1, 1), size - count)
            tiles.append(Tile(queries=slice(begin, end), keys=slice(first, last), mask=mask))
        return tiles

    def _slots(
        self, batch: ForwardBatch, sequences: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]
    ) -> torch.Tensor:
        """Return the pool slots of `positions` [len(sequences), n]: [len(sequences) * n]."""
        size = self._spec.block_size
        blocks = batch.block_tables_host[sequences[:, None], positions // size].astype(np.int64)
        return self._to_device((blocks * size + positions % size).reshape(-1))

    def _to_device(self, array: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._keys[0].device)


def _attend_by_scores(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Compute scaled_dot_product_attention with capped scores, or sinks, or both.

    q, k: [sequences, heads, length, head_dim]; v: [..., output_dim]; sinks: [heads].
    """
    dtype = q.dtype
    if q.device.type == "cpu":  # in 16 bits oneDNN would compile kernels for each length, and keep them
        q, k, v = q.float(), k.float(), v.float()
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    scores = (q @ k.transpose(2, 3)).float() * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores + mask
    if sinks is None:
        weights = scores.softmax(-1)
    else:
        column = sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.cat((scores, column), -1).softmax(-1)[..., :-1]
    return (weights.to(q.dtype) @ v).to(dtype)
