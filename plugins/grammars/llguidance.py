"""Grammars by llguidance (https://github.com/guidance-ai/llguidance): derivatives of expressions, and Earley."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.core.errors import InvalidRequestError
from engine.core.extras import install_command_of
from engine.core.grammars import (
    CompiledGrammar,
    Grammar,
    GrammarBackend,
    GrammarMatcher,
    GrammarVocabulary,
    schema_of,
)
from engine.core.host import Host
from engine.plugins.grammars.masks import allows_any, eos_mask
from engine.plugins.grammars.options import JsonOptions

if TYPE_CHECKING:
    import numpy.typing as npt
    from llguidance import LLExecutor, LLMatcher

_TEMPERATURE = re.compile(r"^\s*\w+\[[^\]\n]*\btemperature\b", re.MULTILINE)
STEP_MAX_ITEMS, STEP_LEXER_FUEL = 5000, 50_000
"""Less than the library's own limits, since all requests of a step wait for a mask: with its own, 300 rules that begin
alike took 194 ms per token; now the worst that was found takes 13 ms. Objects of 100 optional properties, and 200
tools, are within the limits; objects of 300 are not.
"""
MIN_PARALLEL, MIN_CORES, MAX_THREADS = 8, 4, 16
"""Minimum masks and minimum cores for several threads to make masks; maximum threads. A mask of 128,000 tokens takes
10 us to 2 ms, and waking the threads about 20 us."""
MAX_ORIGINALS, MAX_EXTRA_SECONDS = 8, 0.05
"""Maximum matchers of a grammar that are made to be copied, and seconds that all after the first may take to make. In
the library, all copies of a matcher share one lexer, which one thread at a time may use."""
_MAX_ERROR = 300
"""Characters of the library's error that are passed on."""


