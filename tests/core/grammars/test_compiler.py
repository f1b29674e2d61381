"""Grammars are compiled in a few threads, once each, and what goes wrong reaches the request alone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.core.config.tree import EngineConfig, GrammarConfig, ModelConfig
from engine.core.errors import ExecutorError, InvalidRequestError, PluginError
from engine.core.grammars import compiler
from engine.core.grammars.base import CompiledGrammar, GrammarBackend, GrammarMatcher, GrammarVocabulary
from engine.core.grammars.compiler import Grammars
from engine.core.grammars.grammar import Grammar
from engine.core.text.tokenizer import Tokenizer


class UnreadableError(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


class Nothing(CompiledGrammar):
    def matcher(self) -> GrammarMatcher:
        raise NotImplementedError


class Backend(GrammarBackend[None]):
    """Compiles `hold` when let go, refuses `no`, and breaks on `bug`, `exit` and `unreadable`."""

    api = "1"
    kinds = frozenset({"regex"})

    def __init__(self, vocabulary: GrammarVocabulary, options: None) -> None:
        self.vocabulary = vocabulary
        self.compiled: list[str] = []
        self.threads: set[threading.Thread] = set()
        self.begun = threading.Semaphore(0)
        self.let_go = threading.Event()
        made.append(self)

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        self.compiled.append(grammar.source)
        self.threads.add(threading.current_thread())
        if grammar.source == "no":
            raise InvalidRequestError("not this one", "grammar")
        if grammar.source == "bug":
            raise KeyError("tide")
        if grammar.source == "unreadable":
            raise UnreadableError
        if grammar.source == "exit":
            raise SystemExit(3)
        if grammar.source.startswith("hold"):
            self.begun.release()
            self.let_go.wait()
        return Nothing()


made: list[Backend] = []
Make = Callable[..., Grammars]
Compile = Callable[[Grammars, Grammar], CompiledGrammar]


def in_event_loop(grammars: Grammars, grammar: Grammar) -> CompiledGrammar:
    return asyncio.run(grammars.acompile(grammar))


both = pytest.mark.parametrize("compile_it", [Grammars.compile, in_event_loop], ids=["compile", "acompile"])


@pytest.fixture
def make(engine_checkpoint: Path) -> Iterator[Make]:
    """Makes Grammars over the tiny checkpoint; ended after the test."""
    made.clear()
    all_made: list[Grammars] = []

    def grammars(*, eos: frozenset[int] = frozenset({509}), backend: Any = Backend, **settings: Any) -> Grammars:
        config = EngineConfig(model=ModelConfig(path=str(engine_checkpoint)), grammar=GrammarConfig(**settings))
        one = Grammars(config, backend, None, vocab_size=520, eos_tokens=eos, owner="grammar 'mine'")
        all_made.append(one)
        return one

    yield grammars
    for backend in made:
        backend.let_go.set()
    for one in all_made:
        one.close()


def test_a_grammar_is_compiled_once_with_the_models_vocabulary(make: Make) -> None:
    grammars = make()
    assert not made
    assert grammars.compile(Grammar.regex("a")) is grammars.compile(Grammar.regex("a"))
    assert grammars.ready(Grammar.regex("a"))
    [backend] = made
    assert backend.compiled == ["a"]
    vocabulary = backend.vocabulary
    assert len(vocabulary.tokens) == 520
    assert vocabulary.tokens[ord("a")] != b""
    assert vocabulary.tokens[512:] == (b"",) * 8
    assert vocabulary.eos_tokens == {509}
    assert vocabulary.special_tokens == {509, 510, 511}
    assert b"".join(vocabulary.tokens[token] for token in vocabulary.encode("these")) == b"these"


def test_grammars_that_were_begun_are_taken_once(make: Make) -> None:
    grammars = make()
    assert grammars.take_begun() == ()
    grammars.begin(Grammar.regex("a"))
    grammars.begin(Grammar.regex("b"))
    grammars.begin(Grammar.regex("a"))
    grammars.begin(Grammar("gbnf"))
    assert grammars.take_begun() == (Grammar.regex("a"), Grammar.regex("b"))
    assert grammars.take_begun() == ()


def test_the_latest_grammars_are_kept(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "CACHED", 2)
    grammars = make()
    for source in ("a", "b", "a", "c", "a", "b"):
        grammars.compile(Grammar.regex(source))
    assert made[0].compiled == ["a", "b", "c", "b"]


def test_more_grammars_than_are_kept_are_compiled_once_each(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "CACHED", 2)
    grammars = make()
    grammars.compile(Grammar.regex("a"))
    waiting = [Grammar.regex(f"hold {number}") for number in range(6)]
    for _ in range(3):
        assert not any(map(grammars.ready, waiting))
    made[0].let_go.set()
    for grammar in waiting:
        grammars.begin(grammar).result()
    assert sorted(made[0].compiled) == ["a", *(grammar.source for grammar in waiting)]


@both
def test_a_refusal_is_raised_again(make: Make, compile_it: Compile) -> None:
    grammars = make()
    depths = []
    for _ in range(3):
        with pytest.raises(InvalidRequestError, match="not this one") as caught:
            compile_it(grammars, Grammar.regex("no"))
        depths.append(len(caught.traceback))
    assert made[0].compiled == ["no"]
    assert len(set(depths)) == 1


@both
@pytest.mark.parametrize(
    ("source", "fault"), [("bug", "KeyError: 'tide'"), ("exit", "SystemExit: 3"), ("unreadable", "UnreadableError: an")]
)
def test_a_fault_names_the_plugin(make: Make, compile_it: Compile, source: str, fault: str) -> None:
    with pytest.raises(PluginError, match=rf"grammar 'mine' failed in compile\(\): {fault}"):
        compile_it(make(), Grammar.regex(source))


def test_a_grammar_in_progress_is_not_ready_and_few_are_compiled_at_a_time(make: Make) -> None:
    grammars = make()
    grammars.compile(Grammar.regex("a"))
    [backend] = made
    sources = [Grammar.regex(f"hold {number}") for number in range(4)]
    assert not any(map(grammars.ready, sources))
    for _ in range(compiler.THREADS):
        backend.begun.acquire()
    assert len(backend.compiled) == 1 + compiler.THREADS
    backend.let_go.set()
    assert all(map(grammars.compile, sources))
    assert len(backend.threads) <= compiler.THREADS


class Clock:
    """Stands in for the module time."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The time of grammars, which passes when the test says so."""
    clock = Clock()
    monkeypatch.setattr(compiler, "time", clock)
    return clock


