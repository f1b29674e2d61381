"""Starts an engine: from its configuration and the plugins that are installed to a step loop that can run steps."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import attrs
from attrs import frozen

from engine.core.build_step_loop import StepLoopBuilder
from engine.core.collector import paused
from engine.core.compilation.first_start import begin_first_start
from engine.core.compilation.head_start import begin_compiler_key, begin_driver
from engine.core.config.model_name import is_hub_name
from engine.core.config.tree import AUTO, EngineConfig
from engine.core.device import DeviceInfo, find_device
from engine.core.executors.base import Executor
from engine.core.executors.choose import PluginChoice
from engine.core.executors.deployment import Deployment, shut_down
from engine.core.hub.names import locate, locate_speculator
from engine.core.models.base import ModelSpec
from engine.core.plugin_host.derived import max_len, settle, shape_of
from engine.core.plugin_host.load import load_plugins
from engine.core.plugin_host.registry import Plugins
from engine.core.plugin_host.selection import check_names
from engine.core.startup import Listener, Phases
from engine.core.startup_display import show_startup
from engine.core.step_loop import StepLoop
from engine.core.types import CacheInfo
from engine.core.wait_policy import set_wait_policy
from engine.core.weights.checkpoint import Checkpoint
from engine.core.weights.generation_config import not_honoured

if TYPE_CHECKING:
    from engine.core.kv_events.stream import EventStream

log = logging.getLogger(__name__)


@frozen(kw_only=True, eq=False)
class StartedEngine:
    """The parts of a started engine."""

    config: EngineConfig
    """The resolved configuration."""
    plugins: Plugins
    checkpoint: Checkpoint
    device: DeviceInfo
    deployment: Deployment
    executor: Executor
    cache_info: CacheInfo
    max_len: int
    """Maximum context length, tokens."""
    vocab_size: int
    loop: StepLoop
    kv_events: EventStream | None
    """None: events of the KV cache are not published."""

    def close(self) -> None:
        """Stop the executor and the event stream."""
        shut_down(self.executor, self.deployment.parts.owner("executors"))
        if self.kv_events is not None:
            self.kv_events.close()


def start_engine(
    config: EngineConfig, plugins: Plugins | None, objects: Mapping[str, object], on_progress: Listener | None
) -> StartedEngine:
    """Choose the plugins, start the executor and build the step loop.

    plugins: already loaded; None: all that are installed. objects: section of the configuration -> the plugin
    passed in from Python. on_progress: called with the progress of each phase.
    Raises ConfigError, PluginError, CheckpointError or CapacityError when the engine cannot be built.
    """
    phases = Phases(on_progress)
    models = (config.model.path, config.model.tokenizer, config.speculator.model)
    on_hub = any(map(is_hub_name, models))
    with phases.phase("plugins"):
        if not on_hub:  # a model of the hub has another mark once it is located
            _begin_compile_server(config)
        plugins = plugins or load_plugins(config.plugins)
        check_names(config, plugins, objects)  # before a long download
    with phases.phase("download" if on_hub else "checkpoint"), _listening(on_progress) as listener:
        speculator_config = locate_speculator(config, listener)
        model_config = locate(config.model, listener)
        config = attrs.evolve(config, model=model_config, speculator=speculator_config)
    with phases.phase("checkpoint"):
        checkpoint = Checkpoint.open(config.model.path, generation_config=config.model.generation_config)
    with phases.phase("import"), paused():
        set_wait_policy(config.executor)
        begin_driver(config)
        _begin_compile_server(config)
        import torch  # noqa: F401  (the slowest import of all, timed as a phase of its own)

        if _runs_model(config):
            begin_compiler_key(config)
    with phases.phase("device"):
        device = find_device(config.executor.device)
        fits_running = not config.scheduler.max_running
        config = settle(config, device, drafts="speculator" in objects)
    choice = PluginChoice(
        config=config,
        plugins=plugins,
        device=device,
        checkpoint=checkpoint,
        objects=objects,
        fits_running=fits_running,
    )
    deployment, executor, cache_info = choice.start(phases, on_progress)
    max_running = deployment.config.scheduler.max_running
    config = attrs.evolve(config, scheduler=attrs.evolve(config.scheduler, max_running=max_running))
    parts = deployment.parts
    kv_events: EventStream | None = None
    try:
        model_spec = shape_of(parts.model, checkpoint.config)
        longest = max_len(config, model_spec)
        _warn_unused(deployment, model_spec)
        builder = StepLoopBuilder(
            config=config, deployment=deployment, executor=executor, model_spec=model_spec, max_len=longest
        )
        made_speculator = builder.make_speculator()
        with phases.phase("rehearsal"):
            builder.rehearse(cache_info)
            times = builder.measure_steps(made_speculator, cache_info)
        cache_info = attrs.evolve(cache_info, phases=phases.seconds)
        if config.kv_events.endpoint:
            from engine.core.kv_events.stream import EventStream

            kv_events = EventStream(config.kv_events, cache_info)
        loop = builder.build(cache_info, made_speculator, times, kv_events)
    except BaseException:
        shut_down(executor, parts.owner("executors"))  # the caller gets no engine to close
        if kv_events is not None:
            kv_events.close()
        raise
    return StartedEngine(
        config=config,
        plugins=plugins,
        checkpoint=checkpoint,
        device=device,
        deployment=deployment,
        executor=executor,
        cache_info=cache_info,
        max_len=longest,
        vocab_size=model_spec.vocab_size,
        loop=loop,
        kv_events=kv_events,
    )


def _runs_model(config: EngineConfig) -> bool:
    """Whether this process runs the model. An executor that is named, or that has several ranks, may run it in
    processes of its own."""
    return config.executor.name == AUTO and config.executor.tensor_parallel == 1


def _begin_compile_server(config: EngineConfig) -> None:
    """Start the compile server as early as possible, if this process needs one and none runs."""
    if _runs_model(config):
        begin_first_start(config)


def _warn_unused(deployment: Deployment, model_spec: ModelSpec) -> None:
    """Log the keys and settings of the checkpoint's JSON files that have no effect here."""
    model, checkpoint = deployment.parts.model, deployment.checkpoint
    keys = model.unknown_keys(checkpoint.config)
    if keys:
        log.warning(
            "config.json has keys that %s does not know, and that are not used: %s", model.__name__, ", ".join(keys)
        )
    settings = not_honoured(checkpoint.generation_config, model_spec.max_len)
    if settings:
        log.warning("generation_config.json has settings that are not used: %s", ", ".join(settings))


def _listening(on_progress: Listener | None) -> AbstractContextManager[Listener]:
    """`on_progress`; for None a listener that shows downloads, which may take long, and nothing else."""
    return show_startup(lines=False, prefix="") if on_progress is None else nullcontext(on_progress)
