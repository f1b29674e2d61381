"""Conformance suite for scheduling policies: valid answers, and a random workload that must complete."""

from __future__ import annotations

import random
from typing import Any, ClassVar

import pytest
from attrs import frozen

from engine.core.errors import InvalidRequestError
from engine.core.schedulers import BlockManager, Scheduler, SchedulingPolicy, Split
from engine.core.types import Request, SamplingParams, Step, StepResult


@frozen(kw_only=True)
class View:
    """A request as a policy sees it."""

    id: str
    priority: int = 0
    tenant: str | None = None
    arrival: float = 0.0
    prompt_tokens: int = 1
    computed_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0


class PolicyConformance:
    """Derive a class named Test... from this class and set `policy`."""

    policy: ClassVar[type[SchedulingPolicy[Any]]]
    options: ClassVar[Any] = None
    """Options passed to the policy; None: the defaults of its options_class."""

    def make(self) -> SchedulingPolicy[Any]:
        """A fresh policy."""
        options = self.options
        if options is None and self.policy.options_class is not None:
            options = self.policy.options_class()
        return self.policy(options)

    @pytest.mark.parametrize("seed", range(5))
    def test_order(self, seed: int) -> None:
        """order() returns only waiting requests, each once, the same on each call, and changes nothing."""
        waiting = self.views(seed)
        order = list(self.make().order(tuple(waiting), 100.0))
        assert len({view.id for view in order}) == len(order), "order() names a request twice"
        assert all(any(view is one for one in waiting) for view in order), "order() names a request that is not waiting"
        assert list(self.make().order(tuple(waiting), 100.0)) == order, "order() differs from call to call"
        assert waiting == self.views(seed), "order() changed a request"
        assert list(self.make().order((), 100.0)) == []

    @pytest.mark.parametrize("seed", range(5))
    def test_victim(self, seed: int) -> None:
        """victim() returns a running request, the same on each call."""
        running = self.views(seed)
        victim = self.make().victim(tuple(running))
        assert any(victim is one for one in running), "victim() names a request that is not running"
        assert self.make().victim(tuple(running)) is victim, "victim() differs from call to call"
        assert self.make().victim((running[0],)) is running[0]

    @pytest.mark.parametrize("seed", range(5))
    def test_preempts(self, seed: int) -> None:
        """preempts() returns None or a running request, and never lets two requests preempt each other forever."""
        candidate, *running = self.views(seed)
        policy = self.make()
        victim = policy.preempts(candidate, tuple(running))
        if victim is None:
            return
        assert any(victim is one for one in running), "preempts() names a request that is not running"
        assert policy.preempts(victim, (candidate,)) is None, "two requests would preempt each other forever"

    @pytest.mark.parametrize("seed", range(5))
    def test_split_and_decode_steps(self, seed: int) -> None:
        """split() returns shares and decode_steps() a number, both valid."""
        views = self.views(seed)
        running, waiting = tuple(views[:3]), tuple(views[3:])
        split = self.make().split(64, waiting, running)
        assert isinstance(split, Split)
        assert isinstance(split.decode, int) and split.decode >= 0, f"decode share {split.decode!r}"  # noqa: PT018
        assert isinstance(split.prefill, int) and split.prefill >= 0, f"prefill share {split.prefill!r}"  # noqa: PT018
        steps = self.make().decode_steps(running, waiting)
        assert isinstance(steps, int) and steps >= 1, f"decode_steps() returned {steps!r}"  # noqa: PT018

    @pytest.mark.parametrize("seed", range(5))
    def test_prefill_limit(self, seed: int) -> None:
        """prefill_limit() returns a whole number, the same on each call."""
        request, *others = self.views(seed)
        limit = self.make().prefill_limit(request, 64, tuple(others))
        assert isinstance(limit, int), f"prefill_limit() returned {limit!r}"
        assert self.make().prefill_limit(request, 64, tuple(others)) == limit, (
            "prefill_limit() differs from call to call"
        )

    @pytest.mark.parametrize("num_blocks", [4, 12, 64])
    @pytest.mark.parametrize("seed", range(4))
    def test_every_request_finishes(self, seed: int, num_blocks: int) -> None:
        """The real scheduler, short of blocks, completes a random workload and stays within its budgets."""
        pick = random.Random(seed)
        blocks = BlockManager(num_blocks, 4)
        scheduler = Scheduler(
            self.make(), blocks, max_batch_tokens=16, max_running=5, max_len=64, eos_tokens=frozenset({0})
        )
        arrivals = [self.request(pick, number) for number in range(24)]
        wanted: set[str] = set()
        finished: set[str] = set()
        for now in range(5000):
            for request in arrivals[: pick.randint(0, 3)]:
                arrivals.remove(request)
                try:
                    scheduler.add(request)
                    wanted.add(request.id)
                except InvalidRequestError:
                    continue  # the request would never fit into this few blocks
            if wanted - finished and pick.random() < 0.05:
                name = pick.choice(sorted(wanted - finished))
                assert scheduler.abort(name) is not None
                finished.add(name)
            step = scheduler.schedule(float(now))
            if step is None:
                if not arrivals and not scheduler.has_work:
                    break
                assert not scheduler.has_work, f"no step is planned, but {sorted(wanted - finished)} wait"
                continue
            num_tokens = len(step.decodes) + sum(chunk.count for chunk in step.chunks)
            assert num_tokens <= 16, "more tokens than the budget"
            assert len(step.decodes) + len(step.chunks) <= 5, "more sequences than max_running"
            for output in scheduler.commit(step, self.result(pick, step), float(now)):
                if output.finish_reason is not None:
                    finished.add(output.request)
            scheduler.check()
        assert finished == wanted, f"never finished: {sorted(wanted - finished)}"
        faults = scheduler.stats().policy_faults
        assert not faults, f"the policy failed in {faults} decisions, which were made without it; the log says how"
        assert scheduler.stats().blocks_used == 0, "blocks are in use but no request runs"

    def views(self, seed: int) -> list[View]:
        """Six requests in order of arrival."""
        pick = random.Random(seed)
        return [
            View(
                id=f"r{number}",
                priority=pick.randint(0, 2),
                tenant=(None, "a", "b")[number % 3],
                arrival=float(number),
                prompt_tokens=pick.randint(1, 100),
                computed_tokens=pick.randint(0, 50),
                output_tokens=pick.randint(0, 50),
                preemptions=pick.randint(0, 2),
            )
            for number in range(6)
        ]

    def request(self, pick: random.Random, number: int) -> Request:
        """A request with a random prompt and max_tokens."""
        return Request(
            id=f"r{number}",
            prompt=tuple(pick.choices(range(1, 4), k=pick.randint(1, 24))),
            params=SamplingParams(max_tokens=pick.randint(1, 16), seed=number),
            priority=pick.randint(0, 2),
            arrival=float(number),
        )

    def result(self, pick: random.Random, step: Step) -> StepResult:
        """A result of random tokens for a step; token 0 ends a request."""
        columns = len(step.decodes) + sum(chunk.sample for chunk in step.chunks)
        tokens = tuple(tuple(pick.choices(range(12), k=columns)) for _ in range(step.iterations))
        return StepResult(step=step.id, tokens=tokens)
