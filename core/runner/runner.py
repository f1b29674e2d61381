"""The runner of one rank: takes a Step and returns what it sampled. start.py starts it; step.py runs the steps."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

from engine.core.config.tree import EngineConfig
from engine.core.device import DeviceInfo
from engine.core.distributed.rank_group import OneRank, RankGroup
from engine.core.grammars.compiler import Grammars
from engine.core.host import Host
from engine.core.layers.base import Layer
from engine.core.plugin_host.faults import name_fault
from engine.core.plugin_host.selection import Parts
from engine.core.runner.control import Control, Rank
from engine.core.runner.layer_profile import LayerProfile
from engine.core.runner.memory_history import MemoryHistory
from engine.core.runner.start import RunnerStart
from engine.core.runner.step import PendingStep, StepLauncher
from engine.core.runner.step_trace import StepTrace
from engine.core.startup import Phases
from engine.core.types import CacheInfo, Step
from engine.core.weights.checkpoint import Checkpoint


class Runner:
    """Runs steps on one device, after `start`.

    With several ranks each has a runner. All runners receive the same steps in the same order and have the same
    results.
    """

    def __init__(
        self,
        config: EngineConfig,
        parts: Parts,
        checkpoint: Checkpoint,
        device: DeviceInfo,
        group: RankGroup | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        """group: the ranks that share the model; None: this rank has the whole model. grammars: compiles the grammars
        of sequences; None: sequences have none. Raises ConfigError for a number of ranks that cannot share the model.
        """
        self.config = config
        self.parts = parts
        self.checkpoint = checkpoint
        self.device = device
        torch.set_num_threads(config.executor.threads or min(torch.get_num_threads(), Host().cores()))
        self._group = group or OneRank()
        self._start = RunnerStart(config, parts, checkpoint, device, self._group, grammars)
        self._control: Control | None = None
        self._grammars = grammars
        self._launcher: StepLauncher | None = None
        self._launch: Callable[[Step], PendingStep] | None = None
        """The launcher's own method, once the checks have ended; None before. Never a method of this object, which
        would keep itself and the weights alive until a garbage collection."""

    def start(self, phases: Phases | None = None) -> CacheInfo:
        """Load the weights, measure memory, make the KV cache and capture CUDA graphs.

        Raises CheckpointError or CapacityError.
        """
        self._launcher, cache = self._start.run(phases or Phases())
        layers, layout = self._start.layers, self._start.layout
        assert layers is not None, "the start makes the layers"
        self._control = Control(
            Rank(
                rank=self._group.rank,
                ranks=self._group.ranks,
                device=self.device,
                state=self._launcher.state,
                memory=MemoryHistory(self.device),
                trace=StepTrace(self._group.rank, self.device, self._launcher),
                layers=LayerProfile(self._group.rank, self.device, self._launcher, layers, layout, self._group),
            )
        )
        return cache

    def layer_references(self) -> list[weakref.ref[Layer]]:
        """Weak references to the layers of the model and of a speculator, which hold the weights; empty before these
        are made.

        Layers that outlive this object are kept by a reference cycle, until a garbage collection.
        """
        return [weakref.ref(layer) for factory in self._start.factories for layer in factory.layers]

    @torch.inference_mode()
    def call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """Run a control operation while no step is in flight; return plain data.

        Raises ControlError, or another EngineError, if it is unknown, refuses or fails, and ExecutorError if the device
        fails with it.
        """
        assert self._control is not None, "the runner is not started"
        return self._control.call(name, arguments)

    def launch(self, step: Step) -> PendingStep:
        """Run the step. On a GPU the call returns once the kernels are launched.

        Raises StepFaultError, naming the plugin, for what a plugin raises by mistake.
        """
        try:
            if self._grammars is not None:
                for grammar in step.grammars:
                    self._grammars.begin(grammar)
            return (self._launch or self._launch_checked)(step)
        except BaseException as error:
            name_fault(error, not_built_in=self.parts.not_built_in)
            raise

    def _launch_checked(self, step: Step) -> PendingStep:
        """Run a step, checking what plugins return, until the first step in which a sequence has finished.

        By then there has been a prefill and a decode step.
        """
        assert self._launcher is not None, "the runner is not started"
        if step.finished:
            self._start.checks.end()
            self._launch = self._launcher.launch
        if not (step.decodes or step.chunks or step.drafts):  # the end of the rehearsal
            return self._launcher.forget(step)
        return self._launcher.launch(step)
