"""Generation on top of Engine.step: of a list of prompts, or as one stream. async_generation.py has asyncio streams."""

from __future__ import annotations

import signal
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from attrs import define, field, frozen

from engine.core.errors import ExecutorError, InvalidRequestError
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
    error: str | None = None
    """A sentence, if finish_reason is "error": why the text ends early."""


@define
class _Collector:
    """Collects a request's outputs for its Completion. The cost per token does not depend on the length of the text."""

    request: Request
    _texts: list[str] = field(factory=list)
    _tokens: list[int] = field(factory=list)
    _logprobs: list[TokenLogprobs] = field(factory=list)
    _prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    _cached_tokens: int = 0
    completion: Completion | None = None
    """None until the request has finished."""

    def add(self, output: Output, delta: TextDelta) -> None:
        self._texts.append(delta.text)
        self._tokens += delta.tokens
        self._logprobs += delta.logprobs
        if delta.prompt_logprobs is not None:
            self._prompt_logprobs = delta.prompt_logprobs
        self._cached_tokens = max(self._cached_tokens, output.cached_tokens)
        if delta.finish_reason is not None:
            self.completion = Completion(
                text="".join(self._texts),
                token_ids=tuple(self._tokens),
                finish_reason=delta.finish_reason,
                prompt_tokens=len(self.request.prompt),
                cached_tokens=self._cached_tokens,
                logprobs=tuple(self._logprobs) if self.request.params.logprobs is not None else None,
                prompt_logprobs=self._prompt_logprobs,
                error=output.error,
            )


def make_request(engine: Engine, prompt: Sequence[int], params: SamplingParams | None, priority: int = 0) -> Request:
    """Make a request with a new, unique ID."""
    return Request(
        id=uuid.uuid4().hex,
        prompt=tuple(prompt),
        params=params or engine.default_params,
        priority=priority,
        arrival=time.monotonic(),
    )


def add_request(engine: Engine, request: Request) -> Detokenizer:
    """Add a request to the engine. Raises what Engine.add raises."""
    engine.add(request)
    return Detokenizer(engine.tokenizer, request.prompt, request.params)


def _check_idle(engine: Engine) -> None:
    if engine.has_work and engine.check().ok:
        raise InvalidRequestError(
            "the engine has other requests in progress, whose tokens would be lost; "
            "finish them first, or use astream for all"
        )


@contextmanager
def _ctrl_c_deferred() -> Iterator[None]:
    """Raise a Ctrl-C pressed meanwhile only afterwards: within a step it would fail the engine.

    A second Ctrl-C is raised immediately.
    """
    handler = signal.getsignal(signal.SIGINT)
    if handler is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield
        return
    pressed = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if pressed:
        raise KeyboardInterrupt


def advance(engine: Engine, running: dict[str, Detokenizer]) -> Iterator[tuple[str, Output, TextDelta]]:
    """Run one step; yield the outputs of `running`, by request ID, and their text.

    Removes finished requests from `running`, and aborts requests whose text ended at a stop string.
    """
    with _ctrl_c_deferred():
        outputs = engine.step()
    for output in outputs:
        name = output.request
        detokenizer = running.get(name)
        if detokenizer is None:
            continue
        delta = detokenizer.feed(output)
        if delta.finish_reason is not None:
            del running[name]
            if output.finish_reason is None:
                engine.abort(name)
        yield name, output, delta


def request_error(output: Output) -> ExecutorError | None:
    """The error with which a request ended, to be raised in its stream; None if it did not end with one."""
    if output.finish_reason != FINISH_ERROR:
        return None
    return ExecutorError(output.error or f"request {output.request} failed")


def generate(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    *,
    priority: int,
    progress: bool,
) -> list[Completion]:
    """Implements Engine.generate, for prompts of token ids. If one prompt is invalid, no prompt is run."""
    _check_idle(engine)
    running: dict[str, Detokenizer] = {}
    collectors: dict[str, _Collector] = {}
    with _Bar(len(prompts), shown=progress) as bar:
        try:
            for prompt, one in zip(prompts, params, strict=True):
                request = make_request(engine, prompt, one, priority)
                collectors[request.id] = _Collector(request)
                running[request.id] = add_request(engine, request)
            while running:
                for name, output, delta in advance(engine, running):
                    collectors[name].add(output, delta)
                    bar.tokens(len(delta.tokens))
                    if delta.finish_reason is not None:
                        bar.finished()
        finally:
            abort_all(engine, collectors)
    return [one.completion for one in collectors.values() if one.completion is not None]


def stream(engine: Engine, prompt: Sequence[int], params: SamplingParams | None) -> Iterator[TextDelta]:
    """Implements Engine.stream."""
    _check_idle(engine)
    request = make_request(engine, prompt, params)
    running = {request.id: add_request(engine, request)}
    try:
        while running:
            for _, output, delta in advance(engine, running):
                if (error := request_error(output)) is not None:
                    raise error
                yield delta
    finally:
        abort_all(engine, [request.id])


def abort_all(engine: Engine, requests: Iterable[str]) -> None:
    """Abort these requests, and commit the step that may still be in flight, so that the engine is idle."""
    with _ctrl_c_deferred():
        for name in requests:
            engine.abort(name)
        while engine.has_work and engine.check().ok:
            engine.step()


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