@both
def test_a_slow_grammar_is_refused_and_known_when_it_is_done(make: Make, clock: Clock, compile_it: Compile) -> None:
    grammars = make(compile_timeout=5.0)
    grammars.compile(Grammar.regex("a"))
    slow = Grammar.regex("hold")
    assert not grammars.ready(slow)
    made[0].begun.acquire()
    clock.now += 5.0
    with pytest.raises(InvalidRequestError, match=r"takes more than 5 s to compile \(grammar.compile_timeout\)"):
        compile_it(grammars, slow)
    assert grammars.ready(slow)
    made[0].let_go.set()
    assert grammars.begin(slow).result()
    assert compile_it(grammars, slow)


def test_acompile_refuses_a_grammar_that_becomes_too_slow_while_it_waits(make: Make, clock: Clock) -> None:
    grammars = make(compile_timeout=0.01)
    grammars.compile(Grammar.regex("a"))
    slow = Grammar.regex("hold")
    assert not grammars.ready(slow)
    made[0].begun.acquire()

    async def wait() -> None:
        waiting = asyncio.create_task(grammars.acompile(slow))
        await asyncio.sleep(0)
        assert not waiting.done()
        clock.now += 5.0
        await waiting

    with pytest.raises(InvalidRequestError, match=r"takes more than 0\.01 s to compile"):
        asyncio.run(wait())


