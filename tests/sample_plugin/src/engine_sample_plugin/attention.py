"""Attention by scaled_dot_product_attention, one sequence after the other: simple, not fast."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from attrs import field, frozen, validators

from engine.core.attention import AttentionBackend, AttentionSpec, ForwardBatch, GraphSlot, KVPool
from engine.core.device import DeviceInfo


@frozen
class Options:
    """[attention.options]."""

    max_keys: int = field(default=1 << 20, validator=validators.ge(1))
    """Refuse a context longer than this, tokens."""


@frozen
class Piece:
    """One sequence of a batch."""

    rows: slice
    """The sequence's rows in the tensors of the batch."""
    context: int
    slots: torch.Tensor
    """[context] int64: the slots of the sequence's keys and values in the pool."""


class SampleAttention(AttentionBackend[Options, list[Piece]]):
    """Gathers each sequence's keys and values and attends to them."""

    api = "2"
    options_class = Options

    @classmethod
    def refuses(cls, spec: AttentionSpec, device: DeviceInfo) -> str | None:
        """Refuse capped scores, and keys and values of another type than the queries."""
        if spec.softcap is not None:
            return "sample-sdpa knows no capped scores (softcap); use --attention auto"
        if spec.kv_dtype != spec.dtype:
            return f"sample-sdpa reads keys and values in {spec.dtype} only; use --kv-dtype auto"
        return None

    def __init__(self, spec: AttentionSpec, pool: KVPool, options: Options) -> None:
        self.spec = spec
        self.pool = pool
        self.options = options

    def plan(self, batch: ForwardBatch, graph: GraphSlot | None = None) -> list[Piece]:
        """Find each sequence's queries, keys and values."""
        pieces = []
        start = 0
        for row, (new, context) in enumerate(zip(batch.query_lens_host, batch.context_lens_host, strict=True)):
            if context > self.options.max_keys:
                raise ValueError(f"a context of {context} tokens exceeds attention.options.max_keys")
            at = torch.arange(int(context), device=batch.slots.device)
            table = batch.block_tables[row].long()
            slots = table[at // self.spec.block_size] * self.spec.block_size + at % self.spec.block_size
            pieces.append(Piece(slice(start, start + int(new)), int(context), slots))
            start += int(new)
        return pieces

    def forward(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: list[Piece]) -> torch.Tensor:
        out = torch.empty_like(q)
        window = self.spec.sliding_windows[layer]
        keys, values = self.pool.keys[layer].flatten(0, 1), self.pool.values[layer].flatten(0, 1)
        for piece in plan:
            queries = q[piece.rows]
            start = 0 if window is None else max(piece.context - len(queries) + 1 - window, 0)  # the first key in use
            slots = piece.slots[start:]
            at = torch.arange(start, piece.context, device=q.device)
            position = at[len(slots) - len(queries) :, None]
            seen = at <= position
            if window is not None:
                seen &= at > position - window
            out[piece.rows] = F.scaled_dot_product_attention(
                queries.transpose(0, 1),
                keys[slots].transpose(0, 1),
                values[slots].transpose(0, 1),
                attn_mask=seen,
                scale=self.spec.scale,
                enable_gqa=True,
            ).transpose(0, 1)
        return out