class LLGuidance(GrammarBackend[JsonOptions]):
    """Compiles in about a millisecond; a mask of 128,000 tokens takes less than 100 microseconds."""

    api = "1"
    options_class = JsonOptions
    kinds = frozenset({"json_schema", "json_object", "regex", "choice", "lark", "structural_tag"})

    @classmethod
    def refuses(cls) -> str | None:
        if find_spec("llguidance") is None:
            return f"llguidance is not installed; install it with `{install_command_of('llguidance')}`"
        return None

    def __init__(self, vocabulary: GrammarVocabulary, options: JsonOptions) -> None:
        from llguidance import LLTokenizer

        from engine.core.grammars import FormatResolver

        self._options = options
        self._eos_tokens = vocabulary.eos_tokens
        self._eos_mask = eos_mask(vocabulary)
        self._formats = FormatResolver(vocabulary)
        self._tokenizer = LLTokenizer(
            _Tokens(vocabulary),  # type: ignore[arg-type]  # it has what the library reads of a TokenizerWrapper
            n_vocab=len(vocabulary.tokens),
            eos_token=sorted(vocabulary.eos_tokens),
        )

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        from llguidance import LLMatcher, LLParserLimits

        try:
            source = self._source(grammar)
        except ValueError as error:
            raise InvalidRequestError(f"llguidance refuses the {_name(grammar)}: {error}", "grammar") from None
        limits = LLParserLimits(
            step_max_items=STEP_MAX_ITEMS,
            step_lexer_fuel=STEP_LEXER_FUEL,
            verbose_errors=False,
        )

        def make() -> LLMatcher:
            return LLMatcher(self._tokenizer, source, log_level=0, limits=limits)

        begin = time.perf_counter()
        matcher = make()
        seconds = time.perf_counter() - begin
        compiled = _Compiled(matcher, self._eos_tokens, self._eos_mask)
        problem = _error(matcher) or "; ".join(matcher.get_grammar_warnings()) or self._first_problem(compiled)
        if problem:
            raise InvalidRequestError(f"llguidance refuses the {_name(grammar)}: {problem}", "grammar")
        if count := _extra_originals(seconds, _cores()):
            threading.Thread(target=compiled.add_originals, args=(make, count), name="grammar", daemon=True).start()
        return compiled

    def _first_problem(self, compiled: CompiledGrammar) -> str:
        """Why no token can begin an output; empty if one can."""
        try:
            return "" if allows_any(compiled.matcher(), self._eos_mask) else "no text matches it"
        except InvalidRequestError as error:
            return "no text matches it" if "NoExtension" in str(error) else str(error)

    def _source(self, grammar: Grammar) -> str:
        """The grammar in llguidance's own form. Raises InvalidRequestError or ValueError."""
        from llguidance import LLMatcher

        if grammar.kind == "regex":
            return LLMatcher.grammar_from_regex(grammar.source)
        if grammar.kind == "choice":
            from engine.plugins.grammars.llguidance_formats import escaped

            return LLMatcher.grammar_from_regex("|".join(map(escaped, json.loads(grammar.source))))
        if grammar.kind == "lark":
            return LLMatcher.grammar_from_lark(_checked_lark(grammar.source))
        if grammar.kind == "structural_tag":
            from engine.plugins.grammars.llguidance_formats import LarkWriter

            return LarkWriter(self._lark_of_part).write(self._formats.resolve(grammar.source))
        return LLMatcher.grammar_from_json_schema(self._schema(grammar), overrides=self._json_options())

    def _lark_of_part(self, grammar: Grammar) -> str:
        """A grammar inside a structural tag: a schema as the library's %json, another as Lark."""
        if grammar.kind != "json_schema":
            return _checked_lark(grammar.source)
        return json.dumps({**json.loads(self._schema(grammar)), "x-guidance": self._json_options()})

    def _schema(self, grammar: Grammar) -> str:
        if grammar.kind == "json_object":
            return '{"type": "object"}'
        from engine.plugins.grammars.llguidance_schemas import exact_schema

        return json.dumps(exact_schema(schema_of(grammar)))

    def _json_options(self) -> Any:
        """Options that take precedence over those that a schema may hold (x-guidance)."""
        from engine.plugins.grammars.llguidance_schemas import ESCAPES

        most = self._options.max_whitespace
        spaces = {"whitespace_pattern": rf"[\x20\x0A\x0D\x09]{{1,{most}}}"} if most else {"whitespace_flexible": False}
        return {"lenient": False, "coerce_one_of": False, "json_allowed_escapes": ESCAPES, **spaces}


