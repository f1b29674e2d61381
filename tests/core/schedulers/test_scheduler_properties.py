"""The scheduler under any policy and any sequence of events, with a fake runner that reads its context from KV blocks.

The fake runner keeps the KV pool as a dictionary, and derives each token from the context it finds there through the
block table. So each output equals that of its request alone, unless a block was lost, wrongly shared or overwritten.
"""

from __future__ import annotations

import random
import signal
from collections import deque
from collections.abc import Sequence
from typing import Any

from attrs import evolve
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.core.schedulers.admission import Admission
from engine.core.schedulers.grouped_block_manager import GroupedBlockManager
from engine.core.schedulers.make_block_manager import make_block_manager
from engine.core.schedulers.policy import RequestView, SchedulingPolicy, Split
from engine.core.schedulers.scheduler import Scheduler
from engine.core.speculators import CheckedSpeculator, DeviceProposals, Speculator, SpeculatorSpec
from engine.core.types import FULL, BlockKind, Output, Request, SamplingParams, Step, StepResult
from engine.plugins.schedulers.fcfs import FirstComeFirstServed
from engine.plugins.schedulers.multi_step import MultiStep, MultiStepOptions
from engine.plugins.schedulers.priority import Priority

from .fake_runner import EOS, VOCABULARY, FakeRunner, expected_output, num_tokens, sequences
from .scheduling import cache_info
from .speculators import Adversarial, Failing, Perfect, Random, checked

BLOCK_SIZE = 2


def window(size: int, groups: int = 1) -> BlockKind:
    return BlockKind(name=f"window {size}", window=size, groups=groups)


LAYOUTS = {
    "full": ((FULL,), 0),
    "full and window": ((FULL, window(3)), 0),
    "window": ((window(4),), 0),
    "window within a block": ((window(1, groups=2),), 0),
    "full in two groups, windows in three": ((evolve(FULL, groups=2), window(5, groups=3)), 0),
    "latent, full and two windows": ((FULL, evolve(FULL, name="latent"), window(2), window(7)), 0),
    "full and states": ((FULL,), 2),
    "window and states": ((window(3),), 1),
    "states": ((), 3),
}
"""The kinds of layers that have blocks, and the number of layers with a state."""


