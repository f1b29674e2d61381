"""Everything on the device that a step reads and writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from attrs import field, frozen

from engine.core.models.forward_pass import ForwardPass

if TYPE_CHECKING:
    from engine.core.attention.base import AttentionBackend, GraphSlot
    from engine.core.attention.batch import ForwardBatch
    from engine.core.attention.kv_pool import KVPool
    from engine.core.models.base import Model
    from engine.core.runner.cuda_graphs import DecodeGraphs
    from engine.core.runner.drafter import Drafter
    from engine.core.runner.persistent_batch import PersistentBatch
    from engine.core.runner.piecewise_graphs import PiecewiseGraphs
    from engine.core.sampling.sampler import Sampler


@frozen(kw_only=True)
class GroupState:
    """The cache of one group, and the backend that reads it."""

    pool: Any
    """A KVPool, or a StatePool."""
    attention: Any
    """An AttentionBackend; None for states."""

    def plan(self, batch: ForwardBatch, slot: GraphSlot | None) -> ForwardPass:
        """Plan a batch, and return its pass over the group's layers. slot: of a CUDA graph's batch; None: no graph."""
        attention, plan = self.attention, None
        if attention is not None:
            plan = attention.plan(batch) if slot is None else attention.plan(batch, slot)
        return ForwardPass(batch=batch, attention=attention, plan=plan, pool=self.pool)


@frozen(kw_only=True)
class DeviceState:
    """The model and what one rank keeps between steps."""

    model: Model
    groups: tuple[GroupState, ...]
    """The cache groups, those with states last."""
    persistent_batch: PersistentBatch
    sampler: Sampler
    drafter: Drafter | None = None
    """The speculator on the device; None: there is none."""

    pool: KVPool = field(init=False)
    """Pool of the first cache group; a StatePool if all layers keep a state."""
    attention: AttentionBackend[Any, Any] = field(init=False)
    """Backend of the first cache group; None if all layers keep a state."""

    @pool.default
    def _first_pool(self) -> Any:
        return self.groups[0].pool

    @attention.default
    def _first_backend(self) -> Any:
        return self.groups[0].attention

    def forward_pass(self, batch: ForwardBatch, slot: GraphSlot | None = None) -> ForwardPass:
        """Plan a batch in every group, and return its pass. slot: of a CUDA graph's batch; None: no graph."""
        if not batch.groups:
            return self.groups[0].plan(batch, slot)
        passes = [group.plan(own, slot) for own, group in zip(batch.groups, self.groups, strict=True)]
        return join_passes(batch, passes)

    def unplanned_pass(self, batch: ForwardBatch) -> ForwardPass:
        """The pass of a batch whose attention no backend plans."""
        passes = tuple(
            ForwardPass(batch=own, attention=group.attention, plan=None, pool=group.pool)
            for own, group in zip(batch.groups, self.groups, strict=False)
        )
        return ForwardPass(batch=batch, attention=self.attention, plan=None, pool=self.pool, groups=passes)


def join_passes(batch: ForwardBatch, passes: Sequence[ForwardPass]) -> ForwardPass:
    """The pass of a batch over several cache groups, from the pass over each."""
    first = passes[0]
    return ForwardPass(batch=batch, attention=first.attention, plan=first.plan, pool=first.pool, groups=tuple(passes))


@frozen(kw_only=True)
class StepGraphs:
    """The CUDA graphs captured for a DeviceState; None: such steps are launched kernel by kernel."""

    decode: DecodeGraphs | None = None
    piecewise: PiecewiseGraphs | None = None
