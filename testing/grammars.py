"""Conformance suite for grammar backends: masks, accept, rollback and the end agree with each other and the text."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pytest

from engine.core.errors import InvalidRequestError
from engine.core.grammars import CompiledGrammar, Grammar, GrammarBackend, GrammarMatcher
from engine.testing.grammar_cases import (
    CASES,
    EMPTY,
    EOS,
    KEYWORDS,
    OTHER_EOS,
    PERSON,
    SPECIAL,
    TOKENS,
    WORDS,
    WRONG,
    Case,
    vocabulary,
)
from engine.testing.structural_tag_cases import REFUSED, SPECIAL_CASES, TEXT_CASES, split_special

DIRT = 0x5A5A5A5A
"""What a mask holds before it is written."""
MAX_LENGTH = 48
"""Maximum tokens of a random output; an output that is longer is cut off."""


class GrammarConformance:
    """Derive a class named Test... from this one and set `backend`; kinds that the backend lacks are not tested."""

    backend: ClassVar[type[GrammarBackend[Any]]]
    options: ClassVar[Any] = None
    """Options passed to the backend; None: the defaults of its options_class."""

    def make(self) -> GrammarBackend[Any]:
        """A backend for the vocabulary of this module."""
        options = self.options
        if options is None and self.backend.options_class is not None:
            options = self.backend.options_class()
        return self.backend(vocabulary(), options)

    def cases(self) -> list[tuple[Case, CompiledGrammar]]:
        """The cases of the backend's kinds, compiled."""
        backend = self.make()
        cases = [case for case in (*CASES, *TEXT_CASES) if case.grammar.kind in backend.kinds]
        assert cases, f"the backend knows none of the kinds {sorted({case.grammar.kind for case in CASES})}"
        return [(case, backend.compile(case.grammar)) for case in cases]

    def test_texts(self) -> None:
        """A matching text can be generated in any tokenization, and end; a text that does not match cannot."""
        for case, compiled in self.cases():
            for text in case.good:
                for seed in range(3):
                    matcher = compiled.matcher()
                    for token in tokenize(text, random.Random(seed)):
                        assert allowed(matcher)[token], f"{case.grammar}: {text!r} cannot go on with {TOKENS[token]!r}"
                        assert matcher.accept(token), f"{case.grammar}: {text!r} is not accepted"
                    assert ends(matcher), f"{case.grammar}: {text!r} cannot end"
            for text in case.bad:
                assert not matches(compiled, text), f"{case.grammar}: {text!r} does not match, but is accepted"

    @pytest.mark.parametrize("seed", range(3))
    def test_random_outputs(self, seed: int) -> None:
        """Whatever is drawn from the masks matches the grammar once it has ended."""
        for case, compiled in self.cases():
            pick = random.Random(seed)
            for _ in range(8):
                free = case.grammar.kind == "structural_tag"  # whose free text may be any bytes
                text, ended = walk(compiled.matcher(), pick, "replace" if free else "strict")
                assert not ended or case.matches(text), f"{case.grammar}: {text!r} ended, but does not match"

    @pytest.mark.parametrize("seed", range(2))
    def test_mask_and_accept(self, seed: int) -> None:
        """accept() takes exactly the tokens of the mask, and a token that it does not take changes nothing."""
        for case, compiled in self.cases():
            matcher, pick = compiled.matcher(), random.Random(seed)
            for _ in range(5):
                before = allowed(matcher)
                for token in range(len(TOKENS)):
                    taken = matcher.accept(token)
                    assert taken == before[token], (
                        f"{case.grammar}: the mask says {before[token]} of token {token}, accept() {taken}"
                    )
                    if taken:
                        matcher.rollback(1)
                assert np.array_equal(allowed(matcher), before), f"{case.grammar}: a refused token changed the mask"
                if matcher.is_terminated:
                    break
                assert matcher.accept(pick.choice(np.flatnonzero(before).tolist()))

    def test_masks(self) -> None:
        """fill_mask() writes all bits, the same each time, and none beyond the vocabulary."""
        for case, compiled in self.cases():
            matcher = compiled.matcher()
            for token in (None, *tokenize(case.good[0], random.Random(0)), EOS):
                assert token is None or matcher.accept(token)
                masks = np.empty((2, WORDS), np.int32)
                masks[0], masks[1] = 0, DIRT
                matcher.fill_mask(masks[0])
                matcher.fill_mask(masks[1])
                assert np.array_equal(*masks), (
                    f"{case.grammar}: fill_mask() does not write all bits, or differs from call to call"
                )
                beyond = bits(masks[1])[len(TOKENS) :]
                assert not beyond.any(), f"{case.grammar}: the mask allows tokens beyond the vocabulary"
                assert masks.any(), f"{case.grammar}: the mask allows nothing"

    def test_special_tokens(self) -> None:
        """No text matches special tokens and ids without text."""
        for case, compiled in self.cases():
            matcher = compiled.matcher()
            for token in tokenize(case.good[0], random.Random(0)):
                mask = allowed(matcher)
                wrong = [one for one in (SPECIAL, EMPTY, len(TOKENS) - 1) if mask[one]]
                assert not wrong, f"{case.grammar}: the mask allows token {wrong[0]}, which is no text"
                matcher.accept(token)

    def test_end(self) -> None:
        """An end-of-sequence token may follow exactly a complete text, and terminates; only such tokens may follow."""
        for case, compiled in self.cases():
            for eos in (EOS, OTHER_EOS):
                matcher = compiled.matcher()
                text = b""
                for byte in case.good[0].encode():
                    assert not matcher.is_terminated, f"{case.grammar}: is_terminated without an end"
                    may_end, complete = allowed(matcher)[eos], case.matches(decodes(text))
                    assert may_end == complete, f"{case.grammar}: {text!r} {'may' if may_end else 'may not'} end"
                    assert matcher.accept(byte)
                    text += bytes([byte])
                assert matcher.accept(eos), f"{case.grammar}: {text!r} may not end"
                assert matcher.is_terminated, f"{case.grammar}: is_terminated is False after the end"
                after = np.flatnonzero(allowed(matcher)).tolist()
                assert after == [EOS, OTHER_EOS], f"{case.grammar}: after the end the mask allows {after}"
                assert not matcher.accept(ord("a")), f"{case.grammar}: a token is accepted after the end"

    @pytest.mark.parametrize("seed", range(3))
    def test_rollback(self, seed: int) -> None:
        """rollback() takes back any number of tokens, the end included, and restores the state before them."""
        for case, compiled in self.cases():
            matcher, pick = compiled.matcher(), random.Random(seed)
            tokens = [*tokenize(pick.choice(case.good), pick), EOS]
            masks = [allowed(matcher)]
            for token in tokens:
                assert matcher.accept(token)
                masks.append(allowed(matcher))
            count = len(tokens)
            for _ in range(8):
                back = pick.randint(0, count)
                matcher.rollback(back)
                count -= back
                where = f"{case.grammar}: after a rollback to token {count}"
                assert np.array_equal(allowed(matcher), masks[count]), f"{where} the mask differs from before"
                assert matcher.is_terminated == (count == len(tokens)), f"{where} is_terminated is wrong"
                for token in tokens[count : count + pick.randint(0, len(tokens) - count)]:
                    assert matcher.accept(token), f"{where} a token is not accepted again"
                    count += 1

    def test_drafts(self) -> None:
        """fill_masks() writes the masks along a draft, up to a token that the grammar refuses, and changes nothing."""
        for case, compiled in self.cases():
            matcher, other = compiled.matcher(), compiled.matcher()
            draft = [*tokenize(case.good[0], random.Random(1)), SPECIAL, ord("a")]
            before = allowed(matcher)
            masks = np.full((len(draft) + 1, WORDS), DIRT, np.int32)
            assert matcher.fill_masks(masks, draft) == len(draft) - 1, (
                f"{case.grammar}: fill_masks() returns another number than that of reachable positions"
            )
            assert np.array_equal(allowed(matcher), before), f"{case.grammar}: fill_masks() changes the matcher"
            for mask, token in zip(masks, draft[:-1], strict=False):
                assert np.array_equal(bits(mask)[: len(TOKENS)], allowed(other)), (
                    f"{case.grammar}: fill_masks() and fill_mask() differ"
                )
                other.accept(token)

    def test_allowed_tokens(self) -> None:
        """count_allowed() returns how many leading tokens the grammar allows, the end included, and changes nothing."""
        for case, compiled in self.cases():
            matcher = compiled.matcher()
            text = tokenize(case.good[0], random.Random(1))
            for tokens, expected in (
                ([], 0),
                (text, len(text)),
                ([*text, EOS], len(text) + 1),
                ([*text, EOS, OTHER_EOS, ord("a")], len(text) + 2),
                ([*text[:-1], SPECIAL, *text], len(text) - 1),
            ):
                before = allowed(matcher)
                found = matcher.count_allowed(tokens)
                assert found == expected, f"{case.grammar}: count_allowed({tokens}) is {found}, not {expected}"
                assert np.array_equal(allowed(matcher), before), f"{case.grammar}: count_allowed() changes the matcher"

    @pytest.mark.parametrize("seed", range(3))
    def test_forced_tokens(self, seed: int) -> None:
        """The tokens of forced_tokens() may come in turn where no other text may; the call changes nothing."""
        cases = self.cases()
        backend = self.make()
        if "structural_tag" in backend.kinds:
            cases += [(case, backend.compile(case.grammar)) for case in SPECIAL_CASES]
        for case, compiled in cases:
            matcher, other, pick = compiled.matcher(), compiled.matcher(), random.Random(seed)
            for token in (*tokenize(pick.choice(case.good), pick), EOS, None):
                forced = list(matcher.forced_tokens())
                assert np.array_equal(allowed(matcher), allowed(other)), (
                    f"{case.grammar}: forced_tokens() changes the matcher"
                )
                for one in forced:
                    may_come, first = np.flatnonzero(allowed(matcher)), TOKENS[one][:1]
                    wrong = [TOKENS[each] for each in may_come if TOKENS[each][:1] != first]
                    assert not wrong, f"{case.grammar}: {TOKENS[one]!r} is forced where {wrong[0]!r} may come"
                    assert matcher.accept(one), f"{case.grammar}: {TOKENS[one]!r} is forced, and may not come"
                matcher.rollback(len(forced))
                if token is not None:
                    assert matcher.accept(token), f"{case.grammar}: after forced_tokens() {TOKENS[token]!r} is refused"
                    other.accept(token)

    def test_batches(self) -> None:
        """fill_batch() writes the masks that fill_mask() does, of any grammars, begun and ended."""
        pick = random.Random(0)
        matchers = []
        for case, compiled in self.cases():
            tokens = [*tokenize(case.good[0], pick), EOS]
            for count in (0, pick.randint(0, len(tokens)), len(tokens)):
                matchers.append(compiled.matcher())
                assert all(map(matchers[-1].accept, tokens[:count]))
        for some in (matchers[:1], matchers):
            masks = np.full((len(some), WORDS), DIRT, np.int32)
            assert not any(type(some[0]).fill_batch(some, masks)), "fill_batch() reports an error"
            for matcher, mask in zip(some, masks, strict=True):
                assert np.array_equal(bits(mask)[: len(TOKENS)], allowed(matcher)), "fill_batch() writes other masks"
                assert not bits(mask)[len(TOKENS) :].any(), "fill_batch() allows tokens beyond the vocabulary"

    def test_matchers_are_independent(self) -> None:
        """Two matchers of one grammar do not share their state."""
        for case, compiled in self.cases():
            first, second = compiled.matcher(), compiled.matcher()
            before = allowed(second)
            for token in tokenize(case.good[0], random.Random(0)):
                assert first.accept(token)
            assert np.array_equal(allowed(second), before), f"{case.grammar}: one matcher changes another"
            assert np.array_equal(allowed(compiled.matcher()), before), (
                f"{case.grammar}: a new matcher is not at the start of an output"
            )

    @pytest.mark.parametrize("seed", range(3))
    def test_structural_tags(self, seed: int) -> None:
        """Special tokens come where a structural tag names them and nowhere else, and outputs match the tag."""
        backend = self.make()
        if "structural_tag" not in backend.kinds:
            pytest.skip("the backend knows no structural tags")
        pick = random.Random(seed)
        for case in (*TEXT_CASES, *SPECIAL_CASES):
            compiled = backend.compile(case.grammar)
            for text in case.bad:
                assert not matches(compiled, text), f"{case.grammar}: {text!r} does not match, but is accepted"
            for text in case.good:
                assert matches(compiled, text), f"{case.grammar}: {text!r} is not accepted"
                tokens, matcher = tokenize(text, pick), compiled.matcher()
                begun = tokens[: pick.randint(0, len(tokens))]
                for token in begun:
                    assert allowed(matcher)[token], f"{case.grammar}: {text!r} cannot go on with {TOKENS[token]!r}"
                    assert matcher.accept(token), f"{case.grammar}: {text!r} is not accepted"
                if not matcher.is_terminated:
                    made, ended = walk(matcher, pick, "replace")
                    made = decodes(b"".join(TOKENS[token] for token in begun)) + made
                    assert not ended or case.matches(made), f"{case.grammar}: {made!r} ended, but does not match"

    @pytest.mark.parametrize(("tag", "reason"), REFUSED, ids=lambda value: str(value)[:40])
    def test_structural_tags_beyond_the_language(self, tag: dict[str, Any], reason: str) -> None:
        """A structural tag that cannot be enforced is refused with a sentence that says why."""
        backend = self.make()
        if "structural_tag" not in backend.kinds:
            pytest.skip("the backend knows no structural tags")
        with pytest.raises(InvalidRequestError, match=reason):
            backend.compile(Grammar.structural_tag(tag))

    @pytest.mark.parametrize(("schema", "keyword", "breaks"), KEYWORDS, ids=lambda value: str(value)[:40])
    def test_keywords(self, schema: dict[str, Any], keyword: str, breaks: str) -> None:
        """A keyword of JSON Schema is enforced or refused by its name, never ignored."""
        backend = self.make()
        if "json_schema" not in backend.kinds:
            pytest.skip("the backend knows no JSON schemas")
        compiled, refusal = None, ""
        try:
            compiled = backend.compile(Grammar.json_schema(schema))
        except InvalidRequestError as error:
            refusal = str(error)
        if compiled is not None:
            assert not matches(compiled, breaks), f"{keyword} is not enforced: {breaks} matches {json.dumps(schema)}"
        else:
            named = keyword in refusal or str(schema.get(keyword)) in refusal
            assert named, f"{keyword} is refused, but the error names neither it nor its value: {refusal}"

    def test_wrong_grammars(self) -> None:
        """A grammar that is wrong is refused with a sentence."""
        backend = self.make()
        for grammar in WRONG:
            if grammar.kind not in backend.kinds:
                continue
            with pytest.raises(InvalidRequestError) as caught:
                backend.compile(grammar)
            assert str(caught.value), f"{grammar} is refused without a sentence"

    def test_threads(self) -> None:
        """compile() works in several threads at a time, and so do matchers of one grammar."""
        backend = self.make()
        if "json_schema" not in backend.kinds:
            pytest.skip("the backend knows no JSON schemas")
        shared = backend.compile(CASES[0].grammar)

        def use(number: int) -> list[bool]:
            own = backend.compile(Grammar.json_schema({**PERSON, "title": str(number)}))
            return [matches(compiled, CASES[0].good[0]) for compiled in (own, shared)]

        with ThreadPoolExecutor(4) as threads:
            assert all(map(all, threads.map(use, range(16)))), "threads disturb each other"


