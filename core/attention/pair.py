"""Two attention backends combined: the first serves prefill, the second decode."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal

import attrs
from attrs import frozen

from engine.core.attention.base import API, AttentionBackend, AttentionSpec, GraphSlot, GraphSupport, KVLayout
from engine.core.config.structure import structure_options

if TYPE_CHECKING:
    import torch

    from engine.core.attention.base import HeadRotation
    from engine.core.attention.batch import ForwardBatch
    from engine.core.attention.kv_pool import KVPool
    from engine.core.device import DeviceInfo

Role = Literal["prefill", "decode"]
ROLES: tuple[Role, Role] = ("prefill", "decode")
"""Roles of the two backends, in the order of their names; also the tables of the pair's options."""


@frozen
class NoOptions:
    """Options of a backend without settings."""


@frozen(slots=False)  # a slot would leave no room for the cached property
class AttentionPair:
    """Two backend classes that together stand in for one; calling it constructs the combined backend.

    Both backends read the same KV pool.
    """

    names: tuple[str, str]
    """The backends' names: for prefill, for decode."""
    parts: tuple[type[AttentionBackend[Any, Any]], type[AttentionBackend[Any, Any]]]

    @property
    def kv_layout(self) -> KVLayout:
        """Layout of the KV cache; `refuses` rejects two backends of different layouts."""
        return self.parts[0].kv_layout

    @property
    def graphs(self) -> GraphSupport:
        """Which batches may be captured in a CUDA graph, at most."""
        return _common_graphs(self.parts[0].graphs, self.parts[1].graphs)

    @property
    def block_sizes(self) -> tuple[int, ...] | None:
        """Block sizes that both read, as the decode backend prefers them: it reads the cache at every step."""
        prefill, decode = (part.block_sizes for part in self.parts)
        if prefill is None or decode is None:
            return decode if prefill is None else prefill
        return tuple(size for size in decode if size in prefill)

    @property
    def reads_sinks(self) -> bool:
        """Whether both compute attention sinks."""
        return all(part.reads_sinks for part in self.parts)

    @property
    def reads_float8(self) -> bool:
        """Whether both backends read a float8 cache."""
        return all(part.reads_float8 for part in self.parts)

    @property
    def reads_latent(self) -> bool:
        """Whether both backends read a cache whose values differ from keys in size or are a part of them."""
        return all(part.reads_latent for part in self.parts)

    @cached_property
    def options_class(self) -> type:
        """Attrs class with two fields, prefill and decode: the options of each backend."""
        fields: dict[str, Any] = {}
        for name, role, part in zip(self.names, ROLES, self.parts, strict=True):
            cls = part.options_class or NoOptions
            fields[role] = attrs.field(type=cls, factory=partial(structure_options, {}, cls, f"{name}'s options"))
        return attrs.make_class("PairOptions", fields, frozen=True, kw_only=True)

    def refuses(self, spec: AttentionSpec, device: DeviceInfo) -> str | None:
        """Return the refusals of the backends, or why the two cannot share a cache; None if they can serve."""
        refusals = []
        for name, role, part in zip(self.names, ROLES, self.parts, strict=True):
            refusal = part.refuses(spec, device)
            if refusal is not None:
                refusals.append(f"{name} (for {role}): {refusal}")
        if refusals:
            return "; ".join(refusals)
        layouts = [part.kv_layout for part in self.parts]
        if layouts[0] != layouts[1]:
            return (
                f"one KV cache has one layout, but {self.names[0]} reads {layouts[0]} and {self.names[1]} reads "
                f"{layouts[1]}; choose two backends of the same layout"
            )
        if self.block_sizes == ():
            sizes = [" or ".join(map(str, part.block_sizes or ())) for part in self.parts]
            return (
                f"{self.names[0]} reads KV blocks of {sizes[0]} tokens and {self.names[1]} of {sizes[1]}, none in "
                "common; choose two backends that share a size"
            )
        return None

    def __call__(self, spec: AttentionSpec, pool: KVPool, options: Any) -> PairedAttention:
        """Construct both backends over one pool; options: an instance of `options_class`."""
        prefill, decode = (
            part(spec, pool, getattr(options, role) if part.options_class is not None else None)
            for role, part in zip(ROLES, self.parts, strict=True)
        )
        return PairedAttention(prefill, decode, spec.output_dim)


@frozen
class PairPlan:
    """The plans of both backends; None for a backend without work in this batch."""

    num_decodes: int
    prefill: Any
    decode: Any


