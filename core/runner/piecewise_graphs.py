"""Piecewise CUDA graphs, for steps with prefill chunks: one graph per segment between the attention of two layers.

Attention is launched outside the graphs, since its plan and grid depend on the batch; everything else depends only on
the number of tokens. A layer then costs the host one replay and one call of the backend, instead of ten launches.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from attrs import define, evolve

from engine.core.attention.batch import ForwardBatch
from engine.core.runner.graph_capture import weak_ref_tensor
from engine.core.runner.graph_sizes import recorded_sizes, token_counts

if TYPE_CHECKING:
    from engine.core.models.forward_pass import ForwardPass
    from engine.core.runner.device_state import DeviceState
    from engine.core.runner.graph_capture import GraphCapturer


@define
class _AttentionCall:
    """One layer's attention between two segments; the tensors are views of the capture's memory."""

    group: int
    layer: int
    """Index in the cache group."""
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor


@define
class _CapturedStep:
    """A captured step: segments and attention calls alternate, a segment first and last."""

    segments: list[Callable[[], None]]
    calls: list[_AttentionCall]
    hidden: torch.Tensor
    """[tokens, hidden_size]."""


class _GraphBreak:
    """Stands in for the attention backend of a cache group during a capture: breaks the graph at each call."""

    def __init__(
        self, break_graph: Callable[[], None], calls: list[_AttentionCall], group: int, output_dim: int
    ) -> None:
        """calls: to be filled, by all groups in turn."""
        self._calls = calls
        self._break_graph = break_graph
        self._group = group
        self._output_dim = output_dim

    def forward(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Any) -> torch.Tensor:
        """Note the call, and return its output, which is filled before the next segment is replayed."""
        from engine.ops.common.row_memory import empty_with_room

        tokens, heads = q.shape[:2]
        out = empty_with_room(q, (tokens, heads * self._output_dim)).view(tokens, heads, self._output_dim)
        self._break_graph()
        tensors = (weak_ref_tensor(tensor) for tensor in (q, k, v, out))
        self._calls.append(_AttentionCall(self._group, layer, *tensors))
        return out

    def rotate_and_forward(self, layer: int, qkv: torch.Tensor, rotation: Any, plan: Any) -> None:
        """Leave norm, rotation and the write to the cache to the segment before the break."""


class PiecewiseGraphs:
    """Captures steps by their number of tokens, and replays them."""

    def __init__(self, state: DeviceState, capturer: GraphCapturer, *, max_tokens: int, device: torch.device) -> None:
        """max_tokens: of the largest step to capture."""
        self._model = state.model
        self._state = state
        self._attention = state.attention
        self._capturer = capturer
        self._counts = token_counts(max_tokens)
        self.max_tokens = max_tokens
        """Maximum tokens of a step that `run` accepts."""
        scratch = state.pool.scratch_block * state.pool.block_size
        self._tokens = torch.zeros(self.max_tokens, dtype=torch.int64, device=device)
        self._positions = torch.zeros_like(self._tokens)
        self._slots = [torch.full_like(self._tokens, scratch) for _ in state.groups]
        """Per cache group: the slot of each token."""
        self._inputs = (self._tokens, self._positions, *self._slots)
        """The tensors that `run` fills."""
        self._padding = (0, 0, *(scratch for _ in state.groups))
        """What each of them holds for a padding token."""
        self._steps: dict[int, _CapturedStep] = {}

    def capture_all(self, on_progress: Callable[[int, int], None]) -> None:
        """Capture every number of tokens, the largest first, whose memory serves the others.

        on_progress: called with the number of captures done and the number of all.
        """
        for done, count in enumerate(reversed(self._counts)):
            on_progress(done, len(self._counts))
            self._steps[count] = self._capture(count)

    def size(self, count: int) -> int:
        """The number of tokens that a step of `count` tokens is padded to. count: at most `max_tokens`."""
        return self._counts[int(np.searchsorted(self._counts, count))]

    def run(self, run: ForwardPass) -> torch.Tensor:
        """Hidden states of a batch of at most `max_tokens`: [tokens, hidden_size], valid until the next call."""
        batch, plan = run.batch, run.plan
        count = len(batch.tokens)
        size = self.size(count)
        step = self._steps[size]
        slots = (group.slots for group in batch.groups) if batch.groups else (batch.slots,)
        given = (batch.tokens, batch.positions, *slots)
        for tensor, values, padding in zip(self._inputs, given, self._padding, strict=True):
            tensor[:count].copy_(values)
            if count < size:
                tensor[count:size].fill_(padding)
        if run.groups:
            self._replay_groups(step, run, count)
        else:
            forward_into = self._attention.forward_into
            for segment, call in zip(step.segments, step.calls, strict=False):
                segment()
                forward_into(call.layer, call.q[:count], call.k[:count], call.v[:count], plan, call.out[:count])
        step.segments[-1]()
        return step.hidden[:count]

    def _replay_groups(self, step: _CapturedStep, run: ForwardPass, count: int) -> None:
        """Replay all but the last segment, with the attention of each layer's group between them."""
        for segment, call in zip(step.segments, step.calls, strict=False):
            segment()
            group = run.groups[call.group]
            q, k, v, out = (tensor[:count] for tensor in (call.q, call.k, call.v, call.out))
            group.attention.forward_into(call.layer, q, k, v, group.plan, out)

    @torch.inference_mode()
    def run_without_graphs(
        self, count: int, within: AbstractContextManager[object], on_break: Callable[[], None]
    ) -> None:
        """Run the kernels of the graphs of a number of tokens one by one, for padding tokens, without attention.

        within: entered for these kernels and no others. on_break: called where a graph ends and the next begins. Must
        not be called while a step is in flight.
        """
        for tensor, padding in zip(self._inputs, self._padding, strict=True):
            tensor[:count].fill_(padding)
        run = self._state.unplanned_pass(self._batch(count))
        with within:
            self._forward(run, [], on_break)

    def run_all_without_graphs(self, all_up_to: int) -> None:
        """Run the kernels of all graphs once, one by one, for padding tokens, without attention, the largest first.

        all_up_to: number of tokens up to which every graph may have kernels of its own.
        """
        for count in reversed(recorded_sizes(self._counts, all_up_to)):
            self.run_without_graphs(count, nullcontext(), lambda: None)

    def _capture(self, count: int) -> _CapturedStep:
        run = self._state.unplanned_pass(self._batch(count))
        calls: list[_AttentionCall] = []
        segments, hidden = self._capturer.capture_segments(lambda break_graph: self._forward(run, calls, break_graph))
        return _CapturedStep(segments, calls, weak_ref_tensor(hidden))

    def _forward(self, run: ForwardPass, calls: list[_AttentionCall], break_graph: Callable[[], None]) -> torch.Tensor:
        """The forward pass, with a graph break in place of each attention. calls: to be filled."""
        calls.clear()  # of the warm-up
        breaks: list[Any] = [
            _GraphBreak(break_graph, calls, number, group.pool.output_dim)
            for number, group in enumerate(self._state.groups)
        ]
        groups = tuple(evolve(own, attention=one) for own, one in zip(run.groups, breaks, strict=False))
        return self._model.forward(evolve(run, attention=breaks[0], groups=groups))

    def _batch(self, count: int) -> ForwardBatch:
        """The batch that a model sees during the capture."""
        empty: Any = torch.zeros(0, dtype=torch.int32, device=self._tokens.device)
        batch = ForwardBatch(
            tokens=self._tokens[:count],
            positions=self._positions[:count],
            slots=self._slots[0][:count],
            query_starts=empty,
            context_lens=empty,
            block_tables=empty,
            logit_rows=empty,
            num_decodes=0,
            query_lens_host=np.zeros(0, np.int32),
            context_lens_host=np.zeros(0, np.int32),
            block_tables_host=np.zeros((0, 0), np.int32),
        )
        if len(self._slots) > 1:
            batch.groups = tuple(evolve(batch, slots=slots[:count]) for slots in self._slots)
        return batch
