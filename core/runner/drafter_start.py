"""Starts a speculator on the device: makes its layers, loads their weights, makes its caches."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from attrs import evolve

from engine.core.attention.kv_pool import KVPool
from engine.core.errors import ConfigError
from engine.core.layers import LayerFactory
from engine.core.layers.base import torch_dtype
from engine.core.layers.hidden_states import HiddenStates
from engine.core.layers.kv_scale_reader import find_kv_scales
from engine.core.layers.sinks import find_sinks
from engine.core.plugin_host.derived import attention_spec
from engine.core.plugin_host.faults import blame, expect
from engine.core.plugin_host.guard import owner_of
from engine.core.quant.base import QuantMethod
from engine.core.quant.float8 import KVScales
from engine.core.runner.device_state import GroupState
from engine.core.runner.drafter import Drafter
from engine.core.speculators.device import DeviceSpeculator
from engine.core.startup import Phases
from engine.core.weights.loader import load_weights
from engine.core.weights.sources import WeightSource, weight_source

if TYPE_CHECKING:
    from engine.core.attention.base import AttentionBackend
    from engine.core.config.tree import EngineConfig
    from engine.core.device import DeviceInfo
    from engine.core.distributed.rank_group import RankGroup
    from engine.core.models.base import Model
    from engine.core.plugin_host.drafter import DrafterParts
    from engine.core.plugin_host.result_checks import ResultChecks
    from engine.core.runner.persistent_batch import PersistentBatch

log = logging.getLogger(__name__)


class DrafterStart:
    """Starts the speculator of one rank, phase by phase, along with the target."""

    def __init__(
        self,
        parts: DrafterParts,
        config: EngineConfig,
        device: DeviceInfo,
        group: RankGroup,
        checks: ResultChecks,
        *,
        dtype: str,
        fused: bool,
    ) -> None:
        """group: the ranks that share the speculator, as they share the target. checks: of its results in the first
        steps. dtype: of its activations, the target's. fused: as in LayerFactory."""
        self._parts = parts
        self._config = config
        self._device = device
        self._group = group
        self._checks = checks
        self._dtype = dtype
        self._fused = fused
        self._owner = owner_of(parts.speculator)
        self.layers: LayerFactory | None = None
        """The factory of its layers, once they are made."""
        self._speculator: DeviceSpeculator[Any] | None = None
        self._hidden_states: HiddenStates | None = None

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block, in all its layers."""
        return sum(KVPool.bytes_per_block(group.spec) for group in self._parts.layout.groups)

    def make_hidden_states(self) -> HiddenStates | None:
        """Make the memory for the target's hidden states that the speculator computes with; None: it needs none."""
        layers, scheduler = self._parts.shape.hidden_layers, self._config.scheduler
        if layers:
            self._hidden_states = HiddenStates(
                layers,
                self._parts.spec.target.hidden_size,
                max_rows=max(scheduler.max_batch_tokens, scheduler.max_running),
                dtype=torch_dtype(self._dtype),
                device=self._device.torch_name,
            )
        return self._hidden_states

    @property
    def nbytes(self) -> int:
        """Bytes of the speculator's weights and of the target's hidden states."""
        states = self._hidden_states
        return (0 if self.layers is None else self.layers.nbytes) + (0 if states is None else states.nbytes)

    def build(self, model: Model, target: LayerFactory) -> None:
        """Make the speculator, its layers still empty.

        model: the target; target: the factory that has made its layers. Raises ConfigError if these layers do not
        store the hidden states that the speculator needs.
        """
        parts, states = self._parts, self._hidden_states
        if states is not None and states.missing:
            raise ConfigError(f"{target.model_owner} {self._missing_states(states.missing)}; use a draft model")
        quant = parts.quant.from_checkpoint(parts.checkpoint.quantization, parts.quant_options)
        expect(isinstance(quant, QuantMethod), parts.quant_owner, "from_checkpoint()", quant, "a QuantMethod")
        self.layers = LayerFactory(
            dtype=self._dtype,
            device=self._device.torch_name,
            quant=quant,
            group=self._group,
            fused=self._fused,
            cache=parts.layout,
            owners={"quant": parts.quant_owner, "models": self._owner},
            stored=self._source.names,
            expert_parallel=self._config.executor.expert_parallel,
            max_len=parts.spec.max_len,
        )
        cls = self._checks.speculator(parts.speculator, self._dtype)
        trained = parts.shape.model_spec.max_len
        if trained < parts.spec.max_len and self._group.rank == 0:
            log.warning(
                "%s was made for contexts of %d tokens, and up to %d are served: beyond, drafts are hardly ever right",
                self._owner,
                trained,
                parts.spec.max_len,
            )
        last_norm = target.last_norm
        spec = evolve(
            parts.spec,
            target_embedding=target.token_embedding,
            target_norm=None if last_norm is None else lambda hidden: last_norm(hidden)[0],
            target_greedy=lambda hidden: model.greedy(hidden)[1],
        )
        self._speculator = cls(spec, self.layers, parts.options)

    def _missing_states(self, missing: Collection[int]) -> str:
        """Which hidden states the target does not give, and why: a clause to follow its name."""
        num_layers = self._parts.spec.target.num_layers
        layers = sorted(layer for layer in missing if layer < num_layers)
        if layers:
            return (
                f"does not give the hidden states entering layers {', '.join(map(str, layers))}, which {self._owner}"
                " computes with: they are not attention blocks of the LayerFactory with norms of their own"
            )
        return (
            f"does not give the hidden states that leave its last layer, which {self._owner} computes with: its last"
            " norm is not made by LayerFactory.final_norm"
        )

    def load(self, phases: Phases) -> None:
        """Read the weights. Raises CheckpointError."""
        assert self.layers is not None, "the layers are not made"
        load_weights(self.layers, self._source, phases.progress, threads=self._config.model.load_threads)

    @cached_property
    def _source(self) -> WeightSource:
        return weight_source(self._parts.checkpoint, self._config.model)

    def make(self, num_blocks: int, persistent_batch: PersistentBatch, attention: Any, options: Any) -> Drafter:
        """Make the caches, with `num_blocks` blocks. attention: class of the attention backend; options: its own."""
        assert self.layers is not None, "the layers are not made"
        assert self._speculator is not None, "the speculator is not made"
        parts, ranks = self._parts, self._group.ranks
        scales: Sequence[KVScales] = ()
        sinks: Sequence[torch.Tensor | None] = ()
        if parts.layout.groups:
            kv_dtype = parts.layout.groups[0].spec.kv_dtype
            shape = parts.shape.model_spec
            spec = attention_spec(shape, self._config, self._dtype, parts.spec.max_len, kv_dtype, ranks)
            scales = find_kv_scales(spec, self.layers.kv_scales)
            sinks = find_sinks(spec, self.layers.sinks, self._owner)
        groups = []
        for group in parts.layout.groups:
            own = tuple(scales[layer] for layer in group.layers) if scales else ()
            pool = KVPool(group.spec, num_blocks, self._device.torch_name, own)
            backend: AttentionBackend[Any, Any] = attention(group.spec, pool, options)
            if any(group.spec.sinks):
                self._set_sinks(backend, [sinks[layer] for layer in group.layers])
            groups.append(GroupState(pool=pool, attention=backend))
        return Drafter(
            self._speculator,
            tuple(groups),
            persistent_batch,
            max_len=parts.spec.max_len,
            scratch_block=num_blocks,
            hidden_states=self._hidden_states,
        )

    def _set_sinks(self, backend: AttentionBackend[Any, Any], sinks: Sequence[torch.Tensor | None]) -> None:
        with blame(owner_of(type(backend)), "set_sinks()"):
            backend.set_sinks(sinks)
