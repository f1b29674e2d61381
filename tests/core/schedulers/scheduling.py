"""A scheduler with a plain policy, and what drives it step by step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from engine.core.schedulers.block_manager import BlockManager
from engine.core.schedulers.policy import RequestView, SchedulingPolicy
from engine.core.schedulers.scheduler import Scheduler
from engine.core.types import Output, Request, SamplingParams, Step, StepResult

PAGE = 4
EOS = 2


class Policy(SchedulingPolicy):
    """In order of arrival, last admitted first to go; a test replaces what it is about."""

    api = "1"

    def order(self, waiting: Sequence[RequestView], now: float) -> Sequence[RequestView]:
        return waiting

    def victim(self, running: Sequence[RequestView]) -> RequestView:
        return running[-1]


def policy(**answers: Callable[..., Any]) -> Policy:
    """A Policy with other answers."""
    made = type("Changed", (Policy,), {name: staticmethod(answer) for name, answer in answers.items()})()
    assert isinstance(made, Policy)
    return made


def make_scheduler(
    chosen: SchedulingPolicy | None = None, *, num_blocks: int = 100, prefix_caching: bool = True, **limits: int
) -> Scheduler:
    return Scheduler(
        chosen or Policy(),
        BlockManager(num_blocks, PAGE, prefix_caching=prefix_caching),
        eos_tokens=frozenset({EOS}),
        **{"max_batch_tokens": 64, "max_running": 8, "max_len": 1000, **limits},
    )


def request(name: str, prompt: int | Sequence[int] = 3, **fields: Any) -> Request:
    """A request with a prompt of its own of that length, or with these tokens; fields of params may be given too."""
    tokens = tuple(hash_tokens(name, prompt)) if isinstance(prompt, int) else tuple(prompt)
    own = {key: fields.pop(key) for key in ("priority", "arrival", "salt") if key in fields}
    return Request(id=name, prompt=tokens, params=SamplingParams(**fields), **own)


def hash_tokens(name: str, length: int) -> list[int]:
    return [1000 * ord(name[0]) + position for position in range(length)]


def plan(scheduler: Scheduler, now: float = 0.0) -> Step:
    step = scheduler.schedule(now)
    assert step is not None
    scheduler.check()
    return step


def commit(scheduler: Scheduler, step: Step, *tokens: int | tuple[int, ...], now: float = 0.0) -> list[Output]:
    """Commit with these tokens, one (or one an iteration) a sequence that samples; without any, 7 for each."""
    sampling = len(step.decodes) + sum(piece.sample for piece in step.chunks)
    columns = [
        column if isinstance(column, tuple) else (column,) * step.iterations for column in tokens or [7] * sampling
    ]
    result = StepResult(step=step.id, tokens=tuple(zip(*columns, strict=True)) if columns else ((),))
    outputs = scheduler.commit(step, result, now)
    scheduler.check()
    return outputs


def turn(scheduler: Scheduler, *tokens: int) -> list[Output]:
    return commit(scheduler, plan(scheduler), *tokens)


def finish(scheduler: Scheduler, most: int = 500) -> list[Output]:
    """Run until nothing is left."""
    outputs: list[Output] = []
    for _ in range(most):
        if not scheduler.has_work:
            return outputs
        outputs += turn(scheduler)
    raise AssertionError("no end")


def views(scheduler: Scheduler) -> tuple[RequestView, ...]:
    """What a policy sees of the running requests."""
    return scheduler._queues.running_views


def work(step: Step) -> list[int | tuple[int, int, int, bool]]:
    """The sequences that decode, then the chunks."""
    return [*step.decodes, *((piece.sequence, piece.start, piece.count, piece.sample) for piece in step.chunks)]


def crowded(chosen: SchedulingPolicy | None = None) -> Scheduler:
    """Two sequences of 8 tokens each, in their decode phase, which fill all 5 blocks but one."""
    scheduler = make_scheduler(chosen, num_blocks=5, max_len=20)
    for name in "ab":
        scheduler.add(request(name, 7, max_tokens=10))
    turn(scheduler)
    turn(scheduler)
    assert scheduler.stats().blocks_used == 4
    return scheduler