def bits(mask: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
    """The bits of a mask: [32 * words]."""
    return np.unpackbits(mask.view(np.uint8), bitorder="little").astype(bool)


def allowed(matcher: GrammarMatcher) -> npt.NDArray[np.bool_]:
    """Which tokens may come next: [vocabulary]."""
    mask = np.full(WORDS, DIRT, np.int32)
    matcher.fill_mask(mask)
    return bits(mask)[: len(TOKENS)]


def ends(matcher: GrammarMatcher) -> bool:
    """Whether both end-of-sequence tokens may come next."""
    mask = allowed(matcher)
    return bool(mask[EOS] and mask[OTHER_EOS])


def matches(compiled: CompiledGrammar, text: str) -> bool:
    """Whether a text can be generated, byte by byte and with its special tokens, and end."""
    matcher = compiled.matcher()
    for part in split_special(text):
        if not all(map(matcher.accept, [part] if isinstance(part, int) else part.encode())):
            return False
    return matcher.is_terminated or matcher.accept(EOS)


def tokenize(text: str, pick: random.Random) -> list[int]:
    """Tokens of a text with its special tokens, chosen at random among those that fit."""
    tokens: list[int] = []
    for part in split_special(text):
        tokens += [part] if isinstance(part, int) else _tokenize(part.encode(), pick)
    return tokens


def _tokenize(data: bytes, pick: random.Random) -> list[int]:
    tokens: list[int] = []
    while data:
        fitting = [
            token
            for token, own in enumerate(TOKENS)
            if own and token not in (EOS, OTHER_EOS, SPECIAL) and data.startswith(own)
        ]
        tokens.append(pick.choice(fitting))
        data = data[len(TOKENS[tokens[-1]]) :]
    return tokens


def walk(matcher: GrammarMatcher, pick: random.Random, errors: str = "strict") -> tuple[str, bool]:
    """A random output, and whether it has ended. It ends soon after it may. errors: of bytes.decode()."""
    data = b""
    for _ in range(MAX_LENGTH):
        may = np.flatnonzero(allowed(matcher)).tolist()
        token = EOS if EOS in may and pick.random() < 0.3 else pick.choice(may)
        assert matcher.accept(token), f"token {token} is in the mask, but not accepted"
        if token in (EOS, OTHER_EOS):
            return data.decode("utf-8", errors), True
        data += TOKENS[token]
    return decodes(data), False


def decodes(data: bytes) -> str:
    """The text of bytes, which may end amid a character."""
    return data.decode("utf-8", "replace")
