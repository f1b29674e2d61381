"""Steps with prompts in pieces: CUDA graphs of what lies between the attention of one layer and of the next.

Attention itself is launched as ever, since its plan and its grid follow the batch; all else depends on nothing but the
number of tokens. A layer then costs the host one replay and one call of the backend, and not ten launches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from attrs import define, evolve

from engine.core.attention.batch import ForwardBatch
from engine.core.models.forward_pass import ForwardPass
from engine.core.runner.cuda_graphs import unowned

if TYPE_CHECKING:
    from engine.core.attention.base import AttentionBackend
    from engine.core.attention.kv_pool import KVPool
    from engine.core.models.base import Model
    from engine.core.runner.cuda_graphs import Recorder

MOST_TOKENS = 1024
"""Larger steps keep the device busy for longer than the host takes to launch their kernels one by one."""


def token_counts(most: int) -> list[int]:
    """Numbers of tokens to record steps for: a step is padded by less than 64 up to 512, and by less than 128."""
    counts = [*range(64, 513, 64), *range(640, MOST_TOKENS + 1, 128)]
    return [count for count in counts if count <= most]


@define
class _Call:
    """One layer's attention between two pieces; views of memory that belongs to the recording."""

    layer: int
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor


@define
class _Step:
    """A recorded step: pieces and calls in turn, a piece first and last."""

    pieces: list[Callable[[], None]]
    calls: list[_Call]
    hidden: torch.Tensor
    """[tokens, hidden_size]."""


class _Cut:
    """Stands in for the attention backend while a step is recorded: ends a piece and begins the next."""

    def __init__(self, cut: Callable[[], None]) -> None:
        self.calls: list[_Call] = []
        self._cut = cut

    def forward(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Any) -> torch.Tensor:
        """Note the call, whose result is `out` by the time that the next piece runs."""
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        self._cut()
        self.calls.append(_Call(layer, *(unowned(tensor) for tensor in (q, k, v, out))))
        return out


class PiecewiseGraphs:
    """Records steps by their number of tokens, and runs them."""

    def __init__(
        self,
        model: Model,
        attention: AttentionBackend[Any, Any],
        pool: KVPool,
        recorder: Recorder,
        *,
        max_batch_tokens: int,
        device: torch.device,
    ) -> None:
        self._model = model
        self._attention = attention
        self._pool = pool
        self._recorder = recorder
        self._counts = token_counts(max_batch_tokens)
        self.most_tokens = self._counts[-1] if self._counts else 0
        """In a step that `run` takes."""
        scratch = pool.scratch_block * pool.block_size
        self._tokens = torch.zeros(self.most_tokens, dtype=torch.int64, device=device)
        self._positions = torch.zeros_like(self._tokens)
        self._slots = torch.full_like(self._tokens, scratch)
        self._padding = (0, 0, scratch)
        self._steps: dict[int, _Step] = {}

    def record_all(self, on_progress: Callable[[int, int], None]) -> None:
        """Record every number of tokens, the largest first, whose memory serves the others."""
        for done, count in enumerate(reversed(self._counts)):
            on_progress(done, len(self._counts))
            self._steps[count] = self._record(count)

    def run(self, batch: ForwardBatch, plan: Any) -> torch.Tensor:
        """Hidden states of a batch of at most `most_tokens`: [tokens, hidden_size], valid until the next call."""
        count = len(batch.tokens)
        size = self._counts[int(np.searchsorted(self._counts, count))]
        step = self._steps[size]
        fixed = (self._tokens, self._positions, self._slots)
        given = (batch.tokens, batch.positions, batch.slots)
        for tensor, values, padding in zip(fixed, given, self._padding, strict=True):
            tensor[:count].copy_(values)
            if count < size:
                tensor[count:size].fill_(padding)
        forward_into = self._attention.forward_into
        for piece, call in zip(step.pieces, step.calls, strict=False):
            piece()
            forward_into(call.layer, call.q[:count], call.k[:count], call.v[:count], plan, call.out[:count])
        step.pieces[-1]()
        return step.hidden[:count]

    def _record(self, count: int) -> _Step:
        empty: Any = torch.zeros(0, dtype=torch.int32, device=self._tokens.device)
        batch = ForwardBatch(
            tokens=self._tokens[:count],
            positions=self._positions[:count],
            slots=self._slots[:count],
            query_starts=empty,
            context_lens=empty,
            block_tables=empty,
            logit_rows=empty,
            num_decodes=0,
            query_lens_host=np.zeros(0, np.int32),
            context_lens_host=np.zeros(0, np.int32),
            block_tables_host=np.zeros((0, 0), np.int32),
        )
        run = ForwardPass(batch=batch, attention=self._attention, plan=None, pool=self._pool)
        cuts: list[_Cut] = []

        def work(cut: Callable[[], None]) -> torch.Tensor:
            cuts.append(_Cut(cut))
            attention: Any = cuts[-1]
            return self._model.forward(evolve(run, attention=attention))

        pieces, hidden = self._recorder.record_pieces(work)
        return _Step(pieces, cuts[-1].calls, unowned(hidden))
