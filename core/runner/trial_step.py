"""A full step of prompts during the start, before the KV cache exists: the memory and the time that it takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from attrs import evolve, frozen

from engine.core.config.tree import EngineConfig
from engine.core.device import DeviceInfo
from engine.core.errors import CheckpointError
from engine.core.runner.device_state import DeviceState, StepGraphs
from engine.core.runner.graph_sizes import find_max_graph_tokens
from engine.core.runner.step import StepLauncher
from engine.core.schedulers.prompt_step import prompt_step
from engine.core.types import NO_TOKEN, BlockKind, Step

TIMED_RUNS = 2
"""Timed runs of the step; the shortest times count, since anything else on the host makes one longer."""


@frozen(kw_only=True)
class TrialResult:
    """Memory of a full step, and up to which size steps are faster as graphs."""

    activations: int
    """Peak bytes of its intermediate results."""
    max_graph_tokens: int = 0
    """Number of tokens up to which a step is faster as piecewise graphs; 0: not measured."""


@frozen(kw_only=True)
class TrialStep:
    """A step of prompts with the maximum number of tokens, without CUDA graphs."""

    step: Step
    device: DeviceInfo
    not_built_in: str
    """Says in an error which plugins are not built in; empty if all are."""

    @property
    def tokens(self) -> int:
        """Tokens of the step."""
        return sum(new.prompt_len for new in self.step.new)

    @property
    def num_blocks(self) -> int:
        """Blocks that the step needs."""
        return sum(len(blocks) for _, blocks in self.step.blocks)

    def run_untimed(self, state: DeviceState) -> StepLauncher:
        """Launch the step on a device state with `num_blocks` blocks, and forget its sequences."""
        launcher = StepLauncher(self.device, state, StepGraphs())
        launcher.launch(self.step)
        self._forget(launcher)
        return launcher

    def measure(
        self, state: DeviceState, name_fault: Callable[[str], AbstractContextManager[None]], *, timed: bool
    ) -> TrialResult:
        """Run the step on a GPU, on a device state with `num_blocks` blocks.

        name_fault: names the plugin that raises in its `with` block.
        timed: run it again, when all kernels are compiled and loaded, to find up to which size graphs are faster.
        Raises CheckpointError if the logits are not finite.
        """
        name = self.device.torch_name
        torch.cuda.reset_peak_memory_stats(name)
        before = torch.cuda.memory_allocated(name)
        launcher = StepLauncher(self.device, state, StepGraphs())
        with name_fault("the first step"):
            result = launcher.launch(self.step).result()
        if any(NO_TOKEN in tokens for tokens in result.tokens):
            raise CheckpointError(
                "the logits of the first step are not finite (NaN or infinite); the weights may be damaged, or the "
                f"numbers outgrow this dtype: try bfloat16 or float32{self.not_built_in}"
            )
        found = TrialResult(activations=torch.cuda.max_memory_allocated(name) - before)
        if not timed:
            return found
        with name_fault("the first steps"):
            runs = [self._time(launcher) for _ in range(TIMED_RUNS)]
        launch, seconds = min(one for one, _ in runs), min(one for _, one in runs)
        return evolve(found, max_graph_tokens=find_max_graph_tokens(self.tokens, launch, seconds))

    def _time(self, launcher: StepLauncher) -> tuple[float, float]:
        """Run the step once more; the seconds of its launches, and those until its result."""
        self._forget(launcher)
        begin = time.perf_counter()
        pending = launcher.launch(self.step)
        launched = time.perf_counter()
        pending.result()
        return launched - begin, time.perf_counter() - begin

    def _forget(self, launcher: StepLauncher) -> None:
        finished = tuple(new.sequence for new in self.step.new)
        launcher.forget(Step(id=self.step.id, decodes=(), chunks=(), finished=finished))


def full_step(
    config: EngineConfig, max_len: int, kinds: tuple[BlockKind, ...], block_size: int, *, propose: bool
) -> Step:
    """A step of as many prompt tokens as a step may have. propose: with drafts after it."""
    tokens = min(config.scheduler.max_batch_tokens, config.scheduler.max_running * max_len)
    prompts, rest = divmod(tokens, max_len)
    step = prompt_step([max_len] * prompts + ([rest] if rest else []), kinds, block_size)
    return evolve(step, propose=config.speculator.max_drafts) if propose else step