class _Tokens:
    """A vocabulary as llguidance reads one."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        self.eos_token_id = min(vocabulary.eos_tokens)
        self.tokens = vocabulary.tokens
        self.special_token_ids = sorted(vocabulary.special_tokens)
        self._encode = vocabulary.encode

    def __call__(self, text: str | bytes) -> list[int]:
        return self._encode(text if isinstance(text, str) else text.decode("utf-8", "replace"))


class _Compiled(CompiledGrammar):
    """Hands out copies of a few matchers in turn, so that as many threads can make masks of its outputs."""

    def __init__(self, matcher: LLMatcher, eos_tokens: frozenset[int], eos: npt.NDArray[np.int32]) -> None:
        self._originals = [matcher]
        self._copies = 0
        self._eos_tokens = eos_tokens
        self._eos = eos
        self._copying = threading.Lock()  # the library lets one thread at a time use a matcher

    def matcher(self) -> GrammarMatcher:
        with self._copying:
            original = self._originals[self._copies % len(self._originals)]
            self._copies += 1
            return _Matcher(original.deep_copy(), self._eos_tokens, self._eos)

    def add_originals(self, make: Callable[[], LLMatcher], count: int) -> None:
        """Make `count` further matchers to be copied; each takes as long as compiling."""
        for _ in range(count):
            original = make()
            with self._copying:
                self._originals.append(original)


def _extra_originals(seconds: float, cores: int) -> int:
    """How many matchers to make besides the first, which took `seconds` to make."""
    if cores < MIN_CORES:
        return 0
    return min(MAX_ORIGINALS, cores, 1 + int(MAX_EXTRA_SECONDS / max(seconds, 1e-6))) - 1


class _Matcher(GrammarMatcher):
    """The library sees no end-of-sequence token: after one, it would roll back further than asked for."""

    def __init__(self, matcher: LLMatcher, eos_tokens: frozenset[int], eos: npt.NDArray[np.int32]) -> None:
        self._matcher = matcher
        self._eos_tokens = eos_tokens
        self._eos = eos
        self._ended = 0
        """End-of-sequence tokens accepted."""

    @property
    def is_terminated(self) -> bool:
        return bool(self._ended)

    def fill_mask(self, mask: npt.NDArray[np.int32]) -> None:
        if self._ended:
            mask[:] = self._eos
            return
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if (problem := self._finish(mask)) is not None:
            raise problem

    @classmethod
    def fill_batch(cls, matchers: Sequence[GrammarMatcher], masks: npt.NDArray[np.int32]) -> list[Exception | None]:
        if len(matchers) < MIN_PARALLEL or _cores() < MIN_CORES:
            return list(super().fill_batch(matchers, masks))
        assert masks.flags.c_contiguous
        own = [matcher for matcher in matchers if isinstance(matcher, _Matcher)]
        running = [(matcher._matcher, at) for at, matcher in enumerate(own) if not matcher._ended]
        _executor().unsafe_compute_mask_ptr(running, masks.ctypes.data, masks.strides[0], len(masks))
        return [matcher._finish(mask) for matcher, mask in zip(own, masks, strict=True)]

    def _finish(self, mask: npt.NDArray[np.int32]) -> Exception | None:
        """Correct a mask that the library has written, or write that of an ended output; returns the error, if any."""
        if self._ended:
            mask[:] = self._eos
        elif self._matcher.is_error():
            return InvalidRequestError(f"it is too complex: {_error(self._matcher)}", "grammar")
        elif not self._matcher.is_accepting():
            mask &= ~self._eos  # a Lark grammar may name the token, which would end the output too early
        return None

    def accept(self, token: int) -> bool:
        if self._ended or token in self._eos_tokens:
            if token not in self._eos_tokens or not (self._ended or self._matcher.is_accepting()):
                return False
            self._ended += 1
            return True
        return self._matcher.try_consume_tokens([token]) == 1

    def count_allowed(self, tokens: Sequence[int]) -> int:
        if self._ended or not self._eos_tokens.isdisjoint(tokens):
            return super().count_allowed(tokens)
        return self._matcher.validate_tokens(list(tokens))

    def forced_tokens(self) -> list[int]:
        if self._ended:
            return []
        forced = self._matcher.compute_ff_tokens()
        return forced if self._eos_tokens.isdisjoint(forced) else []

    def rollback(self, count: int) -> None:
        ends = min(count, self._ended)
        self._ended -= ends
        if count > ends:
            self._matcher.rollback(count - ends)


@cache
def _cores() -> int:
    return Host().cores()


@cache
def _executor() -> LLExecutor:
    """The library's threads that make masks, which sleep between steps."""
    from llguidance import LLExecutor

    return LLExecutor(num_threads=min(_cores(), MAX_THREADS))


def _error(matcher: LLMatcher) -> str:
    """The library's error in one line; empty if there is none."""
    return " ".join(matcher.get_error()[:_MAX_ERROR].replace("<non-verbose/>", "").split())


def _checked_lark(source: str) -> str:
    if _TEMPERATURE.search(source):
        raise InvalidRequestError("a temperature in a Lark grammar is not supported; leave it out", "grammar")
    return source


def _name(grammar: Grammar) -> str:
    names = {
        "json_schema": "JSON schema",
        "regex": "regular expression",
        "lark": "Lark grammar",
        "structural_tag": "structural tag",
    }
    return names.get(grammar.kind, grammar.kind)
