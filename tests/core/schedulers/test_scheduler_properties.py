"""The scheduler under any policy and any sequence of events, with a fake runner that reads its context from KV blocks.

The fake runner keeps the KV pool as a dictionary, and derives each token from the context it finds there through the
block table. So each output equals that of its request alone, unless a block was lost, wrongly shared or overwritten.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from typing import Any
from zlib import crc32

from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.core.errors import PluginError
from engine.core.schedulers.block_manager import BlockManager
from engine.core.schedulers.policy import RequestView, SchedulingPolicy, Split
from engine.core.schedulers.scheduler import Scheduler
from engine.core.types import Output, Request, SamplingParams, Step, StepResult, TokenLogprobs
from engine.plugins.schedulers.fcfs import FirstComeFirstServed
from engine.plugins.schedulers.multi_step import MultiStep, MultiStepOptions
from engine.plugins.schedulers.priority import Priority

BLOCK_SIZE = 2
EOS = 0
VOCABULARY = 12


def next_token(context: Sequence[int], seed: int) -> int:
    """The token that the fake model samples after a context."""
    return crc32(repr((list(context), seed)).encode()) % VOCABULARY


def expected_output(request: Request, longest: int) -> tuple[list[int], str]:
    """Tokens and finish reason of a request run alone."""
    params = request.params
    assert params.seed is not None
    tokens: list[int] = []
    max_tokens = params.max_tokens or longest - len(request.prompt)
    stops = {*params.stop_token_ids} if params.ignore_eos else {*params.stop_token_ids, EOS}
    while True:
        tokens.append(next_token([*request.prompt, *tokens], params.seed))
        if tokens[-1] in stops and len(tokens) >= params.min_tokens:
            return tokens, "stop"
        if len(tokens) == max_tokens:
            return tokens, "length"


def sequences(step: Step) -> list[int]:
    """All sequences in the step."""
    return [*step.decodes, *(chunk.sequence for chunk in step.chunks)]


class FakeRunner:
    """Runs steps by nothing but the contract of Step."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.pool: dict[tuple[int, int], tuple[int, int, int]] = {}  # (block, offset): (seed, position, token)
        self.known: dict[int, list[int]] = {}
        self.params: dict[int, SamplingParams] = {}
        self.prompt_len: dict[int, int] = {}
        self.tables: dict[int, list[int]] = {}
        self.computed: dict[int, int] = {}
        self.numbers: set[int] = set()
        self.cached = 0  # tokens of prefills that other sequences have computed
        self.chunk_tokens = 0  # tokens computed by prefill chunks
        self.decodes: tuple[int, ...] = ()  # of the last step

    def run(self, step: Step) -> StepResult:
        for sequence in step.finished:
            for state in (self.known, self.params, self.prompt_len, self.tables):
                del state[sequence]
            self.computed.pop(sequence, None)
        for new in step.new:
            assert new.sequence not in self.numbers, "a sequence number is used again"
            self.numbers.add(new.sequence)
            self.known[new.sequence] = list(new.tokens)
            self.params[new.sequence] = new.params
            self.prompt_len[new.sequence] = new.prompt_len
            self.tables[new.sequence] = []
        for sequence, blocks in step.blocks:
            assert blocks
            self.tables[sequence] += blocks
        assert len(set(sequences(step))) == len(sequences(step))
        assert step.iterations == 1 or not step.chunks
        assert (step.decodes is self.decodes) == (step.decodes == self.decodes), "same sequences, other tuple"
        self.decodes = step.decodes

        rows = []
        scores = []
        for _ in range(step.iterations):
            rows.append([self.decode(sequence) for sequence in step.decodes])
        for chunk in step.chunks:
            sequence, known = chunk.sequence, self.known[chunk.sequence]
            assert chunk.sample == (chunk.start + chunk.count == len(known))
            self.compute(sequence, chunk.start, chunk.start + chunk.count)
            if chunk.sample:
                rows[0].append(self.sample(sequence))
            if self.params[sequence].prompt_logprobs is not None and chunk.start < self.prompt_len[sequence] - 1:
                end = min(chunk.start + chunk.count, self.prompt_len[sequence] - 1)
                targets = known[chunk.start + 1 : end + 1]
                scores.append((sequence, tuple(TokenLogprobs(token=token, logprob=0.0, rank=1) for token in targets)))
        return StepResult(
            step=step.id,
            tokens=tuple(tuple(row) for row in rows),
            logprobs=tuple(tuple(TokenLogprobs(token=token, logprob=0.0, rank=1) for token in row) for row in rows),
            prompt_logprobs=tuple(scores),
        )

    def decode(self, sequence: int) -> int:
        """Compute the token sampled last, and sample the next."""
        position = self.computed[sequence]
        assert position == len(self.known[sequence]) - 1 >= self.prompt_len[sequence]
        self.compute(sequence, position, position + 1)
        return self.sample(sequence)

    def sample(self, sequence: int) -> int:
        """Sample the token that follows the computed ones."""
        seed = self.params[sequence].seed
        assert seed is not None
        token = next_token(self.read(sequence, self.computed[sequence]), seed)
        self.known[sequence].append(token)
        return token

    def compute(self, sequence: int, start: int, end: int) -> None:
        """Write positions to the pool, in order. Other sequences must have computed those skipped, and none of these.

        The chunks of a step are computed one after the other, so that one may read what those before it have written.
        """
        done = self.computed.get(sequence, 0)
        assert start >= done, "a position is computed twice"
        self.cached += start - done
        self.read(sequence, start)
        for position in range(start, end):
            block = self.tables[sequence][position // self.block_size]
            for other, table in self.tables.items():
                assert other == sequence or block not in table or self.computed.get(other, 0) <= position, (
                    "a position that another sequence has read is written again"
                )
            seed = self.params[sequence].seed
            assert seed is not None
            self.pool[block, position % self.block_size] = (seed, position, self.known[sequence][position])
        self.computed[sequence] = end
        if sequence not in self.decodes:
            self.chunk_tokens += end - start

    def clear(self, block: int) -> None:
        """Forget the contents of a block."""
        for offset in range(self.block_size):
            self.pool.pop((block, offset), None)

    def read(self, sequence: int, end: int) -> list[int]:
        """The context in the pool. Seeds stand for salts: the context may hold no block of another seed."""
        table, seed = self.tables[sequence], self.params[sequence].seed
        cells = [self.pool.get((table[at // self.block_size], at % self.block_size)) for at in range(end)]
        wanted = [(seed, at, token) for at, token in enumerate(self.known[sequence][:end])]
        assert cells == wanted, "a block is read that holds another context, or that no step has computed yet"
        return [token for _, _, token in wanted]


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

    def decode_steps(self, running: Sequence[RequestView], waiting: Sequence[RequestView]) -> int:
        return self.random.choice([-1, 0, 1, 2, 3, 10**9])


class Faulty(Hostile):
    """Fails in every method now and then."""

    def __getattribute__(self, name: str) -> Any:
        if name in ("order", "victim", "preempts", "split", "decode_steps") and self.random.random() < 0.1:
            raise LookupError(name)
        return super().__getattribute__(name)


class SchedulerMachine(RuleBasedStateMachine):
    policy: type[SchedulingPolicy]

    def make_policy(self, seed: int) -> SchedulingPolicy:
        return self.policy(seed)

    @initialize(
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
        num_blocks: int,
        max_batch_tokens: int,
        max_running: int,
        max_len: int,
        prefix_caching: bool,
        steps_ahead: int,
        seed: int,
    ) -> None:
        self.blocks = BlockManager(num_blocks, BLOCK_SIZE, prefix_caching=prefix_caching)
        self.scheduler = Scheduler(
            self.make_policy(seed),
            self.blocks,
            max_batch_tokens=max_batch_tokens,
            max_running=max_running,
            max_len=max_len,
            eos_tokens=frozenset({EOS}),
        )
        self.max_batch_tokens = max_batch_tokens
        self.max_running = max_running
        self.longest = min(max_len, num_blocks * BLOCK_SIZE + 1)
        self.steps_ahead = steps_ahead
        self.runner = FakeRunner(BLOCK_SIZE)
        take = self.blocks._take

        def take_and_clear() -> int:  # so that nothing that a block held before can pass for its new content
            block = take()
            self.runner.clear(block)
            return block

        self.blocks._take = take_and_clear  # type: ignore[method-assign]
        self.in_flight: deque[tuple[Step, StepResult]] = deque()
        self.live: dict[str, Request] = {}
        self.outputs: dict[str, list[Output]] = {}
        self.admitted: list[int] = []  # requests in the order of their first admission
        self.now = 0.0
        self.count = 0

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
            self.count += 1
            self.live[request.id] = request
            self.outputs[request.id] = []
            self.scheduler.add(request)

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
            assert self.runner.cached == 0

    def turn(self) -> None:
        """What Engine.step does."""
        planned = self.schedule()
        if self.in_flight and not (planned and len(self.in_flight) <= self.steps_ahead):
            self.commit()

    def schedule(self) -> bool:
        self.now += 1
        while True:
            try:
                step = self.scheduler.schedule(self.now)
                break
            except PluginError:
                self.scheduler.check()
        if step is None:
            assert self.in_flight or not self.live, "no step was planned though no result is awaited"
            return False
        assert sequences(step)
        assert len(step.decodes) + sum(chunk.count for chunk in step.chunks) <= self.max_batch_tokens
        assert len(sequences(step)) <= self.max_running
        result = self.runner.run(step)
        for sequence in sequences(step):
            assert tuple(self.runner.tables[sequence]) == self.blocks.table(sequence)
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
        assert request.arrival <= last.times.scheduled <= last.times.first_token <= last.times.finished == self.now


LIMITS = settings(max_examples=100, stateful_step_count=25, deadline=None, derandomize=True, database=None)


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
