"""Contract of plugins/grammars: which tokens may come next, so that an output matches a grammar."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar, Generic, TypeVar

from attrs import field, frozen

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from engine.core.grammars.grammar import Grammar

API = "1"
"""Version of this contract."""
OptionsT = TypeVar("OptionsT")


@frozen(kw_only=True, eq=False)
class GrammarVocabulary:
    """The tokens of a model, as grammars see them."""

    tokens: tuple[bytes, ...] = field(repr=False)
    """The UTF-8 bytes of each token, possibly part of a character; one entry per logit of the model. Empty for an id
    that is no token; for a special token, its name."""
    special_tokens: frozenset[int] = field(repr=False)
    """Tokens that are no text, `eos_tokens` included: no text matches their names."""
    eos_tokens: frozenset[int]
    """End-of-sequence tokens, each of which may end an output; never empty."""
    encode: Callable[[str], list[int]] = field(repr=False)
    """The model's own tokens of a text, without special tokens."""


class GrammarMatcher(ABC):
    """Follows one output through its grammar. Used by one thread at a time; other matchers may run in parallel.

    An end-of-sequence token may follow exactly where the output so far matches the whole grammar. Accepting one
    terminates the matcher; nothing else does.
    """

    @property
    @abstractmethod
    def is_terminated(self) -> bool:
        """Whether an end-of-sequence token was accepted."""

    @abstractmethod
    def fill_mask(self, mask: npt.NDArray[np.int32]) -> None:
        """Write which tokens may come next; changes nothing else.

        mask: [ceil(vocabulary / 32)] int32, contiguous; token t is bit t % 32 of word t // 32, 1 if the token may come.
        All bits are written; those beyond the vocabulary are 0. A terminated matcher allows the end-of-sequence tokens.
        Raises InvalidRequestError when the grammar is too complex to go on with.
        """

    @abstractmethod
    def accept(self, token: int) -> bool:
        """Advance by one token. Returns False, and changes nothing, if the grammar does not allow the token."""

    @abstractmethod
    def rollback(self, count: int) -> None:
        """Take back the last `count` accepted tokens, an end-of-sequence token included.

        count: at most the number of accepted tokens.
        """

    def fill_masks(self, masks: npt.NDArray[np.int32], draft: Sequence[int]) -> int:
        """Write the masks of the next position and of those after each token of a draft; changes nothing else.

        masks: [len(draft) + 1, ceil(vocabulary / 32)] int32. Returns the number of masks written: one for the next
        position, and one per leading token of the draft that the grammar allows.
        """
        accepted = 0
        try:
            while True:
                self.fill_mask(masks[accepted])
                if accepted == len(draft) or not self.accept(draft[accepted]):
                    return accepted + 1
                accepted += 1
        finally:
            self.rollback(accepted)

    def count_allowed(self, tokens: Sequence[int]) -> int:
        """Number of leading tokens of `tokens` that the grammar allows; changes nothing."""
        count = 0
        try:
            while count < len(tokens) and self.accept(tokens[count]):
                count += 1
        finally:
            self.rollback(count)
        return count

    def forced_tokens(self) -> Sequence[int]:
        """Tokens of the text that must come next, as the model would most likely write it; changes nothing.

        The grammar allows these tokens in turn, but may allow other tokens of the same text too: the model decides.
        Empty where different texts may come, or where finding out takes longer than a few microseconds.
        """
        return ()

    @classmethod
    def fill_batch(cls, matchers: Sequence[GrammarMatcher], masks: npt.NDArray[np.int32]) -> Sequence[Exception | None]:
        """`fill_mask` of several matchers of this class, of any grammars of one backend; may use several threads.

        masks: [matchers, ceil(vocabulary / 32)] int32, contiguous. Returns for each matcher what `fill_mask` would
        raise, or None; the other masks are written all the same.
        """
        problems: list[Exception | None] = []
        for matcher, mask in zip(matchers, masks, strict=True):
            try:
                matcher.fill_mask(mask)
                problems.append(None)
            except Exception as error:  # of a library, or of a grammar that has become too complex
                problems.append(error)
        return problems


class CompiledGrammar(ABC):
    """A grammar, compiled for one vocabulary."""

    @abstractmethod
    def matcher(self) -> GrammarMatcher:
        """A new matcher, at the beginning of an output. Cheap; called by one thread at a time."""


class GrammarBackend(ABC, Generic[OptionsT]):
    """Compiles grammars for one vocabulary.

    OptionsT: the backend's own settings, an object of `options_class`; None for a backend without any.
    """

    api: ClassVar[str]
    """Version of the contract that the class was written for."""
    options_class: ClassVar[type | None] = None
    """Frozen attrs class of the plugin's own settings ([grammar.options]); None: no settings."""
    kinds: ClassVar[frozenset[str]]
    """The kinds of grammars that the backend compiles (Grammar.kind); others are refused in its name."""

    @classmethod
    def refuses(cls) -> str | None:
        """A sentence that says why this backend cannot be used here and what would work; None if it can."""
        return None

    @abstractmethod
    def __init__(self, vocabulary: GrammarVocabulary, options: OptionsT) -> None:
        """Prepare the vocabulary. Called once, in a thread, before the first grammar is compiled; may take seconds.

        options: an instance of `options_class`, None without one.
        """

    @abstractmethod
    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Compile a grammar of one of `kinds`. Called from several threads at a time.

        An output that matches the compiled grammar matches the given one in every respect: what the backend does not
        enforce is refused, never left out. Raises InvalidRequestError with a sentence that names the keyword, or the
        place, for a grammar that is wrong, too complex, or beyond the backend. Time and memory must be bounded.
        """
