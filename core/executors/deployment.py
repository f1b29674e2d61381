"""What an executor runs: the resolved configuration, plugins, checkpoint and device of one engine."""

from __future__ import annotations

import logging
from functools import cached_property
from typing import TYPE_CHECKING

from attrs import frozen

from engine.core.plugin_host.faults import raise_interrupt

if TYPE_CHECKING:
    from engine.core.config.tree import EngineConfig
    from engine.core.device import DeviceInfo
    from engine.core.distributed.rank_group import RankGroup
    from engine.core.executors.base import Executor
    from engine.core.grammars.compiler import Grammars
    from engine.core.plugin_host.selection import Parts
    from engine.core.runner.runner import Runner
    from engine.core.weights.checkpoint import Checkpoint


_log = logging.getLogger(__name__)


@frozen
class Deployment:
    """One model on one machine, resolved once by the engine and passed to its executor.

    A process that runs a rank builds its own deployment from plain data, the configuration and the plugin manifest: by
    `load_plugins`, `Plugins.verify` and `resolve` of engine.core.plugin_host, and `Checkpoint.open`.
    """

    config: EngineConfig
    parts: Parts
    """The plugins of this engine and their options."""
    checkpoint: Checkpoint
    device: DeviceInfo
    """The device of this process; for an executor of several ranks the device of rank 0."""

    def make_runner(self, group: RankGroup | None = None) -> Runner:
        """Make the runner of one rank on `device`; imports torch.

        group: the ranks that share the model; None: one rank holds the whole model.
        Raises ConfigError for a number of ranks that cannot share the model.
        """
        from engine.core.runner.runner import Runner

        return Runner(self.config, self.parts, self.checkpoint, self.device, group, self.grammars)

    @cached_property
    def grammars(self) -> Grammars:
        """Compiles the grammars of requests, for the engine and the runner of this process."""
        from engine.core.grammars.compiler import Grammars
        from engine.core.plugin_host.derived import shape_of

        parts = self.parts
        return Grammars(
            self.config,
            parts.grammar,
            parts.options.get("grammars"),
            vocab_size=shape_of(parts.model, self.checkpoint.config).vocab_size,
            eos_tokens=self.checkpoint.eos_tokens(),
            owner=parts.no_grammar or parts.owner("grammars"),
        )


def make_executor(deployment: Deployment) -> Executor:
    """Construct the executor that `deployment.parts` names; `start` is not called.

    Executors of version "1" of the contract have the constructor (config, parts, options); only this function knows.
    """
    cls, options = deployment.parts.executor, deployment.parts.options["executors"]
    if cls.api == "1":
        return cls(deployment.config, deployment.parts, options)  # type: ignore[arg-type, call-arg]
    return cls(deployment, options)


def shut_down(executor: Executor, owner: str) -> None:
    """Shut an executor down. What it raises is logged, so that it neither hides an earlier error nor stops the rest.

    owner: how errors name the executor's plugin.
    """
    try:
        executor.shutdown()
    except BaseException as error:
        raise_interrupt(error)
        _log.exception("%s failed in shutdown(); what it holds may not be freed", owner)