class Hostile(SchedulingPolicy):
    """Gives random valid answers, many of them bad ones."""

    api = "1"

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        self.random = random.Random(options)

    def order(self, waiting: Sequence[RequestView], now: float) -> Sequence[RequestView]:
        return self.random.choices(waiting, k=self.random.randrange(len(waiting) + 2))

    def victim(self, running: Sequence[RequestView]) -> RequestView:
        return self.random.choice(running)

    def preempts(self, candidate: RequestView, running: Sequence[RequestView]) -> RequestView | None:
        return self.random.choice([*running, None])

    def split(self, budget: int, waiting: Sequence[RequestView], running: Sequence[RequestView]) -> Split:
        shares = (-5, 0, 1, 3, budget, budget, 10**9)
        return Split(decode=self.random.choice(shares), prefill=self.random.choice(shares))

    def prefill_limit(self, request: RequestView, room: int, others: Sequence[RequestView]) -> int:
        return self.random.choice([-5, 0, 1, 2, room // 2, room, 10**9])

    def decode_steps(self, running: Sequence[RequestView], waiting: Sequence[RequestView]) -> int:
        return self.random.choice([-1, 0, 1, 2, 3, 10**9])


class Faulty(Hostile):
    """Fails in every method now and then, and is interrupted there by Ctrl-C."""

    def __getattribute__(self, name: str) -> Any:
        if name in ("order", "victim", "preempts", "split", "prefill_limit", "decode_steps"):
            if self.random.random() < 0.1:
                signal.raise_signal(signal.SIGINT)
            if self.random.random() < 0.1:
                raise LookupError(name)
        return super().__getattribute__(name)


class SchedulerMachine(RuleBasedStateMachine):
    policy: type[SchedulingPolicy]

    def make_policy(self, seed: int) -> SchedulingPolicy:
        return self.policy(seed)

    def make_speculator(self, seed: int) -> CheckedSpeculator | DeviceProposals | None:
        return None

    @initialize(
        layout=st.sampled_from(["full", *LAYOUTS]),
        num_blocks=st.integers(3, 12),
        max_batch_tokens=st.sampled_from([1, 3, 5, 8, 30]),
        max_running=st.integers(1, 6),
        max_len=st.sampled_from([8, 15, 40]),
        prefix_caching=st.booleans(),
        steps_ahead=st.integers(0, 1),
        seed=st.integers(0, 1000),
    )
    def begin(
        self,
        layout: str,
        num_blocks: int,
        max_batch_tokens: int,
        max_running: int,
        max_len: int,
        prefix_caching: bool,
        steps_ahead: int,
        seed: int,
    ) -> None:
        speculator = self.make_speculator(seed)
        kinds, states = LAYOUTS[layout]
        # A state cannot go back to a token before; a speculator on the device needs blocks of full attention.
        windows_only = isinstance(speculator, DeviceProposals) and all(kind.window for kind in kinds)
        if windows_only or (speculator is not None and states):
            kinds, states = (FULL, window(2 + states, groups=states or 1)), 0
        self.live: dict[str, Request] = {}
        num_blocks *= sum(kind.groups for kind in kinds)
        cache = cache_info(num_blocks=num_blocks, block_size=BLOCK_SIZE, kinds=kinds, states=states)
        self.blocks = make_block_manager(cache, max_chunk=max_batch_tokens, prefix_caching=prefix_caching)
        self.scheduler = Scheduler(
            self.make_policy(seed),
            self.blocks,
            max_batch_tokens=max_batch_tokens,
            max_running=max_running,
            max_len=max_len,
            eos_tokens=frozenset({EOS}),
            speculator=speculator,
        )
        self.check_remembered(self.scheduler._planner._admission)
        self.max_batch_tokens = max_batch_tokens
        self.max_running = max_running
        self.longest = min(max_len, self.blocks.max_tokens + 1)
        self.steps_ahead = steps_ahead
        self.runner = FakeRunner(BLOCK_SIZE, kinds, has_state=states > 0)
        take = self.blocks._take_blocks

        self.taken: list[int] = []

        def note_taken(count: int) -> list[int]:
            blocks = take(count)
            self.taken += blocks
            return blocks

        self.blocks._take_blocks = note_taken  # type: ignore[method-assign]
        self.in_flight: deque[tuple[Step, StepResult]] = deque()
        self.outputs: dict[str, list[Output]] = {}
        self.admitted: list[int] = []  # requests in the order of their first admission
        self.now = 0.0
        self.count = 0

    def check_remembered(self, admission: Admission) -> None:
        """Make the scheduler fail if it takes a waiting request for one that does not fit, though it fits."""
        may_fit = admission._may_fit

        def checked(search: Any) -> bool:
            possible = may_fit(search)
            if not possible:
                next_block = search.next_block
                shortage = self.blocks.shortage(len(search.state.tokens), admission._lookup(search))
                search.next_block = next_block
                for sequence in search.victims.values():
                    shortage.release(sequence)
                assert not admission._fits(search, shortage.blocks), "it fits"
            return possible

        admission._may_fit = checked  # type: ignore[method-assign]

    @rule(data=st.data(), same=st.integers(1, 5))
    def add(self, data: st.DataObject, same: int) -> None:
        prompt = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=min(14, self.longest - 1)))
        room = self.longest - len(prompt)
        max_tokens = data.draw(st.none() | st.integers(1, room))
        salt = data.draw(st.integers(0, 1))
        params = SamplingParams(
            max_tokens=max_tokens,
            min_tokens=data.draw(st.integers(0, max_tokens or room)) if data.draw(st.booleans()) else 0,
            seed=salt,
            ignore_eos=data.draw(st.booleans()),
            stop_token_ids=tuple(data.draw(st.lists(st.integers(1, VOCABULARY), max_size=1))),
            prompt_logprobs=data.draw(st.sampled_from([None, None, None, 0])),
        )
        priority = data.draw(st.integers(0, 2))
        prediction: tuple[int, ...] | None = None
        for _ in range(same):
            self.now += 1
            request = Request(
                id=str(self.count),
                prompt=tuple(prompt),
                params=params,
                priority=priority,
                arrival=self.now,
                salt=str(salt),
            )
            if prediction is None:
                prediction = self.draw_prediction(data, request)
            request = evolve(request, prediction=prediction)
            self.count += 1
            self.live[request.id] = request
            self.outputs[request.id] = []
            self.scheduler.add(request)

    def draw_prediction(self, data: st.DataObject, request: Request) -> tuple[int, ...]:
        """Half of the time the output with some tokens in between, else none."""
        if not self.scheduler.speculates or data.draw(st.booleans()):
            return ()
        tokens, _ = expected_output(request, self.longest)
        at = data.draw(st.integers(0, len(tokens)))
        others = data.draw(st.lists(st.integers(0, VOCABULARY - 1), max_size=2))
        return (*tokens[:at], *others, *tokens[at:])[: self.longest]

    @rule(turns=st.integers(1, 6))
    def run(self, turns: int) -> None:
        for _ in range(turns):
            self.turn()

    @rule()
    def plan(self) -> None:
        if len(self.in_flight) <= self.steps_ahead:
            self.schedule()

    @precondition(lambda self: self.in_flight)
    @rule()
    def take_result(self) -> None:
        self.commit()

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(sorted(self.live)))
        output = self.scheduler.abort(request)
        assert output is not None
        assert (output.request, output.finish_reason, output.tokens) == (request, "abort", ())
        assert self.scheduler.abort(request) is None
        tokens, _ = expected_output(self.live.pop(request), self.longest)
        got = [token for output in self.outputs.pop(request) for token in output.tokens]
        assert got == tokens[: len(got)]
        self.scheduler.check()

    @rule()
    def reset_prefix_cache(self) -> None:
        cached = self.blocks.num_cached
        assert self.scheduler.reset_prefix_cache() == cached
        assert self.blocks.num_cached == 0

    @invariant()
    def consistent(self) -> None:
        self.scheduler.check()
        assert set(self.scheduler.requests()) == set(self.live)
        stats = self.scheduler.stats()
        assert stats.running + stats.waiting == len(self.live)
        assert stats.running <= self.max_running

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        turns = 0
        while self.live:
            self.turn()
            turns += 1
            assert turns < 3000, "no progress"
        while self.in_flight:
            self.commit()
        self.scheduler.check()
        assert not self.scheduler.has_work
        assert self.blocks.num_used == 0
        if not self.blocks.prefix_caching:
            assert self.runner.cached == 0, "a prefix was reused"

    def turn(self) -> None:
        """What Engine.step does."""
        if self.in_flight and self.needs_result():
            self.commit()
        planned = self.schedule()
        if self.in_flight and not (planned and len(self.in_flight) <= self.steps_ahead):
            self.commit()

    def needs_result(self) -> bool:
        while True:
            try:
                return self.scheduler.needs_result()
            except KeyboardInterrupt:
                self.scheduler.check()

    def schedule(self) -> bool:
        self.now += 1
        while True:
            try:
                step = self.scheduler.schedule(self.now)
                break
            except KeyboardInterrupt:
                self.scheduler.check()
        if step is None:
            assert self.in_flight or not self.live, "no step was planned though no result is awaited"
            return False
        assert sequences(step)
        assert num_tokens(step) <= self.max_batch_tokens
        assert len(sequences(step)) <= self.max_running
        if step.iterations == 1:  # nothing that a block held before can pass for its new content
            for block in self.taken:
                self.runner.clear(block)
        self.taken.clear()  # a multi-step step reads blocks behind windows until its later iterations write to them
        result = self.runner.run(step)
        for sequence in sequences(step):
            self.check_tables(sequence)
        running = self.scheduler._queues.running
        assert set(self.runner.tables) == set(running)
        for new in step.new:
            number = int(running[new.sequence].request.id)
            if number not in self.admitted:
                self.admitted.append(number)
        if issubclass(self.policy, FirstComeFirstServed):
            assert self.admitted == sorted(self.admitted), "a request overtook an earlier one"
        self.in_flight.append((step, result))
        return True

    def check_tables(self, sequence: int) -> None:
        """The runner has the blocks that the block manager has given to a sequence, at the same indices."""
        tables = self.runner.tables[sequence]
        if not isinstance(self.blocks, GroupedBlockManager):
            assert tables == [list(self.blocks.table(sequence))]
            return
        for kind, (first, blocks) in enumerate(self.blocks.tables(sequence)):
            assert tuple(tables[kind][first * self.blocks.kinds[kind].groups :]) == blocks

    def commit(self) -> None:
        step, result = self.in_flight.popleft()
        self.now += 1
        for output in self.scheduler.commit(step, result, self.now):
            request = self.live[output.request]
            self.outputs[output.request].append(output)
            assert output.tokens
            assert [entry.token for entry in output.logprobs] == list(output.tokens)
            if output.finish_reason is not None:
                del self.live[output.request]
                self.check_finished(request, self.outputs.pop(output.request))
        self.scheduler.check()

    def check_finished(self, request: Request, outputs: list[Output]) -> None:
        tokens, reason = expected_output(request, self.longest)
        last = outputs[-1]
        assert [token for output in outputs for token in output.tokens] == tokens
        assert last.finish_reason == reason
        assert last.stop_token == (tokens[-1] if reason == "stop" else None)
        scores = [output.prompt_logprobs for output in outputs]
        if request.params.prompt_logprobs is None:
            assert scores == [None] * len(outputs)
        else:
            assert scores[0] is not None
            assert [entry.token for entry in scores[0]] == list(request.prompt[1:])
            assert scores[1:] == [None] * (len(outputs) - 1)
        assert last.times is not None
        assert last.num_tokens == len(tokens)
        assert request.arrival <= last.times.scheduled <= last.times.first_token <= last.times.finished == self.now


