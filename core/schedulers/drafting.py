"""Drafts: tokens that a speculator proposes for decoding requests, and that a single step verifies."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import accumulate, repeat
from typing import TYPE_CHECKING

from engine.core.schedulers.queues import Queues
from engine.core.schedulers.request_proposals import RequestProposals
from engine.core.schedulers.request_state import RequestState
from engine.core.schedulers.step_plan import StepPlan
from engine.core.speculators.checked_speculator import CheckedSpeculator
from engine.core.speculators.device_proposals import DeviceProposals
from engine.core.speculators.draft_lengths import DraftLengths
from engine.core.types import DraftSlice, SpeculationStats

if TYPE_CHECKING:
    from engine.core.grammars.compiler import Grammars


class Drafting:
    """Plans drafts, and counts those that are accepted.

    A request with drafts stays among the decoding sequences. Like the others it gains a token in the step's iteration;
    the accepted drafts are added when the result is committed. No step is planned before that.

    Drafts take what decodes and prefill chunks leave of a step's budget, and blocks that are available: no request
    waits or is preempted for them.
    """

    def __init__(
        self,
        speculator: CheckedSpeculator | DeviceProposals,
        queues: Queues,
        lengths: DraftLengths | None = None,
        grammars: Grammars | None = None,
        *,
        max_batch_tokens: int,
    ) -> None:
        """lengths: chooses how many drafts are verified; None: as many as are proposed. grammars: compiles the
        grammars of requests; None: proposals ignore them. max_batch_tokens: of a step."""
        self._speculator = speculator
        self._device = speculator if isinstance(speculator, DeviceProposals) else None
        self._may_pay = True
        """Whether drafts may pay in the step being planned, so that the device should propose some after it."""
        self._compiler = grammars
        self._lengths = lengths
        self._begun = False
        """Whether `lengths.begin` was called for the step that `propose` is called for next. Not where `may_follow` is
        False: the next step is planned while another is in flight, without `propose`."""
        self._queues = queues
        self._max_batch_tokens = max_batch_tokens
        self._max_drafts = speculator.spec.max_drafts
        self._requests: dict[str, RequestProposals] = {}
        """By request id, for requests that have decoded."""
        self._planned: list[tuple[RequestState, tuple[int, ...]]] = []
        """Drafts of the step being planned."""
        self._last_drafted: tuple[int, ...] = ()
        """Sequences with drafts in the last step planned. The runner does not know how many were accepted."""
        self._verified = [0] * (self._max_drafts + 1)
        """By number of drafts, how often a slice of that many was verified."""
        self._accepted = [0] * (self._max_drafts + 1)
        """By number of drafts, how often that many of a slice were accepted."""

    def may_follow(self) -> bool:
        """Whether the step after the one in flight should have drafts, by the tokens committed so far."""
        decoding, lengths = self._queues.decoding, self._lengths
        if lengths is None:
            return any(True for _ in self._propose(decoding.active()))
        self._may_pay = lengths.begin(len(decoding), len(decoding))
        self._begun = self._may_pay and lengths.pays(
            [(state.id, len(drafts)) for state, drafts in self._propose(decoding.active())]
        )
        return self._begun

    def propose(self, plan: StepPlan) -> None:
        """Choose the drafts of a plan whose decodes and chunks are complete. No step may be in flight: drafts follow
        the newest tokens."""
        self._planned = []
        if self._lengths is not None and not self._begin(self._lengths, plan):
            return
        planned = list(self._propose(self._queues.decoding.active(), plan.draft_tokens_left))
        if self._lengths is not None and planned:
            counts = self._lengths.choose([(state.id, len(drafts)) for state, drafts in planned])
            planned = [(state, drafts[:count]) for (state, drafts), count in zip(planned, counts, strict=True) if count]
        self._planned = planned

    def _begin(self, lengths: DraftLengths, plan: StepPlan) -> bool:
        """Report the plan to `lengths`; False: the plan has no drafts."""
        decodes = len(self._queues.decoding)
        rows = decodes + plan.chunk_tokens
        if self._begun:
            self._begun = False
            lengths.revise(rows, decodes)
        else:
            self._may_pay = lengths.begin(rows, decodes)
        return self._may_pay

    def _propose(
        self, states: Collection[RequestState], room: int = sys.maxsize
    ) -> Iterator[tuple[RequestState, tuple[int, ...]]]:
        """The requests for which there is a proposal, with the proposals: of at most `room` tokens in all."""
        requests, limits = self._requests, self._limits(states)
        for state, most in zip(states, limits, strict=True):
            if room <= 0:
                return
            limit = min(room, most, state.max_output - state.sampled - 1)
            if limit <= 0:
                continue
            if (proposals := requests.get(state.id)) is None:
                proposals = requests[state.id] = RequestProposals(state, self._speculator, self._compiler)
            if drafts := tuple(proposals.propose(limit)):
                room -= len(drafts)
                yield state, drafts

    def _limits(self, states: Collection[RequestState]) -> Iterable[int]:
        """Maximum drafts of each request."""
        if self._lengths is None:
            return repeat(self._max_drafts, len(states))
        return self._lengths.limits([state.id for state in states])

    def take_slices(self) -> tuple[dict[int, RequestState], tuple[DraftSlice, ...]]:
        """The requests with drafts in the step being built, by sequence number, and their slices.

        Where blocks are short, a request has fewer drafts than planned, or none.
        """
        blocks, decoding = self._queues.blocks, self._queues.decoding
        drafted: dict[int, RequestState] = {}
        slices: list[DraftSlice] = []
        for state, drafts in self._planned:
            number, position = state.sequence, state.last_position
            wanted = position + 1 + len(drafts)
            if wanted > state.capacity:
                blocks.extend(number, wanted, position)
                state.capacity = blocks.capacity(number)
                decoding.schedule_event(state)
            if room := state.capacity - position - 1:
                drafted[number] = state
                slices.append(DraftSlice(number, position, (state.output[-1], *drafts[:room])))
        self._planned = []
        return drafted, tuple(slices)

    def plan_proposals(
        self,
        plan: StepPlan,
        decodes: Iterable[RequestState],
        iterations: int,
        drafted: Iterable[tuple[RequestState, DraftSlice]],
    ) -> int:
        """Choose Step.propose of the step being built, and give the requests blocks for the proposals, as far as blocks
        are left once each running request has its next one.

        decodes: requests without drafts. drafted: requests with drafts, and their slices.
        """
        if self._device is None or not self._may_pay:
            return 0
        # Request, position of its first token in the step, maximum tokens that it has after the step.
        wanted = [(state, part.start, part.start + len(part.tokens)) for state, part in drafted]
        wanted += [(state, state.computed - iterations, state.computed) for state in decodes]
        wanted += [
            (state, chunk.start, state.computed)
            for state, chunk in plan.chunks.items()
            if state.computed == state.prefill_len
        ]
        most = max(self._limits([state for state, _, _ in wanted]), default=0)
        if not most:
            return 0
        for state, first, length in wanted:
            if length + most > state.capacity:
                # Behind a window, a sequence has blocks for the tokens of one step at most.
                end = min(length + most, state.prompt_len + state.max_output, first + self._max_batch_tokens)
                self._add_blocks(state, end, first)
        return most

    def _add_blocks(self, state: RequestState, end: int, first: int) -> None:
        """Give a request blocks for tokens up to position `end`, if enough are available. first: position of its first
        token in the step."""
        blocks, decoding, running = self._queues.blocks, self._queues.decoding, len(self._queues.running)
        more = -(-max(end - state.capacity, 0) // blocks.block_size)
        if more and blocks.num_available >= (running + more) * blocks.blocks_per_extension:
            blocks.extend(state.sequence, end, first)
            state.capacity = blocks.capacity(state.sequence)
            if state.next_event >= 0:
                decoding.schedule_event(state)

    def receive(self, states: Iterable[RequestState], proposals: Sequence[Sequence[int]]) -> None:
        """Keep the proposals of the device after a committed step, which follow the newest tokens.

        states: the requests that sampled in the step. proposals: StepResult.proposals.
        """
        if self._device is not None:
            # Proposals for a request that has ended stay until the next commit. No other request with its id decodes
            # before that.
            self._device.receive(dict(zip([state.id for state in states], proposals, strict=False)))

    def take_positions(self, drafted: Collection[int]) -> tuple[tuple[int, int], ...]:
        """Step.positions of the step being built. drafted: sequences with drafts in it."""
        running = self._queues.running
        unknown = [number for number in self._last_drafted if number in running and number not in drafted]
        self._last_drafted = tuple(drafted)
        return tuple([(number, running[number].last_position) for number in unknown])

    def accept(
        self, states: Iterable[RequestState], slices: Iterable[DraftSlice], verified: Iterable[tuple[int, ...]]
    ) -> None:
        """Count the drafts that a step has verified, before its tokens are appended, and free the blocks that only
        rejected drafts needed. states: the requests of `slices`. verified: StepResult.verified."""
        blocks, decoding = self._queues.blocks, self._queues.decoding
        accepted: list[tuple[RequestState, int]] = []
        outcomes: list[tuple[str, int, int]] = []
        for state, part, tokens in zip(states, slices, verified, strict=True):
            if state.finished:
                continue
            count, num_accepted = len(part.tokens) - 1, len(tokens) - 1
            if num_accepted:
                accepted.append((state, num_accepted))
            self._verified[count] += 1
            self._accepted[num_accepted] += 1
            outcomes.append((state.id, count, num_accepted))
            proposals = self._requests[state.id]
            if proposals.learns:
                proposals.learn(count, tokens)
            computed = part.start + len(tokens)
            if state.capacity - blocks.block_size > computed:  # the slot of the next token stays allocated
                blocks.shrink(state.sequence, computed + 1)
                state.capacity = blocks.capacity(state.sequence)
                decoding.schedule_event(state)
        decoding.accept_drafts(accepted)
        if self._lengths is not None:
            self._lengths.record(outcomes)

    def forget(self, state: RequestState) -> None:
        """Forget a request that has ended."""
        self._requests.pop(state.id, None)
        self._speculator.finished(state.id)
        if self._lengths is not None:
            self._lengths.finished(state.id)

    def stats(self) -> SpeculationStats:
        """Counters since the start."""
        return SpeculationStats(
            verified=_at_least(self._verified), accepted=_at_least(self._accepted), faults=self._speculator.faults
        )


def _at_least(counts: Sequence[int]) -> tuple[int, ...]:
    """Counts of exactly 0, 1, 2, ... -> counts of at least 1, at least 2, ..."""
    return tuple(accumulate(reversed(counts[1:])))[::-1]
