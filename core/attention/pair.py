"""Two attention backends as one: the first attends to prompts, the second to decodes."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import attrs
from attrs import frozen

from engine.core.attention.base import API, AttentionBackend, AttentionSpec, GraphSlot, Plan
from engine.core.config.structure import structure_options

if TYPE_CHECKING:
    import torch

    from engine.core.attention.batch import ForwardBatch
    from engine.core.attention.kv_pool import KVPool
    from engine.core.device import DeviceInfo

ROLES = ("prefill", "decode")
"""What each part of a pair is for, in the order of their names; also the tables of the pair's options."""


@frozen
class PairPlan:
    """The plans of the parts that have something to do."""

    num_decodes: int
    prefill: Plan | None
    decode: Plan | None


@frozen
class NoOptions:
    """Of a part without settings."""


class AttentionPair(AttentionBackend):
    """Made by `pair_of`. Both parts read the same pool; in a mixed batch each writes its rows of one output."""

    api = API
    names: ClassVar[tuple[str, str]]
    """Of the parts, for prompts and for decodes."""
    parts: ClassVar[tuple[type[AttentionBackend], type[AttentionBackend]]]

    @classmethod
    def refuses(cls, spec: AttentionSpec, device: DeviceInfo) -> str | None:
        """What either part has against it, or both against each other."""
        refusals = []
        for name, role, part in zip(cls.names, ROLES, cls.parts, strict=True):
            refusal = part.refuses(spec, device)
            if refusal is not None:
                refusals.append(f"{name} (for {role}): {refusal}")
        if refusals:
            return "; ".join(refusals)
        layouts = [part.kv_layout for part in cls.parts]
        if layouts[0] != layouts[1]:
            return (
                f"one KV cache has one layout, but {cls.names[0]} reads {layouts[0]} and {cls.names[1]} reads "
                f"{layouts[1]}; choose two backends of the same layout"
            )
        if cls.block_sizes == ():
            sizes = [" or ".join(map(str, part.block_sizes or ())) for part in cls.parts]
            return (
                f"{cls.names[0]} reads KV blocks of {sizes[0]} tokens and {cls.names[1]} of {sizes[1]}, none in "
                "common; choose two backends that share a size"
            )
        return None

    def __init__(self, spec: AttentionSpec, pool: KVPool, options: Any) -> None:
        self._prefill, self._decode = (
            part(spec, pool, getattr(options, role) if part.options_class is not None else None)
            for role, part in zip(ROLES, self.parts, strict=True)
        )
        self.graphs = self._decode.graphs
        if self.graphs == "any" and self._prefill.graphs != "any":
            self.graphs = "decode"

    def plan(self, batch: ForwardBatch, graph: GraphSlot | None = None) -> PairPlan:
        """See AttentionBackend."""
        count = batch.num_decodes
        if count == batch.num_sequences:
            return PairPlan(count, None, self._decode.plan(batch, graph))
        if not count:
            return PairPlan(count, self._prefill.plan(batch, graph), None)
        decodes, prompts = split_batch(batch)
        return PairPlan(count, self._prefill.plan(prompts, graph), self._decode.plan(decodes, graph))

    def forward(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: PairPlan) -> torch.Tensor:
        """See AttentionBackend."""
        if plan.prefill is None:
            return self._decode.forward(layer, q, k, v, plan.decode)
        if plan.decode is None:
            return self._prefill.forward(layer, q, k, v, plan.prefill)
        out = q.new_empty(q.shape)
        self.forward_into(layer, q, k, v, plan, out)
        return out

    def forward_into(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: PairPlan, out: torch.Tensor
    ) -> None:
        """See AttentionBackend."""
        if plan.prefill is None:
            self._decode.forward_into(layer, q, k, v, plan.decode, out)
        elif plan.decode is None:
            self._prefill.forward_into(layer, q, k, v, plan.prefill, out)
        else:
            # One split a tensor rather than two slices: this runs once a layer.
            sizes = [plan.num_decodes, len(q) - plan.num_decodes]
            (q, q_new), (k, k_new), (v, v_new), (out, out_new) = (
                tensor.split_with_sizes(sizes) for tensor in (q, k, v, out)
            )
            self._decode.forward_into(layer, q, k, v, plan.decode, out)
            self._prefill.forward_into(layer, q_new, k_new, v_new, plan.prefill, out_new)


def pair_of(
    names: tuple[str, str], parts: tuple[type[AttentionBackend], type[AttentionBackend]]
) -> type[AttentionBackend]:
    """The backend that attends to prompts by the first of `parts` and to decodes by the second.

    Its options are two tables, prefill and decode, each of that part's own options.
    """
    members = {
        "__doc__": f"{names[0]} for prompts, {names[1]} for decodes.",
        "names": names,
        "parts": parts,
        "kv_layout": parts[0].kv_layout,
        "reads_float8": all(part.reads_float8 for part in parts),
        "block_sizes": _common(parts[0].block_sizes, parts[1].block_sizes),
        "options_class": _options_class(names, parts),
    }
    return type("AttentionPair", (AttentionPair,), members)


def split_batch(batch: ForwardBatch) -> tuple[ForwardBatch, ForwardBatch]:
    """The sequences that decode and the others, each as a batch of its own; of both there must be some.

    Everything is a view, but for the starts of the prompts' rows. A decode has one token, whose logits are wanted.
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
            block_tables_host=batch.block_tables_host[which],
        )

    # As many rows as sequences decode: tokens [:count] and sequences [:count] are the same places.
    decodes = part(slice(count), batch.query_starts[: count + 1], batch.logit_rows[:count], count)
    prompts = part(slice(count, None), batch.query_starts[count:] - count, batch.logit_rows[count:] - count, 0)
    return decodes, prompts


def _common(first: tuple[int, ...] | None, second: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """Page sizes that both can read, in the order the second, which reads the cache at each step, prefers."""
    if first is None or second is None:
        return second if first is None else first
    return tuple(size for size in second if size in first)


def _options_class(names: tuple[str, str], parts: tuple[type[AttentionBackend], ...]) -> type:
    fields = {}
    for name, role, part in zip(names, ROLES, parts, strict=True):
        cls = part.options_class or NoOptions
        fields[role] = attrs.field(type=cls, factory=partial(structure_options, {}, cls, f"{name}'s options"))
    return attrs.make_class("PairOptions", fields, frozen=True, kw_only=True)
