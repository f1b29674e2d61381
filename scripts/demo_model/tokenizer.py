"""The tokenizer, and the documents as its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from demo_model.settings import END_OF_TEXT, SPECIAL_TOKENS, VOCABULARY

# Pieces within which byte pairs may merge. Indentation is a piece of its own, as is a run of line breaks, and no word
# takes a bracket or a dot along: so a prompt may end at a line break, after indentation or at an opening bracket, and
# is still cut up as the model has seen it.
PIECES = "|".join(
    (
        r"(?<![^\n])[ \t]+",  # indentation
        r" ?[\p{L}_]+",  # a word or an identifier
        r" ?\p{N}",  # one digit
        r" ?[^\s\p{L}\p{N}_]+",  # operators, brackets, quotes
        r"[\r\n]+",  # line breaks
        r"\s+(?!\S)",  # spaces, but for the one that belongs to the next piece
        r"\s+",
    )
)


def train_tokenizer(texts: Sequence[str]) -> Tokenizer:
    """A byte-level BPE tokenizer of VOCABULARY tokens; raises ValueError if the texts are too few for that many."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=24,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != VOCABULARY:
        raise ValueError(f"the texts gave {tokenizer.get_vocab_size()} tokens, and {VOCABULARY} are wanted: add text")
    return tokenizer


@dataclass(frozen=True)
class Corpus:
    """Tokens to train on, all documents one after the other (`tokens: [n]`), and where each begins (`starts`)."""

    tokens: Tensor
    starts: Tensor


def encode_documents(tokenizer: Tokenizer, documents: Sequence[str]) -> Corpus:
    """The documents in the order given, each closed by END_OF_TEXT."""
    tokens: list[int] = []
    starts = []
    for encoding in tokenizer.encode_batch(list(documents), add_special_tokens=False):
        starts.append(len(tokens))
        tokens += [*encoding.ids, SPECIAL_TOKENS.index(END_OF_TEXT)]
    return Corpus(torch.tensor(tokens), torch.tensor(starts))
