"""A step while it is being planned."""

from __future__ import annotations

from engine.core.schedulers.decode_set import DecodeSet
from engine.core.schedulers.policy import Split
from engine.core.schedulers.request_state import RequestState


class StepPlan:
    """The prefill chunks of one step, and the tokens left in its budget. All active decodes are part of the step.

    Request states are advanced only when the complete plan is committed, so that a policy that fails during planning
    leaves them consistent. budget: maximum tokens of the step. split: the policy's shares of the budget.
    """

    __slots__ = ("_budget", "_decoding", "_prefill", "chunk_tokens", "chunks", "deferred", "max_decodes", "preempted")

    def __init__(self, budget: int, split: Split, decoding: DecodeSet) -> None:
        self._budget = budget
        self._prefill = split.prefill
        self._decoding = decoding
        self.max_decodes = max(0, min(budget, split.decode))
        self.chunks: dict[RequestState, int] = {}  # tokens of each chunk
        self.chunk_tokens = 0
        self.deferred: list[RequestState] = []  # prefilling requests whose chunks come after those of urgent ones
        self.preempted: set[RequestState] = set()

    @property
    def empty(self) -> bool:
        """Whether the step would compute nothing."""
        return not (self._decoding or self.chunks)

    @property
    def prefill_tokens_left(self) -> int:
        """Tokens of the budget left for prefill chunks."""
        return min(self._prefill, self._budget - len(self._decoding)) - self.chunk_tokens

    def add_chunk(self, state: RequestState) -> None:
        """Add a chunk of the request's remaining prefill, as long as the budget allows."""
        count = min(self.prefill_tokens_left, state.prefill_len - state.computed)
        if count > 0:
            self.chunks[state] = count
            self.chunk_tokens += count

    def remove(self, state: RequestState) -> None:
        """Remove a request that is being preempted."""
        self.preempted.add(state)
        self.chunk_tokens -= self.chunks.pop(state, 0)
        if state in self.deferred:
            self.deferred.remove(state)