LIMITS = settings(max_examples=60, stateful_step_count=25, deadline=None, derandomize=True, database=None)


class FcfsMachine(SchedulerMachine):
    policy = FirstComeFirstServed


class PriorityMachine(SchedulerMachine):
    policy = Priority


class MultiStepMachine(SchedulerMachine):
    policy = MultiStep

    def make_policy(self, seed: int) -> SchedulingPolicy:
        return MultiStep(MultiStepOptions(steps=("auto", 2, 3, 4, 8)[seed % 5]))


class HostileMachine(SchedulerMachine):
    policy = Hostile


class FaultyMachine(SchedulerMachine):
    policy = Faulty


class PerfectDraftsMachine(SchedulerMachine):
    policy = FirstComeFirstServed
    speculator: type[Speculator] = Perfect

    def make_speculator(self, seed: int) -> CheckedSpeculator | DeviceProposals | None:
        return checked(self.speculator, max_drafts=1 + seed % 8)


class RandomDraftsMachine(PerfectDraftsMachine):
    policy = Priority
    speculator = Random


class AdversarialDraftsMachine(PerfectDraftsMachine):
    policy = Hostile
    speculator = Adversarial


class FailingDraftsMachine(PerfectDraftsMachine):
    policy = Faulty
    speculator = Failing


