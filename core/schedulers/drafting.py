"""Drafts: tokens that a speculator proposes for decoding requests, and that a single step verifies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from engine.core.schedulers.queues import Queues
from engine.core.schedulers.request_state import RequestState
from engine.core.schedulers.step_plan import StepPlan
from engine.core.speculators.base import SpeculatedSequence
from engine.core.speculators.checked_speculator import CheckedSpeculator
from engine.core.speculators.device_proposals import DeviceProposals
from engine.core.speculators.draft_lengths import DraftLengths
from engine.core.speculators.grammar_drafts import GrammarDrafts
from engine.core.speculators.predicted_output import PredictedOutput
from engine.core.types import DraftSlice, SpeculationStats

if TYPE_CHECKING:
    from engine.core.grammars.compiler import Grammars


class Drafting:
    """Plans drafts, and keeps track of the requests that have some.

    A request with drafts is not among the decoding sequences in the step that verifies them: how many tokens it gains
    is known when the result is committed. It is back among them when the next step is planned (`resume`). So all others
    advance by the step counter alone, as without a speculator.

    The speculator is asked only where a request's own prediction proposes nothing. The request's grammar cuts either
    proposal at the first token that it refuses, or replaces it by the tokens that it forces, if these are more.

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
        self._sequences: dict[str, SpeculatedSequence] = {}
        """By request id, the requests that have decoded."""
        self._predictions: dict[str, PredictedOutput] = {}
        """By request id, for requests that have a prediction."""
        self._grammars: dict[str, GrammarDrafts] = {}
        """By request id, for requests that have a grammar."""
        self._planned: dict[RequestState, tuple[int, ...]] = {}
        """Drafts of the step being planned."""
        self._verifying: dict[int, RequestState] = {}
        """By sequence number, requests with drafts in a step that was planned, until `resume`."""
        self._positions: dict[int, int] = {}
        """By sequence number, tokens computed; for the runner, which does not follow how many drafts are accepted."""
        self._verified = [0] * (self._max_drafts + 1)
        """By number of drafts, how often a slice of that many was verified."""
        self._accepted = [0] * (self._max_drafts + 1)
        """By number of drafts, how often that many of a slice were accepted."""

    def may_follow(self) -> bool:
        """Whether the step after the one in flight should have drafts, by the tokens committed so far."""
        decoding, lengths = self._queues.decoding.active(), self._lengths
        if lengths is None:
            return any(self._propose(state, self._max_drafts) for state in decoding)
        rows = len(self._queues.decoding)
        self._may_pay = lengths.begin(rows, rows)
        self._begun = self._may_pay and lengths.pays(
            [(state.id, len(self._propose(state, self._max_drafts))) for state in decoding]
        )
        return self._begun

    def resume(self) -> None:
        """Return the requests whose drafts are verified to the decoding sequences."""
        if not self._verifying:
            return
        running, later = self._queues.running, dict[int, RequestState]()
        for number, state in self._verifying.items():
            if running.get(number) is not state:
                continue
            if state.in_flight:
                later[number] = state
            else:
                self._positions[number] = state.computed
                self._queues.decoding.add(state)
        self._verifying = later

    def propose(self, plan: StepPlan) -> None:
        """Choose the drafts of a plan whose decodes and chunks are complete. No step may be in flight: drafts follow
        the newest tokens."""
        self._planned = {}
        planned: dict[RequestState, tuple[int, ...]] = {}
        room = plan.draft_tokens_left
        if self._lengths is not None and not self._begin(self._lengths, plan):
            return
        for state in self._queues.decoding.active():
            if room <= 0:
                break
            if drafts := self._propose(state, room):
                planned[state] = tuple(drafts)
                room -= len(drafts)
        if self._lengths is not None and planned:
            counts = self._lengths.choose([(state.id, len(drafts)) for state, drafts in planned.items()])
            planned = {
                state: drafts[:count] for (state, drafts), count in zip(planned.items(), counts, strict=True) if count
            }
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

    def take_slices(self) -> tuple[tuple[RequestState, ...], tuple[DraftSlice, ...]]:
        """Take the requests with drafts out of the decoding ones; return the requests and their slices.

        The caller calls `plan_drafts` on each of the requests. Where blocks are short, a request has fewer drafts than
        planned, or none.
        """
        blocks, decoding = self._queues.blocks, self._queues.decoding
        states: list[RequestState] = []
        slices: list[DraftSlice] = []
        for state, drafts in self._planned.items():
            number, position = state.sequence, state.computed
            wanted = position + 1 + len(drafts)
            if wanted > state.capacity:
                blocks.extend(number, wanted, position)
                state.capacity = blocks.capacity(number)
            kept = drafts[: state.capacity - position - 1]
            if not kept:
                continue
            decoding.remove(state)
            self._verifying[number] = state
            self._positions.pop(number, None)
            states.append(state)
            slices.append(DraftSlice(number, position, (state.output[-1], *kept)))
        self._planned.clear()
        return tuple(states), tuple(slices)

    def plan_proposals(self, states: Iterable[tuple[RequestState, int, int]]) -> int:
        """Choose Step.propose of the step being built, and give the requests blocks for the proposals, as far as blocks
        are left once each running request has its next one.

        states: (request, position of its first token in the step, maximum tokens that it has after the step).
        """
        if self._device is None or not self._may_pay:
            return 0
        wanted = list(states)
        most = self._max_drafts
        if self._lengths is not None:
            most = max((self._lengths.limit(state.id) for state, _, _ in wanted), default=0)
        if not wanted or most <= 0:
            return 0
        blocks, decoding, running = self._queues.blocks, self._queues.decoding, len(self._queues.running)
        for state, first, length in wanted:
            # Behind a window, a sequence has blocks for the tokens of one step at most.
            needed = min(length + most, state.prompt_len + state.max_output, first + self._max_batch_tokens)
            more = -(-max(needed - state.capacity, 0) // blocks.block_size)
            if more and blocks.num_available >= (running + more) * blocks.blocks_per_extension:
                blocks.extend(state.sequence, needed, first)
                state.capacity = blocks.capacity(state.sequence)
                if state.next_event >= 0:
                    decoding.schedule_event(state)
        return most

    def receive(self, states: Iterable[RequestState], proposals: Sequence[Sequence[int]]) -> None:
        """Keep the proposals of the device after a committed step. states: the requests that sampled in the step."""
        assert self._device is not None, "proposals without a speculator on the device"
        for state, tokens in zip(states, proposals, strict=True):
            if not state.finished:
                self._device.receive(state.id, len(state.tokens), tokens)

    def take_positions(self) -> tuple[tuple[int, int], ...]:
        """Step.positions of the step being built."""
        running = self._queues.running
        positions = tuple((number, at) for number, at in self._positions.items() if number in running)
        self._positions.clear()
        return positions

    def verified(self, state: RequestState, count: int, tokens: tuple[int, ...]) -> None:
        """Count the drafts of a request that were verified. count: their number; tokens: the accepted drafts and the
        token after them."""
        accepted = len(tokens) - 1
        state.accept_drafts(accepted)
        self._verified[count] += 1
        self._accepted[accepted] += 1
        if self._lengths is not None:
            self._lengths.record(state.id, count, accepted)
        grammar = self._grammars.get(state.id) if self._grammars else None
        if grammar is not None and grammar.proposed:
            return
        prediction = self._predictions.get(state.id) if self._predictions else None
        if prediction is not None and prediction.proposed:
            state.count_prediction(tokens, count)
        elif self._speculator.learns:
            self._speculator.accepted(state.id, count, accepted)

    def give_back(self, state: RequestState) -> None:
        """Free the blocks that only rejected drafts needed; the slot of the next token stays allocated."""
        blocks = self._queues.blocks
        if state.sequence and state.capacity - blocks.block_size > state.computed:
            blocks.shrink(state.sequence, state.computed + 1)
            state.capacity = blocks.capacity(state.sequence)

    def forget(self, state: RequestState) -> None:
        """Forget a request that has ended."""
        self._sequences.pop(state.id, None)
        self._predictions.pop(state.id, None)
        self._grammars.pop(state.id, None)
        self._speculator.finished(state.id)
        if self._lengths is not None:
            self._lengths.finished(state.id)

    def stats(self) -> SpeculationStats:
        """Counters since the start."""
        return SpeculationStats(
            verified=_at_least(self._verified), accepted=_at_least(self._accepted), faults=self._speculator.faults
        )

    def _propose(self, state: RequestState, room: int) -> Sequence[int]:
        try:
            sequence = self._sequences[state.id]
        except KeyError:
            sequence = self._sequences[state.id] = _speculated(state)
            if state.request.prediction:
                self._predictions[state.id] = PredictedOutput(state.request.prediction)
            if state.params.grammar is not None and self._compiler is not None:
                compiled = self._compiler.begin(state.params.grammar)
                self._grammars[state.id] = GrammarDrafts(state.id, compiled, self._compiler.owner)
        limit = min(room, self._max_drafts, state.max_output - state.sampled - 1)
        if limit > 0 and self._lengths is not None:
            limit = min(limit, self._lengths.limit(state.id))
        if limit <= 0:
            return ()
        found: Sequence[int] = ()
        if self._predictions and (prediction := self._predictions.get(state.id)) is not None:
            found = prediction.propose(state.output, limit)
        if not found:
            found = self._speculator.propose(sequence, limit)
        if self._grammars and (grammar := self._grammars.get(state.id)) is not None:
            found = grammar.choose(state.output, found, limit)
        return found


def _speculated(state: RequestState) -> SpeculatedSequence:
    """A request as the speculator sees it."""
    return SpeculatedSequence(
        request_id=state.id,
        tokens=state.tokens,
        prompt_length=state.prompt_len,
        tenant=state.request.salt or None,
    )


def _at_least(counts: Sequence[int]) -> tuple[int, ...]:
    """Counts of exactly 0, 1, 2, ... -> counts of at least 1, at least 2, ..."""
    return tuple(accumulate(reversed(counts[1:])))[::-1]
