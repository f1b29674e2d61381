"""Masks that the built-in grammar backends need."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from engine.core.grammars import GrammarMatcher, GrammarVocabulary

if TYPE_CHECKING:
    import numpy.typing as npt


def eos_mask(vocabulary: GrammarVocabulary) -> npt.NDArray[np.int32]:
    """The mask that allows the end-of-sequence tokens alone: [ceil(vocabulary / 32)] int32."""
    return _mask(vocabulary, list(vocabulary.eos_tokens))


def full_mask(vocabulary: GrammarVocabulary) -> npt.NDArray[np.int32]:
    """The mask that allows every token: [ceil(vocabulary / 32)] int32."""
    return _mask(vocabulary, slice(len(vocabulary.tokens)))


def _mask(vocabulary: GrammarVocabulary, tokens: list[int] | slice) -> npt.NDArray[np.int32]:
    allowed = np.zeros(-(-len(vocabulary.tokens) // 32) * 32, np.uint8)
    allowed[tokens] = 1
    return np.packbits(allowed, bitorder="little").view(np.int32)


def allows_any(matcher: GrammarMatcher, eos: npt.NDArray[np.int32]) -> bool:
    """Whether a matcher allows any token; raises what `fill_mask` raises. eos: of the shape of its masks."""
    mask = np.empty_like(eos)
    matcher.fill_mask(mask)
    return bool(mask.any())
