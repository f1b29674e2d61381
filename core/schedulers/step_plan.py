"""A step while it is being planned."""

from __future__ import annotations

from typing import NamedTuple

from engine.core.schedulers.block_manager import BlockManager
from engine.core.schedulers.decode_set import DecodeSet
from engine.core.schedulers.policy import Split
from engine.core.schedulers.request_state import RequestState


class Chunk(NamedTuple):
    """A prefill chunk: position of its first token, number of tokens."""

    start: int
    num_tokens: int


class StepPlan:
    """The prefill chunks of one step, and the tokens left in its budget. All active decodes are part of the step.

    Request states are advanced only when the complete plan is committed, so that a policy that fails during planning
    leaves them consistent; `discard` then returns the tokens that the chunks have claimed.

    budget: maximum tokens of the step. split: the policy's shares of the budget.
    """

    __slots__ = (
        "_blocks",
        "_budget",
        "_decoding",
        "_limited",
        "_prefill",
        "chunk_tokens",
        "chunks",
        "deferred",
        "max_decodes",
        "preempted",
    )

    def __init__(self, budget: int, split: Split, decoding: DecodeSet, blocks: BlockManager) -> None:
        self._blocks = blocks
        self._budget = budget
        self._prefill = split.prefill
        self._decoding = decoding
        self.max_decodes = max(0, min(budget, split.decode))
        self.chunks: dict[RequestState, Chunk] = {}
        self.chunk_tokens = 0
        self._limited: list[RequestState] = []
        self.deferred: list[RequestState] = []  # prefilling requests whose chunks come after those of urgent ones
        self.preempted: set[RequestState] = set()

    @property
    def empty(self) -> bool:
        """Whether the step would compute nothing."""
        return not (self._decoding or self.chunks)

    @property
    def draft_tokens_left(self) -> int:
        """Tokens of the budget left for drafts, once decodes and chunks are planned."""
        return min(self._budget - self.chunk_tokens, self.max_decodes) - len(self._decoding)

    @property
    def prefill_tokens_left(self) -> int:
        """Tokens of the budget left for prefill chunks."""
        return min(self._prefill, self._budget - len(self._decoding)) - self.chunk_tokens

    def add_chunk(self, state: RequestState, limit: int | None = None) -> None:
        """Add a chunk of the request's remaining prefill, as large as the budget allows. limit: its maximum tokens.

        The chunk leaves out tokens that chunks of other requests compute, in earlier steps or earlier in this one: all
        keys and values of a layer are written before its attention reads any.
        """
        room = self.prefill_tokens_left
        if room > 0:
            if limit is not None:
                room = min(room, limit)
                self._limited.append(state)
            chunk = Chunk(*self._blocks.claim(state.sequence, state.computed, state.prefill_len, room))
            self.chunks[state] = chunk
            self.chunk_tokens += chunk.num_tokens

    def extend_limited(self) -> None:
        """Give what is left of the budget to the requests whose chunks were limited, first come, first served."""
        for state in self._limited:
            room, chunk = self.prefill_tokens_left, self.chunks.get(state)
            if room <= 0:
                return
            if chunk is None:
                continue
            end = chunk.start + chunk.num_tokens
            if end < state.prefill_len:
                start, count = self._blocks.claim(state.sequence, end, state.prefill_len, room)
                if start > end:  # another request goes on behind this chunk
                    self._blocks.return_claim(state.sequence, start, count)
                else:
                    self.chunks[state] = Chunk(chunk.start, chunk.num_tokens + count)
                    self.chunk_tokens += count

    def feeds_another(self, state: RequestState) -> bool:
        """Whether another request may rely on this one's chunk, so that the chunk must stay in the plan."""
        chunk = self.chunks.get(state)
        return chunk is not None and self._blocks.shares(state.sequence, *chunk)

    def remove(self, state: RequestState) -> None:
        """Remove a request that is being preempted."""
        self.preempted.add(state)
        self._remove_chunk(state)
        if state in self.deferred:
            self.deferred.remove(state)

    def discard(self) -> None:
        """Remove all chunks: the step will not run."""
        for state in reversed(list(self.chunks)):
            self._remove_chunk(state)

    def _remove_chunk(self, state: RequestState) -> None:
        chunk = self.chunks.pop(state, None)
        if chunk is not None:
            self._blocks.return_claim(state.sequence, *chunk)
            self.chunk_tokens -= chunk.num_tokens
