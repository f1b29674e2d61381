"""Grammars by XGrammar (https://github.com/mlc-ai/xgrammar): pushdown automata, precomputed for the vocabulary.

XGrammar ignores keywords of JSON Schema that it does not know, and some that it knows next to certain others. What it
gets is therefore restricted to what it enforces in full (xgrammar_schemas.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from attrs import frozen

from engine.core.errors import InvalidRequestError
from engine.core.extras import install_command
from engine.core.grammars import (
    CompiledGrammar,
    FormatResolver,
    Grammar,
    GrammarBackend,
    GrammarMatcher,
    GrammarVocabulary,
    schema_of,
)
from engine.plugins.grammars.masks import allows_any, eos_mask, full_mask
from engine.plugins.grammars.options import JsonOptions
from engine.plugins.grammars.xgrammar_formats import NO_TEXT, json_form, xgrammar_format
from engine.plugins.grammars.xgrammar_schemas import check_pattern, closed_schema

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_MAX_ERROR = 300
"""Characters of the library's error that are passed on."""
_MAX_FORCED = 256
"""Characters of a forced text whose tokens are found at a time."""
_PLACE = re.compile(r"^\[[\d:]+\] \S+: ")
"""Time and place in the library, at the beginning of its errors."""


class XGrammar(GrammarBackend[JsonOptions]):
    """Takes longer to compile than to follow a grammar. Refuses more of JSON Schema than llguidance does."""

    api = "1"
    options_class = JsonOptions
    kinds = frozenset({"json_schema", "json_object", "regex", "choice", "structural_tag"})

    @classmethod
    def refuses(cls) -> str | None:
        if find_spec("xgrammar") is None:
            return f"xgrammar is not installed; install it with `{install_command('xgrammar')}`"
        return None

    def __init__(self, vocabulary: GrammarVocabulary, options: JsonOptions) -> None:
        import xgrammar

        self._options = options
        self._vocabulary = _Vocabulary.of(vocabulary)
        self._formats = FormatResolver(vocabulary)
        special = vocabulary.special_tokens - vocabulary.eos_tokens
        texts = [NO_TEXT if token in special else text for token, text in enumerate(vocabulary.tokens)]
        self._tokenizer = xgrammar.TokenizerInfo(
            texts,
            xgrammar.VocabType.RAW,
            vocab_size=len(texts),
            stop_token_ids=sorted(vocabulary.eos_tokens),
        )
        # Core keeps what is compiled, and compiles in threads.
        self._compiler = xgrammar.GrammarCompiler(self._tokenizer, max_threads=1, cache_enabled=False)

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        try:
            made = self._compile(grammar)
        except RuntimeError as error:  # the only class that the library raises
            reason = _PLACE.sub("", " ".join(str(error)[:_MAX_ERROR].split()))
            raise InvalidRequestError(f"xgrammar refuses the {grammar.kind}: {reason}", "grammar") from None
        compiled = _Compiled(made, self._vocabulary)
        if not allows_any(compiled.matcher(), self._vocabulary.eos):
            raise InvalidRequestError(f"xgrammar refuses the {grammar.kind}: no text matches it", "grammar")
        return compiled

    def _compile(self, grammar: Grammar) -> Any:
        if grammar.kind == "regex":
            check_pattern(grammar.source)
            return self._compiler.compile_regex(grammar.source)
        if grammar.kind == "choice":
            return self._compiler.compile_grammar(f"root ::= {' | '.join(map(_quoted, json.loads(grammar.source)))}")
        if grammar.kind == "structural_tag":
            made = xgrammar_format(self._formats.resolve(grammar.source), self._options.max_whitespace)
            return self._compiler.compile_structural_tag({"type": "structural_tag", "format": made})
        schema = {"type": "object"} if grammar.kind == "json_object" else closed_schema(schema_of(grammar))
        return self._compiler.compile_json_schema(json.dumps(schema), **json_form(self._options.max_whitespace))


@frozen(kw_only=True)
class _Vocabulary:
    """What all matchers share."""

    eos: npt.NDArray[np.int32]
    """The mask that allows the end-of-sequence tokens."""
    tokens: npt.NDArray[np.int32]
    """The mask that allows every token."""
    empty: frozenset[int]
    """Tokens without text, for each of which the library writes a warning when it refuses one."""
    encode: Callable[[str], list[int]]

    @classmethod
    def of(cls, vocabulary: GrammarVocabulary) -> _Vocabulary:
        return cls(
            eos=eos_mask(vocabulary),
            tokens=full_mask(vocabulary),
            empty=frozenset(token for token, text in enumerate(vocabulary.tokens) if not text) - vocabulary.eos_tokens,
            encode=vocabulary.encode,
        )


class _Compiled(CompiledGrammar):
    def __init__(self, compiled: Any, vocabulary: _Vocabulary) -> None:
        self._compiled = compiled
        self._vocabulary = vocabulary

    def matcher(self) -> GrammarMatcher:
        import xgrammar

        return _Matcher(xgrammar.GrammarMatcher(self._compiled), self._vocabulary)


class _Matcher(GrammarMatcher):
    def __init__(self, matcher: Any, vocabulary: _Vocabulary) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._more_ends = 0
        """End-of-sequence tokens accepted after the first, of which the library takes none."""

    @property
    def is_terminated(self) -> bool:
        return bool(self._matcher.is_terminated())

    def fill_mask(self, mask: npt.NDArray[np.int32]) -> None:
        if self.is_terminated:
            mask[:] = self._vocabulary.eos
            return
        self._matcher.fill_next_token_bitmask(mask[None, :], 0)
        mask &= self._vocabulary.tokens  # the library sets the bits beyond the vocabulary

    def accept(self, token: int) -> bool:
        if self.is_terminated:
            ends = bool(self._vocabulary.eos[token // 32] >> (token % 32) & 1)
            self._more_ends += ends
            return ends
        return token not in self._vocabulary.empty and bool(self._matcher.accept_token(token))

    def forced_tokens(self) -> list[int]:
        if self.is_terminated:
            return []
        try:
            text = self._matcher.find_jump_forward_string()
        except UnicodeDecodeError:  # the text begins or ends within a character
            return []
        # What follows the text may change its last token.
        tokens = self._vocabulary.encode(text[:_MAX_FORCED])[:-1] if text else []
        return tokens[: self.count_allowed(tokens)]

    def rollback(self, count: int) -> None:
        ends = min(count, self._more_ends)
        self._more_ends -= ends
        if count > ends:
            self._matcher.rollback(count - ends)


def _quoted(text: str) -> str:
    """A text in XGrammar's EBNF."""
    return '"' + "".join(one if one.isascii() and one.isalnum() else rf"\U{ord(one):08x}" for one in text) + '"'