class DeviceDraftsMachine(SchedulerMachine):
    """Drafts that the runner proposes along with the result of the step before."""

    policy = Priority

    def make_speculator(self, seed: int) -> CheckedSpeculator | DeviceProposals | None:
        return DeviceProposals(SpeculatorSpec(vocab_size=VOCABULARY, max_len=1000, max_drafts=1 + seed % 8))


class HostileDeviceDraftsMachine(DeviceDraftsMachine):
    policy = Hostile


class MultiStepDeviceDraftsMachine(DeviceDraftsMachine):
    def make_policy(self, seed: int) -> SchedulingPolicy:
        return MultiStep(MultiStepOptions(steps=("auto", 2, 3, 4, 8)[seed % 5]))


class MultiStepDraftsMachine(MultiStepMachine):
    def make_speculator(self, seed: int) -> CheckedSpeculator | DeviceProposals | None:
        return checked(Random, max_drafts=3)


TestFcfs = FcfsMachine.TestCase
TestFcfs.settings = LIMITS
TestPriority = PriorityMachine.TestCase
TestPriority.settings = LIMITS
TestMultiStep = MultiStepMachine.TestCase
TestMultiStep.settings = LIMITS
TestHostile = HostileMachine.TestCase
TestHostile.settings = LIMITS
TestFaulty = FaultyMachine.TestCase
TestFaulty.settings = LIMITS
TestPerfectDrafts = PerfectDraftsMachine.TestCase
TestPerfectDrafts.settings = settings(LIMITS, max_examples=30)
TestRandomDrafts = RandomDraftsMachine.TestCase
TestRandomDrafts.settings = settings(LIMITS, max_examples=30)
TestAdversarialDrafts = AdversarialDraftsMachine.TestCase
TestAdversarialDrafts.settings = LIMITS
TestFailingDrafts = FailingDraftsMachine.TestCase
TestFailingDrafts.settings = LIMITS
TestDeviceDrafts = DeviceDraftsMachine.TestCase
TestDeviceDrafts.settings = LIMITS
TestHostileDeviceDrafts = HostileDeviceDraftsMachine.TestCase
TestHostileDeviceDrafts.settings = LIMITS
TestMultiStepDeviceDrafts = MultiStepDeviceDraftsMachine.TestCase
TestMultiStepDeviceDrafts.settings = settings(LIMITS, max_examples=30)
TestMultiStepDrafts = MultiStepDraftsMachine.TestCase
TestMultiStepDrafts.settings = settings(LIMITS, max_examples=30)
