"""Loads: requests of random tokens with given lengths, and their run on an engine."""

from __future__ import annotations

import gc
import random
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from attrs import frozen

from engine.core.errors import ConfigError

if TYPE_CHECKING:
    from engine.core.config import EngineConfig
    from engine.core.engine import Engine
    from engine.core.executors import Executor
    from engine.core.schedulers import SchedulingPolicy
    from engine.core.types import EngineStats, Request

TOKENS = (10, 100_000)
"""Token ids of prompts, as far as the vocabulary has them; the lowest ids are often special tokens."""


@frozen(kw_only=True)
class Load:
    """Requests of random tokens, as (prompt tokens, output tokens) each."""

    name: str
    """The load, as tables show it: "1000 requests, 512 in / 256 out"."""
    lengths: tuple[tuple[int, int], ...]
    seed: int = 0

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens of all requests."""
        return sum(inputs for inputs, _ in self.lengths)

    @property
    def output_tokens(self) -> int:
        """Output tokens of all requests."""
        return sum(outputs for _, outputs in self.lengths)

    def prompts(self, vocab_size: int, prefix: str = "") -> list[tuple[int, ...]]:
        """Random prompts; each prefix draws other tokens, so that no run hits the prefix cache of an earlier run."""
        draw = random.Random(f"{self.seed} {prefix}")
        return [random_tokens(draw, inputs, vocab_size) for inputs, _ in self.lengths]

    def requests(
        self, vocab_size: int, prefix: str = "", *, prompts: list[tuple[int, ...]] | None = None
    ) -> Iterator[Request]:
        """Greedy requests that ignore end-of-sequence tokens, so that every run does the same work.

        prefix: begins the requests' ids, and seeds their tokens unless `prompts` gives these.
        """
        from engine.core.types import Request, SamplingParams

        drawn = prompts or self.prompts(vocab_size, prefix)
        for number, (prompt, (_, outputs)) in enumerate(zip(drawn, self.lengths, strict=True)):
            yield Request(
                id=f"{prefix}{number}",
                prompt=prompt,
                params=SamplingParams(temperature=0.0, max_tokens=outputs, ignore_eos=True),
                arrival=time.monotonic(),
            )


WARM_UP = Load(name="warm-up", lengths=((64, 8),) * 8)


@frozen(kw_only=True)
class Measured:
    """One run of a load."""

    seconds: float
    prompt_tokens: int
    output_tokens: int
    steps: int
    phases: Mapping[str, float]
    """Phase -> seconds; the phases of the runner are part of submit or wait."""


def random_tokens(draw: random.Random, count: int, vocab_size: int) -> tuple[int, ...]:
    """A random prompt."""
    low, high = TOKENS
    high = min(high, vocab_size)
    return tuple(draw.randrange(min(low, high - 1), high) for _ in range(count))


def parse_range(text: str, flag: str) -> tuple[int, int]:
    """Parse "512" or "100-1024" as (low, high). Raises ConfigError naming the flag."""
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    if match is None:
        raise ConfigError(f"{flag} {text!r} is not a length; give a number of tokens, or a range as 100-1024")
    bounds = int(match[1]), int(match[2] or match[1])
    if not 1 <= bounds[0] <= bounds[1]:
        raise ConfigError(f"{flag} {text!r} is an empty range")
    return bounds


def parse_counts(text: str, flag: str) -> tuple[int, ...]:
    """Parse "1,8,32" as positive integers, each once and in this order. Raises ConfigError naming the flag."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and int(part) for part in parts):
        raise ConfigError(f"{flag} {text!r} is not a list of positive integers; give one, or several as 1,8,32")
    return tuple(dict.fromkeys(map(int, parts)))


def check_batch(engine: Engine, batch: int) -> None:
    """Raise ConfigError if this many sequences cannot run at the same time."""
    limit = engine.config.scheduler.max_running
    if batch > limit:
        raise ConfigError(f"a batch of {batch} cannot run: at most {limit} sequences can; raise --max-running")


def make_load(count: int, inputs: tuple[int, int], outputs: tuple[int, int], seed: int = 0) -> Load:
    """`count` requests with lengths drawn uniformly from the ranges, all prompt lengths first."""
    draw = random.Random(seed)
    prompts = [draw.randint(*inputs) for _ in range(count)]
    name = f"{count} request{'s'[: count != 1]}, {_range(inputs)} in / {_range(outputs)} out"
    return Load(name=name, lengths=tuple((prompt, draw.randint(*outputs)) for prompt in prompts), seed=seed)


def run_load(engine: Engine, load: Load, *, prefix: str = "", prompts: list[tuple[int, ...]] | None = None) -> Measured:
    """Add all requests to the engine, then step until the last token. prefix, prompts: as for `Load.requests`."""
    prompts = prompts or load.prompts(engine.vocab_size, prefix)
    before = engine.stats()
    begin = time.perf_counter()
    for request in load.requests(engine.vocab_size, prefix, prompts=prompts):
        engine.add(request)
    while engine.has_work:
        engine.step()
    seconds = time.perf_counter() - begin
    return _difference(before, engine.stats(), seconds)


def abandon(engine: Engine, request_ids: Iterable[str]) -> None:
    """Abort requests, and commit the steps in flight. There must be no other requests."""
    for request_id in request_ids:
        engine.abort(request_id)
    while engine.has_work:
        engine.step()


def warm_up(engine: Engine) -> None:
    """A few short requests that fit the context of the engine."""
    room = max(engine.max_len // 2, 1)
    lengths = tuple((min(inputs, room), min(outputs, room)) for inputs, outputs in WARM_UP.lengths)
    run_load(engine, Load(name=WARM_UP.name, lengths=lengths), prefix="warm-up-")


@contextmanager
def opened(
    config: EngineConfig, policy: SchedulingPolicy[Any] | None = None, executor: type[Executor] | None = None
) -> Iterator[Engine]:
    """A warm engine. As in a server, the garbage collector skips the objects of the start-up.

    policy, executor: in place of those that `config` names.
    """
    from engine.core.engine import Engine

    with Engine(config=config, scheduler=policy, executor=executor) as engine:
        gc.collect()
        gc.freeze()
        try:
            warm_up(engine)
            yield engine
        finally:
            gc.unfreeze()


def say(text: str) -> None:
    """Print progress on stderr, as plain lines: a progress bar would disturb the measurement."""
    print(text, file=sys.stderr, flush=True)


def _range(bounds: tuple[int, int]) -> str:
    return str(bounds[0]) if bounds[0] == bounds[1] else f"{bounds[0]}-{bounds[1]}"


def _difference(before: EngineStats, after: EngineStats, seconds: float) -> Measured:
    past = dict(before.seconds)
    return Measured(
        seconds=seconds,
        prompt_tokens=after.prompt_tokens - before.prompt_tokens,
        output_tokens=after.generation_tokens - before.generation_tokens,
        steps=after.steps - before.steps,
        phases={phase: spent - past.get(phase, 0.0) for phase, spent in after.seconds},
    )
