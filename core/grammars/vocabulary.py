"""Makes the vocabulary of grammars from a model's tokenizer."""

from __future__ import annotations

import time
from collections.abc import Collection
from functools import partial

from engine.core.errors import InvalidRequestError
from engine.core.grammars.base import GrammarVocabulary
from engine.core.grammars.grammar import PARAMETER
from engine.core.text.token_stream import REPLACEMENT
from engine.core.text.tokenizer import Tokenizer

YIELD_EVERY, YIELD_SECONDS = 128, 1e-4
"""Tokens, a millisecond's work, after which a thread lets others have the interpreter: steps run next to this."""


def grammar_vocabulary(tokenizer: Tokenizer, vocab_size: int, eos_tokens: Collection[int]) -> GrammarVocabulary:
    """The vocabulary of a model with `vocab_size` logits. Takes a second or more for a large one.

    Raises InvalidRequestError for a model without end-of-sequence token, whose outputs cannot end where a grammar does.
    """
    ends = frozenset(token for token in eos_tokens if token < vocab_size)
    if not ends:
        raise InvalidRequestError(
            "this model has no end-of-sequence token, by which an output ends where its grammar does; name it as "
            "eos_token_id in the model's generation_config.json",
            PARAMETER,
        )
    known = min(vocab_size, tokenizer.vocab_size)
    before = tokenizer.encode("a", add_special_tokens=False)
    begin = len(tokenizer.decode_plainly(before, False))
    tokens = []
    for token in range(known):
        if token % YIELD_EVERY == 0:
            time.sleep(YIELD_SECONDS)
        own = tokenizer.own_bytes(token)
        if own is None:  # its text depends on its neighbours: a space before a word
            text = tokenizer.decode_plainly([*before, token], False)[begin:]
            own = b"" if REPLACEMENT in text else text.encode()
        tokens.append(own)
    return GrammarVocabulary(
        tokens=(*tokens, *(b"",) * (vocab_size - known)),
        special_tokens=frozenset(token for token in tokenizer.special_tokens if token < vocab_size) | ends,
        eos_tokens=ends,
        encode=partial(tokenizer.encode, add_special_tokens=False),
    )