def test_a_grammar_is_compiled_when_the_event_loop_that_waits_for_it_ends(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    grammars = make()
    grammars.compile(Grammar.regex("a"))
    held = Grammar.regex("hold")

    async def give_up() -> None:
        waiting = asyncio.create_task(grammars.acompile(held))
        while grammars._entry(held).begun is None:
            await asyncio.sleep(0.01)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(give_up())
    made[0].let_go.set()
    assert grammars.compile(held) is in_event_loop(grammars, held)
    assert not caplog.records


def test_making_the_backend_is_no_part_of_compile_timeout(make: Make, clock: Clock) -> None:
    compiling = threading.Event()

    class Slow(Backend):
        def __init__(self, vocabulary: GrammarVocabulary, options: None) -> None:
            clock.now += 1.2
            super().__init__(vocabulary, options)

        def compile(self, grammar: Grammar) -> CompiledGrammar:
            clock.now += 0.9
            compiling.set()
            return super().compile(grammar)

    grammars = make(backend=Slow, compile_timeout=1.0)
    held = Grammar.regex("hold")
    future = grammars.begin(held)
    compiling.wait()
    assert not grammars.ready(held)
    clock.now += 0.2
    assert grammars.ready(held)
    made[0].let_go.set()
    future.result()


@both
def test_a_grammar_that_no_thread_takes_up_is_refused(make: Make, clock: Clock, compile_it: Compile) -> None:
    grammars = make()
    grammars.compile(Grammar.regex("a"))
    for number in range(compiler.THREADS):
        grammars.begin(Grammar.regex(f"hold {number}"))
        made[0].begun.acquire()
    assert not grammars.ready(Grammar.regex("b"))
    clock.now += compiler.QUEUE_SECONDS
    with pytest.raises(InvalidRequestError, match=rf"has waited {compiler.QUEUE_SECONDS:g} s for other grammars"):
        compile_it(grammars, Grammar.regex("b"))


@pytest.mark.parametrize(
    ("settings", "grammar", "reason"),
    [
        ({"backend": None}, Grammar.regex("a"), "this engine enforces no grammars: grammar 'mine'"),
        ({}, Grammar.lark("start: /a/"), "knows no grammars of the kind 'lark'; it knows regex"),
        ({"max_chars": 2}, Grammar.regex("abc"), "at most 2"),
        ({"eos": frozenset()}, Grammar.regex("a"), "has no end-of-sequence token"),
        ({"eos": frozenset({600})}, Grammar.regex("a"), "has no end-of-sequence token"),
    ],
)
def test_what_cannot_be_enforced_is_refused(
    make: Make, settings: dict[str, Any], grammar: Grammar, reason: str
) -> None:
    with pytest.raises(InvalidRequestError, match=reason):
        make(**settings).compile(grammar)


@both
def test_compile_raises_instead_of_waiting_when_the_engine_is_closed(make: Make, compile_it: Compile) -> None:
    grammars = make()
    grammars.compile(Grammar.regex("a"))
    grammars.close()
    with pytest.raises(ExecutorError, match="the engine is closed"):
        compile_it(grammars, Grammar.regex("b"))
    assert made[0].compiled == ["a"]


def test_a_deep_recursion_of_the_library_fits_into_the_threads_stack(make: Make) -> None:
    """With 8 MiB of stack, 3000 rules in a chain end the process."""
    from engine.plugins.grammars.llguidance import LLGuidance
    from engine.plugins.grammars.options import JsonOptions

    rules = "\n".join(f"r{number}: r{number + 1}" for number in range(4000))
    config = EngineConfig(model=make()._model)
    grammars = Grammars(
        config, LLGuidance, JsonOptions(), vocab_size=512, eos_tokens=frozenset({509}), owner="grammar 'llguidance'"
    )
    chain = Grammar.lark(f'start: r0\n{rules}\nr4000: "a"')
    [token] = Tokenizer.open(config.model.path).encode("a")
    assert grammars.compile(chain).matcher().accept(token)
    grammars.close()
