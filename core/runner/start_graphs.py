"""The CUDA graphs of a start: which ones the configuration allows, and their capture."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from attrs import frozen

from engine.core.errors import ConfigError
from engine.core.layers.base import torch_dtype
from engine.core.plugin_host.derived import use_graphs
from engine.core.runner.device_state import StepGraphs

if TYPE_CHECKING:
    from engine.core.attention.base import AttentionBackend
    from engine.core.attention.groups import CacheLayout
    from engine.core.attention.pair import AttentionPair
    from engine.core.config.tree import EngineConfig
    from engine.core.device import DeviceInfo
    from engine.core.models.base import Model
    from engine.core.runner.device_state import DeviceState
    from engine.core.runner.graph_capture import GraphCapturer
    from engine.core.startup import Phases

log = logging.getLogger(__name__)


@frozen(kw_only=True)
class GraphStart:
    """Makes the CUDA graphs of a device state."""

    config: EngineConfig
    device: DeviceInfo
    hidden_size: int
    dtype: str
    max_len: int
    layout: CacheLayout
    fused: bool
    speculates: bool

    def captures_prefill(self, state: DeviceState) -> bool:
        """Whether steps with prefill chunks have piecewise graphs."""
        return self._captures(state) and self.config.executor.graphs != "decode" and not self.layout.states

    def max_overlapped_rows(
        self, ranks: int, attention: type[AttentionBackend[Any, Any]] | AttentionPair | None, model: type[Model]
    ) -> int:
        """Maximum rows of sums that may run next to computation. 0: none may.

        Of more than two ranks, only those of steps that may have graphs: without graphs, sums by parts of rows take the
        host several times as long to launch as all-reduces (docs/performance.md). If the start chooses the largest step
        with graphs, all sums may, since the start measures these launches.

        attention, model: what the start will make; attention: None if no layer has any.
        """
        executor, rows = self.config.executor, self.config.scheduler.max_batch_tokens
        if executor.overlap_sums == "off":
            return 0
        if ranks <= 2:
            return rows
        if executor.graphs in ("off", "decode") or self.layout.states:
            return 0
        # An instance may find another reason; its sums then run next to computation without graphs.
        if isinstance(model.no_graphs, str) or (attention is not None and attention.graphs not in ("decode", "any")):
            return 0
        return min(executor.max_graph_tokens or rows, rows)

    def make(self, state: DeviceState, max_tokens: int) -> tuple[StepGraphs, GraphCapturer | None]:
        """The graphs that the configuration, the device and the attention backend allow, and what captures them.

        max_tokens: of the largest step with piecewise graphs. Raises ConfigError where piecewise graphs are required,
        but layers keep a state.
        """
        if not self._captures(state):
            return StepGraphs(), None
        if self.config.executor.graphs == "on" and self.layout.states:
            raise ConfigError(
                "piecewise CUDA graphs were asked for (--graphs on), but layers of this model keep a state, and what"
                " they compute for prefill chunks depends on the lengths of the chunks; use --graphs decode or auto"
            )
        from engine.core.runner.cuda_graphs import DecodeGraphs
        from engine.core.runner.graph_capture import GraphCapturer
        from engine.core.runner.piecewise_graphs import PiecewiseGraphs

        scheduler, device = self.config.scheduler, torch.device(self.device.torch_name)
        capturer = GraphCapturer(device, extends=self.config.executor.tensor_parallel == 1)
        decode = DecodeGraphs(
            state,
            capturer,
            max_running=scheduler.max_running,
            max_len=self.max_len,
            hidden_size=self.hidden_size,
            dtype=torch_dtype(self.dtype),
            fused=self.fused,
            windows=[kind.window for kind in self.layout.kinds for _ in range(kind.groups)],
            max_drafts=self.config.speculator.max_drafts if self.speculates else 0,
        )
        if not self.captures_prefill(state):
            return StepGraphs(decode=decode), capturer
        piecewise = PiecewiseGraphs(state, capturer, max_tokens=max_tokens, device=device)
        return StepGraphs(decode=decode, piecewise=piecewise), capturer

    def capture(self, state: DeviceState, phases: Phases, max_tokens: int) -> StepGraphs:
        """Make the graphs and capture all; reports progress. max_tokens: as for `make`."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # a capture cannot reclaim the memory that the allocator caches
        graphs, capturer = self.make(state, max_tokens)
        if graphs.piecewise is None and self.config.executor.max_graph_tokens:
            log.warning("executor.max_graph_tokens has no effect: steps with prefill run without CUDA graphs here")
        if graphs.decode is None or capturer is None:
            return graphs
        graphs.decode.capture_all(lambda done, total: phases.progress(done, total, "decode graphs"))
        drafter = state.drafter
        if drafter is not None and drafter.no_graphs is None:
            drafter.capture(
                graphs.decode, capturer, lambda done, total: phases.progress(done, total, "drafting graphs")
            )
        if graphs.piecewise is not None:
            graphs.piecewise.capture_all(lambda done, total: phases.progress(done, total, "token counts"))
        return graphs

    def _captures(self, state: DeviceState) -> bool:
        """Whether there are graphs at all."""
        groups = state.groups if state.drafter is None else (*state.groups, *state.drafter.groups)
        backends = [group.attention for group in groups if group.attention is not None] or [None]
        return all(use_graphs(self.config, backend, state.model, self.device) for backend in backends)
