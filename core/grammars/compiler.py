"""Compiles the grammars of requests for one model: in threads, bounded in size and time, each once."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Collection
from concurrent.futures import Future, TimeoutError as FutureTimeoutError
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from attrs import define

from engine.core.errors import EngineError, InvalidRequestError, PluginError
from engine.core.grammars.base import CompiledGrammar, GrammarBackend
from engine.core.grammars.grammar import PARAMETER, Grammar
from engine.core.grammars.limits import check_limits
from engine.core.grammars.threads import CompileThreads
from engine.core.grammars.tool_schemas import compile_with_tools
from engine.core.grammars.vocabulary import grammar_vocabulary
from engine.core.plugin_host.faults import said
from engine.core.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from engine.core.config.tree import EngineConfig

log = logging.getLogger(__name__)

THREADS = 2
"""Grammars compiled at a time."""
CACHED = 128
"""Grammars, compiled or refused, that are kept for later requests."""
QUEUE_SECONDS = 60.0
"""Maximum time that a grammar waits for a thread and for the backend, seconds."""


@define(eq=False)
class _Entry:
    """A grammar that is compiled, refused, or about to be."""

    future: Future[CompiledGrammar]
    queued: float
    """When it was queued, time.monotonic()."""
    begun: float | None = None
    """When a thread began to compile it with a backend that was made before, time.monotonic()."""


class Grammars:
    """Compiles grammars with one backend, and keeps the latest. May be used from several threads.

    Costs nothing until the first grammar: then the backend is made, which reads the tokenizer.
    """

    def __init__(
        self,
        config: EngineConfig,
        backend: type[GrammarBackend[Any]] | None,
        options: Any,
        *,
        vocab_size: int,
        eos_tokens: Collection[int],
        owner: str,
    ) -> None:
        """backend: None if there is none. vocab_size: of the model's logits. owner: the plugin, as errors name it, or
        why there is none."""
        self.owner = owner
        self._settings = config.grammar
        self._model = config.model
        self._class = backend
        self._options = options
        self._vocab_size = vocab_size
        self._eos_tokens = eos_tokens
        self._backend: GrammarBackend[Any] | None = None
        self._making = threading.Lock()
        self._lock = threading.Lock()
        self._entries: OrderedDict[Grammar, _Entry] = OrderedDict()
        self._begun: list[Grammar] = []
        self._threads = CompileThreads(THREADS)

    def begin(self, grammar: Grammar) -> Future[CompiledGrammar]:
        """Compile a grammar in a thread, unless it was queued before. The future raises as `compile`."""
        return self._entry(grammar).future

    def take_begun(self) -> tuple[Grammar, ...]:
        """The latest grammars queued to be compiled since the last call, at most CACHED. The library may refuse them
        later."""
        if not self._begun:
            return ()
        with self._lock:
            begun = tuple(self._begun[-CACHED:])
            self._begun.clear()
            return begun

    def ready(self, grammar: Grammar) -> bool:
        """Whether `compile` returns or raises without waiting. Begins to compile the grammar otherwise."""
        entry = self._entry(grammar)
        return entry.future.done() or self._seconds_left(entry) <= 0

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Wait for a compiled grammar.

        Raises InvalidRequestError for a refusal, PluginError for a broken backend, ExecutorError after `close`.
        """
        entry = self._entry(grammar)
        while seconds := self._seconds_to_wait(entry):
            with suppress(FutureTimeoutError):
                entry.future.exception(seconds)
        return self._outcome(entry)

    async def acompile(self, grammar: Grammar) -> CompiledGrammar:
        """`compile` for asyncio: the event loop goes on, and no thread waits."""
        entry = self._entry(grammar)
        loop, done = asyncio.get_running_loop(), asyncio.Event()

        def wake(_: Future[CompiledGrammar]) -> None:
            with suppress(RuntimeError):  # the event loop has ended
                loop.call_soon_threadsafe(done.set)

        entry.future.add_done_callback(wake)
        while seconds := self._seconds_to_wait(entry):
            with suppress(TimeoutError):
                await asyncio.wait_for(done.wait(), seconds)
        return self._outcome(entry)

    def close(self) -> None:
        """End the threads. Grammars that have not begun to be compiled fail."""
        self._threads.close()

    def _entry(self, grammar: Grammar) -> _Entry:
        with self._lock:
            entry = self._entries.get(grammar)
            if entry is None:
                entry = self._entries[grammar] = self._queue(grammar)
                if len(self._entries) > CACHED:
                    self._forget_one()
            self._entries.move_to_end(grammar)
            return entry

    def _forget_one(self) -> None:
        """Forget the least recently used grammar that is done; one in progress would be compiled again and again."""
        done = (grammar for grammar, entry in self._entries.items() if entry.future.done())
        if (oldest := next(done, None)) is not None:
            del self._entries[oldest]

    def _queue(self, grammar: Grammar) -> _Entry:
        def compile_it() -> CompiledGrammar:
            backend = self._made()
            entry.begun = time.monotonic()
            return self._compile(backend, grammar)

        entry = _Entry(Future(), time.monotonic())
        try:
            self._check(grammar)
        except EngineError as error:
            entry.future.set_exception(error)
        else:
            entry.future = self._threads.submit(compile_it)
            self._begun = [*self._begun[-CACHED:], grammar]
        return entry

    def _check(self, grammar: Grammar) -> None:
        """Raise InvalidRequestError for a grammar that can be refused without the library."""
        if self._class is None:
            raise InvalidRequestError(f"this engine enforces no grammars: {self.owner}", PARAMETER)
        if grammar.kind not in self._class.kinds:
            raise InvalidRequestError(
                f"{self.owner} knows no grammars of the kind {grammar.kind!r}; it knows "
                f"{', '.join(sorted(self._class.kinds))}",
                PARAMETER,
            )
        check_limits(grammar, max_chars=self._settings.max_chars, max_depth=self._settings.max_depth)

    def _compile(self, backend: GrammarBackend[Any], grammar: Grammar) -> CompiledGrammar:
        try:
            return compile_with_tools(grammar, backend.compile)
        except EngineError:
            raise
        except BaseException as error:
            log.exception("%s failed in compile()", self.owner)
            raise PluginError(
                f"{self.owner} failed in compile(): {type(error).__name__}: {said(error)}; the log says where"
            ) from None

    def _made(self) -> GrammarBackend[Any]:
        """The backend, made by the first thread that needs it."""
        with self._making:
            if self._backend is None:
                assert self._class is not None
                tokenizer = Tokenizer.of_model(self._model)
                vocabulary = grammar_vocabulary(tokenizer, self._vocab_size, self._eos_tokens)
                self._backend = self._class(vocabulary, self._options)
            return self._backend

    def _seconds_to_wait(self, entry: _Entry) -> float:
        """Time until the entry should be looked at again; 0 if its grammar is done. Raises InvalidRequestError if it
        is too slow."""
        if entry.future.done():
            return 0.0
        seconds = self._seconds_left(entry)
        if seconds <= 0:
            raise self._too_slow(entry)
        return min(seconds, 1.0)

    @staticmethod
    def _outcome(entry: _Entry) -> CompiledGrammar:
        """The compiled grammar of an entry that is done, or the error."""
        error = entry.future.exception()
        if error is not None:
            raise error.with_traceback(None)  # else each request would add frames to an error that is kept
        return entry.future.result()

    def _seconds_left(self, entry: _Entry) -> float:
        """Time until a grammar counts as too slow."""
        if entry.begun is None:
            return entry.queued + QUEUE_SECONDS - time.monotonic()
        return entry.begun + self._settings.compile_timeout - time.monotonic()

    def _too_slow(self, entry: _Entry) -> InvalidRequestError:
        if entry.begun is None:
            return InvalidRequestError(
                f"the grammar has waited {QUEUE_SECONDS:g} s for other grammars, or for the grammar library to load;"
                " try again later",
                PARAMETER,
            )
        return InvalidRequestError(
            f"the grammar takes more than {self._settings.compile_timeout:g} s to compile (grammar.compile_timeout); "
            "use a simpler one",
            PARAMETER,
        )
