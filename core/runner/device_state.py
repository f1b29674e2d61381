"""Everything on the device that a step reads and writes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import frozen

if TYPE_CHECKING:
    from engine.core.attention.base import AttentionBackend
    from engine.core.attention.kv_pool import KVPool
    from engine.core.models.base import Model
    from engine.core.runner.cuda_graphs import DecodeGraphs
    from engine.core.runner.persistent_batch import PersistentBatch
    from engine.core.runner.piecewise_graphs import PiecewiseGraphs
    from engine.core.sampling.sampler import Sampler


@frozen(kw_only=True)
class DeviceState:
    """The model and what one rank keeps between steps."""

    model: Model
    pool: KVPool
    attention: AttentionBackend[Any, Any]
    persistent_batch: PersistentBatch
    sampler: Sampler


@frozen(kw_only=True)
class StepGraphs:
    """The CUDA graphs captured for a DeviceState; None: such steps are launched kernel by kernel."""

    decode: DecodeGraphs | None = None
    piecewise: PiecewiseGraphs | None = None
