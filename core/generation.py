"""Generation on top of Engine.step: of a list of prompts, as one stream, or as many asyncio streams."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import TYPE_CHECKING

from attrs import define, frozen

from engine.core.errors import EngineError, ExecutorError, InvalidRequestError
from engine.core.text.detokenizer import Detokenizer, TextDelta
from engine.core.types import FINISH_ERROR, FinishReason, Output, Request, SamplingParams, TokenLogprobs

if TYPE_CHECKING:
    from engine.core.engine import Engine


@frozen(kw_only=True)
class Completion:
    """The text generated from one prompt."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens whose keys and values came from the prefix cache."""
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None


@define
class _Running:
    """A request in progress, and its text so far."""

    request: Request
    detokenizer: Detokenizer
    text: str = ""
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    cached_tokens: int = 0

    def feed(self, output: Output) -> TextDelta:
        delta = self.detokenizer.feed(output)
        self.text += delta.text
        self.tokens += delta.tokens
        self.logprobs += output.logprobs[: len(delta.tokens)]
        self.prompt_logprobs = output.prompt_logprobs or self.prompt_logprobs
        self.cached_tokens = max(self.cached_tokens, output.cached_tokens)
        return delta

    def completion(self, finish_reason: FinishReason) -> Completion:
        return Completion(
            text=self.text,
            token_ids=self.tokens,
            finish_reason=finish_reason,
            prompt_tokens=len(self.request.prompt),
            cached_tokens=self.cached_tokens,
            logprobs=self.logprobs if self.request.params.logprobs is not None else None,
            prompt_logprobs=self.prompt_logprobs,
        )


def _add_request(engine: Engine, prompt: Sequence[int], params: SamplingParams | None, priority: int = 0) -> _Running:
    request = Request(
        id=uuid.uuid4().hex,
        prompt=tuple(prompt),
        params=params or engine.default_params,
        priority=priority,
        arrival=time.monotonic(),
    )
    engine.add(request)
    return _Running(request, Detokenizer(engine.tokenizer, request.prompt, request.params))


def _check_idle(engine: Engine) -> None:
    if engine.has_work:
        raise InvalidRequestError(
            "the engine has other requests in progress, whose tokens would be lost; "
            "finish them first, or use astream for all"
        )


def _advance(engine: Engine, running: dict[str, _Running]) -> Iterator[tuple[_Running, TextDelta]]:
    """Run one step and yield what is new for each of `running`. Abort requests whose text ended at a stop string."""
    for output in engine.step():
        entry = running.get(output.request)
        if entry is None:
            continue
        if output.finish_reason == FINISH_ERROR:
            raise ExecutorError(output.error or f"request {output.request} failed")
        delta = entry.feed(output)
        if delta.finish_reason is not None:
            del running[output.request]
            if output.finish_reason is None:
                engine.abort(output.request)
        yield entry, delta


def generate(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    *,
    priority: int,
    progress: bool,
) -> list[Completion]:
    """Implements Engine.generate, of prompts as tokens. If one prompt is invalid, no prompt is run."""
    _check_idle(engine)
    entries: list[_Running] = []
    completions: dict[str, Completion] = {}
    with _Bar(len(prompts), shown=progress) as bar:
        try:
            for prompt, one in zip(prompts, params, strict=True):
                entries.append(_add_request(engine, prompt, one, priority))
            running = {entry.request.id: entry for entry in entries}
            while running:
                for entry, delta in _advance(engine, running):
                    bar.tokens(len(delta.tokens))
                    if delta.finish_reason is not None:
                        completions[entry.request.id] = entry.completion(delta.finish_reason)
                        bar.finished()
        finally:
            for entry in entries:
                engine.abort(entry.request.id)
            _drain(engine)
    return [completions[entry.request.id] for entry in entries]


def stream(engine: Engine, prompt: Sequence[int], params: SamplingParams | None) -> Iterator[TextDelta]:
    """Implements Engine.stream."""
    _check_idle(engine)
    entry = _add_request(engine, prompt, params)
    running = {entry.request.id: entry}
    try:
        while running:
            for _, delta in _advance(engine, running):
                yield delta
    finally:
        engine.abort(entry.request.id)
        _drain(engine)


def _drain(engine: Engine) -> None:
    """Commit the step that may still be in flight, so that the engine is idle."""
    while engine.has_work and engine.check().ok:
        engine.step()


class AsyncGenerator:
    """Concurrent streams over one engine. While any is open, a task runs steps in a thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._running: dict[str, _Running] = {}
        self._queues: dict[str, asyncio.Queue[TextDelta | EngineError]] = {}
        self._aborted: list[str] = []
        self._between_steps = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    async def stream(self, prompt: Sequence[int], params: SamplingParams | None) -> AsyncIterator[TextDelta]:
        """Implements Engine.astream."""
        async with self._between_steps:
            entry = _add_request(self._engine, prompt, params)
        name = entry.request.id
        queue: asyncio.Queue[TextDelta | EngineError] = asyncio.Queue()
        self._running[name], self._queues[name] = entry, queue
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run_steps())
        try:
            while True:
                delta = await queue.get()
                if isinstance(delta, EngineError):
                    raise delta
                yield delta
                if delta.finish_reason is not None:
                    return
        finally:
            del self._queues[name]
            if self._running.pop(name, None) is not None:
                self._aborted.append(name)

    async def _run_steps(self) -> None:
        while self._engine.has_work:
            async with self._between_steps:
                while self._aborted:
                    self._engine.abort(self._aborted.pop())
                try:
                    deltas = await asyncio.to_thread(lambda: list(_advance(self._engine, self._running)))
                except EngineError as error:
                    for queue in self._queues.values():
                        queue.put_nowait(error)
                    return
            for entry, delta in deltas:
                if entry.request.id in self._queues:
                    self._queues[entry.request.id].put_nowait(delta)
            await asyncio.sleep(0)


class _Bar:
    """A progress bar on stderr, if shown."""

    def __init__(self, total: int, *, shown: bool) -> None:
        self._progress = None
        if shown:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

            self._progress = Progress(
                TextColumn("prompts"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[rate]:,.0f} tokens/s"),
                TimeElapsedColumn(),
                console=Console(stderr=True),
            )
            self._task = self._progress.add_task("", total=total, rate=0.0)
        self._count = 0
        self._begin = time.perf_counter()

    def tokens(self, count: int) -> None:
        self._count += count
        if self._progress is not None:
            self._progress.update(self._task, rate=self._count / max(time.perf_counter() - self._begin, 1e-9))

    def finished(self) -> None:
        if self._progress is not None:
            self._progress.advance(self._task)

    def __enter__(self) -> _Bar:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()
