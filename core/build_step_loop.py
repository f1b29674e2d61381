"""Builds the step loop of an engine whose executor has started: its scheduler, speculator and statistics."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from attrs import frozen

from engine.core.config.tree import EngineConfig
from engine.core.executors.base import Executor
from engine.core.executors.deployment import Deployment
from engine.core.executors.rehearsal import rehearse
from engine.core.executors.step_times import StepTimes, measure_step_times
from engine.core.models.base import ModelSpec
from engine.core.plugin_host.derived import speculator_spec
from engine.core.profiling.live import StepMeter
from engine.core.profiling.peaks import find_peaks
from engine.core.schedulers.cache_metrics import CacheMetrics
from engine.core.schedulers.cache_observer import CacheObserver, join_observers
from engine.core.schedulers.make_block_manager import make_block_manager
from engine.core.schedulers.scheduler import Scheduler
from engine.core.speculators.checked_speculator import CheckedSpeculator
from engine.core.speculators.device_proposals import DeviceProposals
from engine.core.speculators.draft_lengths import DraftLengths
from engine.core.step_loop import StepLoop
from engine.core.types import CacheInfo

if TYPE_CHECKING:
    from engine.core.kv_events.stream import EventStream

_log = logging.getLogger(__name__)


@frozen(kw_only=True)
class StepLoopBuilder:
    """What the step loop depends on; `build` is called last."""

    config: EngineConfig
    deployment: Deployment
    executor: Executor
    """It has started."""
    model_spec: ModelSpec
    max_len: int
    """Maximum tokens of a sequence."""

    def make_speculator(self) -> CheckedSpeculator | DeviceProposals | None:
        """Make the speculator and call each of its methods once. None: there is none.

        For a speculator on the device, make the DeviceProposals that keep its proposals in this process.
        """
        parts = self.deployment.parts
        spec = speculator_spec(self.config, self.model_spec)
        if parts.drafter is not None:
            return DeviceProposals(spec)
        if parts.speculator is None:
            return None
        options = parts.options["speculators"]
        speculator = CheckedSpeculator(parts.speculator(spec, options), spec)
        speculator.rehearse()
        return speculator

    def rehearse(self, cache: CacheInfo) -> None:
        """Run a few steps before the first request, and check the answers of the executor (executors/rehearsal.py)."""
        parts, scheduler = self.deployment.parts, self.config.scheduler
        rehearse(
            self.executor,
            cache,
            owner=parts.owner("executors"),
            not_built_in=parts.not_built_in,
            max_tokens=scheduler.max_batch_tokens,
            max_len=self.max_len,
            max_running=scheduler.max_running,
            vocab_size=self.model_spec.vocab_size,
            full=self.deployment.device.type == "cuda",
            propose=self.config.speculator.max_drafts if parts.drafter is not None else 0,
        )

    def measure_steps(
        self, speculator: CheckedSpeculator | DeviceProposals | None, cache: CacheInfo
    ) -> StepTimes | None:
        """Measure the durations of steps, by which the number of drafts per step is chosen.

        None: the number is fixed, or the durations cannot be measured; steps then verify all drafts.
        """
        if speculator is None or self.config.speculator.length == "fixed":
            return None
        scheduler, max_drafts = self.config.scheduler, speculator.spec.max_drafts
        times = measure_step_times(
            self.executor,
            cache,
            max_drafts=max_drafts,
            max_tokens=scheduler.max_batch_tokens,
            max_len=self.max_len,
            max_running=scheduler.max_running,
            owner=self.deployment.parts.owner("executors"),
            proposes=isinstance(speculator, DeviceProposals),
            ahead=self._steps_ahead,
        )
        if times is None:
            _log.warning(
                "the times of steps with %s drafts cannot be measured: the KV cache or a step has no room for them; "
                "all proposed drafts are verified",
                max_drafts,
            )
        return times

    def build(
        self,
        cache: CacheInfo,
        speculator: CheckedSpeculator | DeviceProposals | None,
        times: StepTimes | None,
        kv_events: EventStream | None,
    ) -> StepLoop:
        """The step loop, with a scheduler over the executor's KV cache.

        speculator, times: from `make_speculator` and `measure_steps`. kv_events: records what happens in the cache.
        """
        lengths = None
        if speculator is not None and times is not None:
            lengths = DraftLengths(
                times.drafts, speculator.spec.max_drafts, plain=times.plain, overlaps=self._steps_ahead > 0
            )
        settings = self.config.cache
        cache_metrics = CacheMetrics(cache.kinds, sample=settings.metrics_sample) if settings.metrics else None
        observers: list[CacheObserver] = [cache_metrics] if cache_metrics is not None else []
        if kv_events is not None:
            observers.append(kv_events.recorder)
        meter = self._make_meter(cache)
        parts, grammars = self.deployment.parts, self.deployment.grammars
        scheduler = Scheduler(
            parts.policy,
            make_block_manager(
                cache,
                max_chunk=self.config.scheduler.max_batch_tokens,
                prefix_caching=settings.prefix_caching,
                observer=join_observers(observers),
            ),
            max_batch_tokens=self.config.scheduler.max_batch_tokens,
            max_running=self.config.scheduler.max_running,
            max_len=self.max_len,
            eos_tokens=self.deployment.checkpoint.eos_tokens(),
            cache_metrics=cache_metrics,
            meter=meter,
            speculator=speculator,
            draft_lengths=lengths,
            grammars=grammars,
            unknown_sequences=times.sequences if times is not None else (),
            not_built_in=parts.not_built_in,
        )
        return StepLoop(
            scheduler,
            self.executor,
            steps_ahead=self._steps_ahead,
            owner=parts.owner("executors"),
            grammars=grammars,
            meter=meter,
            draft_lengths=lengths,
        )

    @property
    def _steps_ahead(self) -> int:
        """Number of steps in flight while the next is planned."""
        overlap = self.config.scheduler.overlap
        return int(self.executor.asynchronous if overlap == "auto" else overlap == "on")

    def _make_meter(self, cache: CacheInfo) -> StepMeter | None:
        """Make the meter of FLOPs and bytes of steps. None: it is off, or the costs are unknown."""
        config = self.config.roofline
        peaks = find_peaks(config, self.deployment.device, cache.dtype)
        if not config.metrics or cache.cost is None:
            return None
        if cache.cost.uncounted:
            _log.info("no roofline metrics: the FLOPs of %s are unknown", ", ".join(cache.cost.uncounted))
            return None
        return StepMeter(cache.cost, peaks)
