"""A step on the device: batch, forward pass, sampling, and the result on its way to the host."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from attrs import define

from engine.core.device import DeviceInfo
from engine.core.errors import ExecutorError
from engine.core.models.forward_pass import ForwardPass
from engine.core.runner.build_batch import build_batch
from engine.core.runner.close_wait import CloseWait
from engine.core.runner.device_state import DeviceState, StepGraphs
from engine.core.runner.drafter import ComputedRows, Drafter, Proposals
from engine.core.runner.first_uses import NOTHING, FirstUse, FirstUses
from engine.core.runner.lap_timer import LapTimer, StepPhase
from engine.core.sampling.draft_rows import DraftRows, VerifiedDrafts
from engine.core.sampling.prompt_logprobs import StepPromptLogprobs
from engine.core.sampling.sampled_tokens import SampledTokens
from engine.core.types import Step, StepResult, TokenLogprobs

if TYPE_CHECKING:
    from engine.core.runner.cuda_graphs import DecodeGraphs


@define
class PendingStep:
    """A step whose kernels are launched; implements executors.base.PendingResult."""

    step: int
    samples: Sequence[SampledTokens | None]
    """One entry per iteration; None where no sequence samples."""
    prompt_logprobs: StepPromptLogprobs
    seconds: dict[StepPhase, float]
    first_use: FirstUse = NOTHING
    graph_size: int | None = None
    """As StepResult.graph_size."""
    drafts: VerifiedDrafts | None = None
    """None: the step has no drafts."""
    close_wait: CloseWait | None = None
    """Waits for the step by polling near its end; None: the waiting thread just sleeps."""
    launched: float = 0.0
    """When the kernels were launched, by time.perf_counter; with `close_wait`."""
    proposals: Proposals | None = None
    """None: nothing is proposed."""

    def done(self) -> bool:
        """Whether `result` returns immediately."""
        if self.proposals is not None and not self.proposals.tokens.ready():
            return False
        if self.drafts is not None and not self.drafts.accepted.ready():
            return False
        return all(sampled is None or sampled.ready() for sampled in self.samples)

    def result(self) -> StepResult:
        """Wait for the tokens. Raises ExecutorError when the device failed."""
        verified: tuple[tuple[int, ...], ...] = ()
        verified_logprobs: tuple[tuple[TokenLogprobs, ...], ...] = ()
        try:
            waits = self.close_wait
            ended = waits is None or waits.wait(self.graph_size, self.launched, self.done)
            fetched = [sampled.to_host() if sampled is not None else ([], []) for sampled in self.samples]
            proposals = () if self.proposals is None else self.proposals.to_host()
            if waits is not None and not ended:
                waits.ended(self.graph_size, self.launched)
            if self.drafts is not None:
                [(tokens, entries)] = fetched
                verified, verified_logprobs = self.drafts.to_host(tokens, entries)
                count = self.drafts.rows.num_before
                fetched = [(tokens[:count], entries[:count])]
        except RuntimeError as error:  # the only class that torch raises
            raise ExecutorError(f"step {self.step} failed on the device: {error}") from error
        logprobs = tuple(tuple(entries) for _, entries in fetched)
        return StepResult(
            step=self.step,
            tokens=tuple(tuple(tokens) for tokens, _ in fetched),
            logprobs=logprobs if any(entry is not None for entries in logprobs for entry in entries) else (),
            verified=verified,
            verified_logprobs=verified_logprobs,
            proposals=proposals,
            prompt_logprobs=self.prompt_logprobs,
            seconds=tuple(self.seconds.items()),
            kernels_compiled=self.first_use.kernels,
            graphs_captured=self.first_use.graphs,
            graph_size=self.graph_size,
        )


class StepLauncher:
    """Launches steps on one DeviceState."""

    def __init__(
        self, device: DeviceInfo, state: DeviceState, graphs: StepGraphs, first_uses: FirstUses | None = None
    ) -> None:
        """first_uses: counts what the launched steps compile and capture; None: not counted."""
        self.state = state
        self.graphs = graphs
        self._first_uses = first_uses
        self._device = device
        self._decode_graphs = graphs.decode
        self._piecewise_graphs = graphs.piecewise
        self._close_wait = CloseWait()
        self._observer: Callable[[Step, Callable[[Step], PendingStep]], PendingStep] | None = None

    @torch.inference_mode()
    def launch(self, step: Step) -> PendingStep:
        """Run the step. On a GPU the call returns once the kernels are launched."""
        enter_device(self._device)
        pending = self._launch(step) if self._observer is None else self._observer(step, self._launch)
        if self._first_uses is not None:
            pending.first_use = self._first_uses.take()
        return pending

    def observe(self, observer: Callable[[Step, Callable[[Step], PendingStep]], PendingStep] | None) -> None:
        """Have steps launched by `observer(step, launch)`; None: directly, as at the start."""
        self._observer = observer

    def graph_size(self, step: Step) -> int | None:
        """Batch size of the CUDA graph of a step; None if the step is launched without one."""
        if self._decode_graphs is None or not self._decode_graphs.fits(step):
            return None
        return self._decode_graphs.size(step.decode_rows)

    def _launch(self, step: Step) -> PendingStep:
        timer = LapTimer()
        self._update(step)
        graphs, size = self._decode_graphs, self.graph_size(step)
        if graphs is None:
            return self._launch_kernels(step, timer)
        if size is None:
            graphs.invalidate()
            return self._launch_kernels(step, timer)
        if self.state.drafter is not None:
            return self._replay_and_draft(step, graphs, self.state.drafter, timer)
        if not step.drafts:
            samples = graphs.run(step.decodes, step.iterations, timer)
            return PendingStep(step.id, samples, (), timer.seconds, graph_size=size)
        sampled, verified = graphs.verify(step, timer)
        pending = PendingStep(step.id, (sampled,), (), timer.seconds, graph_size=size, drafts=verified)
        if self._device.type == "cuda":
            pending.close_wait, pending.launched = self._close_wait, time.perf_counter()
        return pending

    def _replay_and_draft(self, step: Step, graphs: DecodeGraphs, drafter: Drafter, timer: LapTimer) -> PendingStep:
        """Run a step in the CUDA graph of a decode step, and a speculator on the device after each iteration."""
        verified: VerifiedDrafts | None = None
        proposals: Proposals | None = None
        samples: list[SampledTokens | None] = []
        size = self.graph_size(step)
        for iteration in range(step.iterations):
            if step.drafts:
                sampled, verified = graphs.verify(step, timer)
                samples.append(sampled)
            else:
                samples += graphs.run(step.decodes, 1, timer)
            propose = step.propose if iteration == step.iterations - 1 else 0
            proposals = drafter.run_replayed(step, graphs, verified, propose=propose)
            timer.end("launch")
        return PendingStep(step.id, samples, (), timer.seconds, graph_size=size, drafts=verified, proposals=proposals)

    def _update(self, step: Step) -> None:
        """Apply the step's changes to the persistent batch and to the sampler."""
        self.state.persistent_batch.update(step)
        self.state.sampler.update(step, self.state.persistent_batch.row)

    def forget(self, step: Step) -> PendingStep:
        """Forget the finished sequences of a step that computes nothing."""
        self._update(step)
        return PendingStep(step.id, (), (), {})

    def _launch_kernels(self, step: Step, timer: LapTimer) -> PendingStep:
        """Run the step without graphs of whole decode steps."""
        state = self.state
        without_drafts = (*step.decodes, *(chunk.sequence for chunk in step.chunks if chunk.sample))
        sampling = (*without_drafts, *step.draft_sequences)
        drafts: DraftRows | None = None
        if step.drafts:
            rows = state.persistent_batch.rows([part.sequence for part in step.drafts])
            drafts = DraftRows.of(step.drafts, rows, len(without_drafts), state.persistent_batch.tables.device)
        samples: list[SampledTokens | None] = []
        verified: VerifiedDrafts | None = None
        proposals: Proposals | None = None
        prompt_logprobs: StepPromptLogprobs = ()
        graph_size: int | None = None
        for iteration in range(step.iterations):
            batch, sampling_rows = build_batch(state.persistent_batch, step, len(state.groups))
            run = state.forward_pass(batch)
            timer.end("prepare")
            hidden, graph_size = self._forward(run)
            logits = None
            if sampling:
                all_rows = len(batch.logit_rows) == len(hidden)
                logits = state.model.logits(hidden if all_rows else hidden[batch.logit_rows])
            timer.end("launch")
            sampled = None
            if logits is not None:
                sampled, verified = self._sample(logits, sampling, sampling_rows, drafts)
            samples.append(sampled)
            prompt_logprobs = state.sampler.prompt_logprobs(step, hidden, state.model)
            timer.end("sample")
            if state.drafter is not None:
                computed = ComputedRows(
                    batch=batch,
                    logit_rows=batch.logit_rows,
                    sampled=batch.tokens[:0] if sampled is None else sampled.tokens,
                    sequences=without_drafts,
                    verified=verified,
                )
                propose = step.propose if iteration == step.iterations - 1 else 0
                proposals = state.drafter.run(step, computed, propose=propose)
                timer.end("launch")
        return PendingStep(
            step.id,
            samples,
            prompt_logprobs,
            timer.seconds,
            graph_size=graph_size,
            drafts=verified,
            proposals=proposals,
        )

    def _forward(self, run: ForwardPass) -> tuple[torch.Tensor, int | None]:
        """Compute a pass, by piecewise graphs if it has few enough tokens. Returns the hidden states: [tokens,
        hidden_size], and StepResult.graph_size."""
        graphs, count = self._piecewise_graphs, len(run.batch.tokens)
        if graphs is not None and count <= graphs.max_tokens:
            return graphs.run(run), graphs.size(count)
        return self.state.model.forward(run), None if self._decode_graphs is None else 0

    def _sample(
        self, logits: torch.Tensor, sequences: Sequence[int], rows: torch.Tensor, drafts: DraftRows | None
    ) -> tuple[SampledTokens, VerifiedDrafts | None]:
        """Sample a token from each row of logits, verify the drafts, and store the last token of each sequence.

        sequences, rows: of the logits, and their rows in the persistent batch; those of drafts come last.
        """
        sampler, batch = self.state.sampler, self.state.persistent_batch
        sampled = sampler.sample(logits, sequences, rows, drafts)
        tokens, verified = sampled.tokens, None
        if drafts is not None:
            verified = sampler.verify(drafts, tokens, batch.last_tokens)
            rows, tokens = rows[: drafts.num_before], tokens[: drafts.num_before]
        batch.set_last_tokens(rows, tokens)
        return sampled, verified


def enter_device(device: DeviceInfo) -> None:
    """Make a GPU this thread's current device: Triton launches on the current device, wherever the tensors are."""
    if device.type == "cuda" and torch.cuda.current_device() != device.index:
        torch.cuda.set_device(device.index)
