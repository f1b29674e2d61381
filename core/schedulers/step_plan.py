"""The step in the making."""

from __future__ import annotations

from engine.core.schedulers.decode_set import DecodeSet
from engine.core.schedulers.policy import Split
from engine.core.schedulers.request_state import RequestState


class Plan:
    """A step's chunks, and what is left of its tokens beside those of `decoding`, which are in it anyhow.

    Sequences are booked as advanced only once it is complete, so that a policy that fails half-way leaves nothing half
    done. total: most tokens of the step; split: the policy's shares of them.
    """

    __slots__ = ("_decoding", "_prefill", "_total", "chunk_tokens", "chunks", "decode_room", "preempted", "yielding")

    def __init__(self, total: int, split: Split, decoding: DecodeSet) -> None:
        self._total = total
        self._prefill = split.prefill
        self._decoding = decoding
        self.decode_room = max(0, min(total, split.decode))
        self.chunks: dict[RequestState, int] = {}
        self.chunk_tokens = 0
        self.yielding: list[RequestState] = []  # in their prompts, served once the urgent ones that wait have been
        self.preempted: set[RequestState] = set()

    @property
    def empty(self) -> bool:
        """Whether nothing is to be computed."""
        return not (self._decoding or self.chunks)

    @property
    def prefill_room(self) -> int:
        """Tokens left for prompts."""
        return min(self._prefill, self._total - len(self._decoding)) - self.chunk_tokens

    def add_chunk(self, state: RequestState) -> None:
        """As many of the sequence's known tokens as there is room for."""
        count = min(self.prefill_room, state.known - state.computed)
        if count > 0:
            self.chunks[state] = count
            self.chunk_tokens += count

    def drop(self, state: RequestState) -> None:
        """Take a preempted sequence out."""
        self.preempted.add(state)
        self.chunk_tokens -= self.chunks.pop(state, 0)
        if state in self.yielding:
            self.yielding.remove(state)