class PairedAttention(AttentionBackend[Any, PairPlan]):
    """Runs prefill on one backend and decode on the other; in a mixed batch each writes its rows of one output."""

    api = API

    @classmethod
    def refuses(cls, spec: AttentionSpec, device: DeviceInfo) -> str | None:
        return None  # AttentionPair.refuses has asked both backends

    def __init__(
        self, prefill: AttentionBackend[Any, Any], decode: AttentionBackend[Any, Any], output_dim: int
    ) -> None:
        self._prefill = prefill
        self._decode = decode
        self._output_dim = output_dim
        self.graphs = _common_graphs(prefill.graphs, decode.graphs)

    def set_sinks(self, sinks: Sequence[torch.Tensor | None]) -> None:
        for part in (self._prefill, self._decode):
            part.set_sinks(sinks)

    def plan(self, batch: ForwardBatch, graph: GraphSlot | None = None) -> PairPlan:
        count = batch.num_decodes
        if count == batch.num_sequences:
            return PairPlan(count, None, self._decode.plan(batch, graph))
        if not count:
            return PairPlan(count, self._prefill.plan(batch, graph), None)
        decodes, prefills = split_batch(batch)
        return PairPlan(count, self._prefill.plan(prefills, graph), self._decode.plan(decodes, graph))

    def forward(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: PairPlan) -> torch.Tensor:
        if plan.prefill is None:
            return self._decode.forward(layer, q, k, v, plan.decode)
        if plan.decode is None:
            return self._prefill.forward(layer, q, k, v, plan.prefill)
        out = q.new_empty((*q.shape[:2], self._output_dim))
        self.forward_into(layer, q, k, v, plan, out)
        return out

    def forward_into(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: PairPlan, out: torch.Tensor
    ) -> None:
        if plan.prefill is None:
            self._decode.forward_into(layer, q, k, v, plan.decode, out)
        elif plan.decode is None:
            self._prefill.forward_into(layer, q, k, v, plan.prefill, out)
        else:
            # One split per tensor is cheaper than two slices; this runs once per layer.
            sizes = [plan.num_decodes, len(q) - plan.num_decodes]
            (q, q_new), (k, k_new), (v, v_new), (out, out_new) = (
                tensor.split_with_sizes(sizes) for tensor in (q, k, v, out)
            )
            self._decode.forward_into(layer, q, k, v, plan.decode, out)
            self._prefill.forward_into(layer, q_new, k_new, v_new, plan.prefill, out_new)

    def rotate_and_forward(
        self, layer: int, qkv: torch.Tensor, rotation: HeadRotation, plan: PairPlan
    ) -> torch.Tensor | None:
        if plan.prefill is None:
            return self._decode.rotate_and_forward(layer, qkv, rotation, plan.decode)
        if plan.decode is None:
            return self._prefill.rotate_and_forward(layer, qkv, rotation, plan.prefill)
        return None


def split_batch(batch: ForwardBatch) -> tuple[ForwardBatch, ForwardBatch]:
    """Split a mixed batch into a batch of the decoding sequences and one of the prefilling sequences.

    All tensors are views, except the `query_starts` and `logit_rows` of the prefilling sequences. The logits of every
    decoding sequence's one token are computed.
    """
    count = batch.num_decodes

    def part(which: slice, starts: torch.Tensor, logit_rows: torch.Tensor, num_decodes: int) -> ForwardBatch:
        return attrs.evolve(
            batch,
            tokens=batch.tokens[which],
            positions=batch.positions[which],
            slots=batch.slots[which],
            query_starts=starts,
            context_lens=batch.context_lens[which],
            block_tables=batch.block_tables[which],
            logit_rows=logit_rows,
            num_decodes=num_decodes,
            query_lens_host=batch.query_lens_host[which],
            context_lens_host=batch.context_lens_host[which],
            block_tables_host=lambda: batch.block_tables_host[which],
        )

    # A decoding sequence has one token, so tokens [:count] and sequences [:count] are the same indices.
    decodes = part(slice(count), batch.query_starts[: count + 1], batch.logit_rows[:count], count)
    prefills = part(slice(count, None), batch.query_starts[count:] - count, batch.logit_rows[count:] - count, 0)
    return decodes, prefills


def _common_graphs(prefill: GraphSupport, decode: GraphSupport) -> GraphSupport:
    """The batches that may be captured: only the decode backend runs in decode batches, both in any others."""
    return "decode" if decode == "any" and prefill != "any" else decode
