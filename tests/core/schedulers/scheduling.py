"""A scheduler with a simple policy, and functions that run it step by step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from engine.core.schedulers.block_manager import BlockManager
from engine.core.schedulers.policy import RequestView, SchedulingPolicy
from engine.core.schedulers.scheduler import Scheduler
from engine.core.types import CacheInfo, Output, Request, SamplingParams, Step, StepResult

BLOCK_SIZE = 4
EOS = 2


class Policy(SchedulingPolicy):
    """Admits in order of arrival and preempts the last admitted; a test overrides the methods it is about."""

    api = "1"

    def order(self, waiting: Sequence[RequestView], now: float) -> Sequence[RequestView]:
        return waiting

    def victim(self, running: Sequence[RequestView]) -> RequestView:
        return running[-1]


def policy(**answers: Callable[..., Any]) -> Policy:
    """A Policy with some methods replaced."""
    made = type("Changed", (Policy,), {name: staticmethod(answer) for name, answer in answers.items()})()
    assert isinstance(made, Policy)
    return made


def make_scheduler(
    chosen: SchedulingPolicy | None = None, *, num_blocks: int = 100, prefix_caching: bool = True, **limits: Any
) -> Scheduler:
    return Scheduler(
        chosen or Policy(),
        BlockManager(num_blocks, BLOCK_SIZE, prefix_caching=prefix_caching),
        eos_tokens=frozenset({EOS}),
        **{"max_batch_tokens": 64, "max_running": 8, "max_len": 1000, **limits},
    )


def cache_info(*, num_blocks: int, block_size: int, **fields: Any) -> CacheInfo:
    """A KV cache of nothing but blocks and states."""
    return CacheInfo(
        num_blocks=num_blocks,
        block_size=block_size,
        weights_bytes=0,
        activation_bytes=0,
        kv_bytes=0,
        budget_bytes=0,
        device="",
        dtype="",
        **fields,
    )


def request(name: str, prompt: int | Sequence[int] = 3, **fields: Any) -> Request:
    """A request with these prompt tokens, or this many unique ones. fields: of Request or of SamplingParams."""
    tokens = tuple(hash_tokens(name, prompt)) if isinstance(prompt, int) else tuple(prompt)
    own = {key: fields.pop(key) for key in ("priority", "arrival", "salt", "prediction") if key in fields}
    return Request(id=name, prompt=tokens, params=SamplingParams(**fields), **own)


def hash_tokens(name: str, length: int) -> list[int]:
    return [1000 * ord(name[0]) + position for position in range(length)]


def plan(scheduler: Scheduler, now: float = 0.0) -> Step:
    step = scheduler.schedule(now)
    assert step is not None
    scheduler.check()
    return step


def commit(scheduler: Scheduler, step: Step, *tokens: int | tuple[int, ...], now: float = 0.0) -> list[Output]:
    """Commit with these tokens: one, or one per iteration, per sequence that samples; by default 7 for each."""
    sampling = len(step.decodes) + sum(chunk.sample for chunk in step.chunks)
    columns = [
        column if isinstance(column, tuple) else (column,) * step.iterations for column in tokens or [7] * sampling
    ]
    result = StepResult(step=step.id, tokens=tuple(zip(*columns, strict=True)) if columns else ((),))
    outputs = scheduler.commit(step, result, now)
    scheduler.check()
    return outputs


def turn(scheduler: Scheduler, *tokens: int) -> list[Output]:
    return commit(scheduler, plan(scheduler), *tokens)


def finish(scheduler: Scheduler, max_steps: int = 500) -> list[Output]:
    """Run steps until all requests have finished."""
    outputs: list[Output] = []
    for _ in range(max_steps):
        if not scheduler.has_work:
            return outputs
        outputs += turn(scheduler)
    raise AssertionError(f"requests are left after {max_steps} steps")


def views(scheduler: Scheduler) -> tuple[RequestView, ...]:
    """The running requests, as a policy sees them."""
    return scheduler._queues.running_views


def work(step: Step) -> list[int | tuple[int, int, int, bool]]:
    """The sequences that decode, followed by the chunks as tuples."""
    return [*step.decodes, *((chunk.sequence, chunk.start, chunk.count, chunk.sample) for chunk in step.chunks)]


def crowded(chosen: SchedulingPolicy | None = None) -> Scheduler:
    """A scheduler with 5 blocks and two decoding sequences of 8 tokens each, which fill 4 of the blocks."""
    scheduler = make_scheduler(chosen, num_blocks=5, max_len=20)
    for name in "ab":
        scheduler.add(request(name, 7, max_tokens=10))
    turn(scheduler)
    turn(scheduler)
    assert scheduler.stats().blocks_used == 4
    return scheduler
