"""Chooses an engine's plugins and starts its executor; auto chooses again if a plugin cannot be constructed."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from attrs import evolve, frozen

from engine.core.config.tree import EngineConfig
from engine.core.device import DeviceInfo
from engine.core.errors import PluginError, PluginFaultError
from engine.core.executors.base import Executor
from engine.core.executors.deployment import Deployment, make_executor, shut_down
from engine.core.executors.frames import clear_frames
from engine.core.plugin_host.derived import fit_running, shape_of
from engine.core.plugin_host.faults import expect
from engine.core.plugin_host.registry import Plugins
from engine.core.plugin_host.selection import Parts, resolve
from engine.core.startup import Listener, Phases
from engine.core.types import CacheInfo
from engine.core.weights.checkpoint import Checkpoint

_log = logging.getLogger(__name__)


@frozen(kw_only=True)
class PluginChoice:
    """What the choice of an engine's plugins depends on."""

    config: EngineConfig
    plugins: Plugins
    device: DeviceInfo
    checkpoint: Checkpoint
    objects: Mapping[str, object]
    """Section of the configuration -> the plugin passed in from Python."""
    fits_running: bool = False
    """Whether the states of the model's layers may lower scheduler.max_running."""

    def start(self, phases: Phases, on_progress: Listener | None) -> tuple[Deployment, Executor, CacheInfo]:
        """Choose the plugins, make the executor, and let it load the model and allocate the KV cache.

        Returns what the executor runs, the executor, and its cache.

        Raises what `resolve` and `Executor.start` raise. If a plugin's constructor raises and no other plugin serves,
        raises that error.
        """
        passed_over: dict[tuple[str, str], str] = {}
        fault: PluginFaultError | None = None
        while True:
            with phases.phase("plugins"):
                try:
                    parts = resolve(
                        self.config,
                        self.plugins,
                        self.device,
                        self.checkpoint.config,
                        self.objects,
                        passed_over=passed_over,
                    )
                except PluginError:
                    if fault is None:
                        raise
                    raise fault from fault.__cause__  # no other plugin serves
            try:
                with phases.phase("executor"):
                    deployment, executor, cache = self._start_executor(parts, passed_over, on_progress)
                    phases.include(cache.phases)
                    break
            except PluginFaultError as error:
                choice = parts.choice_at_fault(error)
                if choice is None:
                    raise
                _log.warning("auto passes over a plugin: %s", error, exc_info=error)
                passed_over[choice.extension_point, choice.name] = str(error)
                fault = error
                clear_frames(error)  # they hold the executor
        for notice in filter(None, (choice.notice for choice in parts.choices)):
            _log.warning("%s", notice)
        return deployment, executor, cache

    def _start_executor(
        self, parts: Parts, passed_over: Mapping[tuple[str, str], str], on_progress: Listener | None
    ) -> tuple[Deployment, Executor, CacheInfo]:
        config = self.config
        for point, _ in passed_over:  # workers choose for themselves, by the configuration
            config = _with_choice(config, parts, point)
        if self.fits_running:
            config = fit_running(config, shape_of(parts.model, self.checkpoint.config), self.device)
        deployment = Deployment(config, parts, self.checkpoint, self.device)
        executor = make_executor(deployment)
        if on_progress is not None:
            executor.watch(on_progress)
        cache = executor.start()
        try:
            expect(isinstance(cache, CacheInfo), parts.owner("executors"), "start()", cache, "a CacheInfo")
        except PluginError:
            shut_down(executor, parts.owner("executors"))
            raise
        return deployment, executor, cache


def _with_choice(config: EngineConfig, parts: Parts, extension_point: str) -> EngineConfig:
    """A configuration that names the plugin chosen for an extension point."""
    [choice] = [one for one in parts.choices if one.extension_point == extension_point]
    return evolve(config, **{choice.section: evolve(getattr(config, choice.section), name=choice.name)})
