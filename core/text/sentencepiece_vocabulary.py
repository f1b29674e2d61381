"""The tokens of a tokenizer.model, converted by the sentencepiece package, which trained and defines them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.core.errors import CheckpointError, InvalidRequestError
from engine.core.extras import install_command
from engine.core.text.token_cache import AddedText, Separators
from engine.core.text.vocabulary import BYTE_TOKEN, NO_ID, SPACE, Vocabulary, not_unicode

if TYPE_CHECKING:
    from transformers import AddedToken, PreTrainedTokenizerFast

MODEL = "tokenizer.model"
_FIRST_BYTE = b"\n"
"""Begins a file of sentencepiece. tiktoken's vocabularies, which may have the same name, are lines of text."""
_WHITESPACE = re.compile(r"\s+")


def has_sentencepiece_model(directory: Path) -> bool:
    """Whether the only tokenizer of a model directory is one of sentencepiece."""
    file = directory / MODEL
    if (directory / "tokenizer.json").is_file() or not file.is_file():
        return False
    with file.open("rb") as content:
        return content.read(1) == _FIRST_BYTE


def open_sentencepiece(directory: Path) -> tuple[PreTrainedTokenizerFast, SentencePieceVocabulary]:
    """The special tokens and chat templates, as transformers reads them, and the vocabulary.

    Raises CheckpointError if packages are missing, or for a model that sentencepiece reads in a way not known here.
    """
    try:
        from sentencepiece.sentencepiece_model_pb2 import ModelProto
    except ImportError as error:
        raise CheckpointError(
            f"{directory} has a {MODEL} and no tokenizer.json; reading it needs sentencepiece and protobuf"
            f" (`{install_command('sentencepiece')}`)"
        ) from error
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    class Templates(PreTrainedTokenizerFast):
        """transformers' tokenizer without its own conversion of the vocabulary, which takes long and is not used."""

        @classmethod
        def convert_to_native_format(cls, trust_remote_code: bool = False, **kwargs: Any) -> dict[str, Any]:
            """Leave the arguments as they are."""
            return kwargs

    proto = ModelProto.FromString((directory / MODEL).read_bytes())
    if proto.HasField("denormalizer_spec") and proto.denormalizer_spec.precompiled_charsmap:
        raise CheckpointError(f"{directory / MODEL} rewrites decoded text (denormalizer_spec), which is not supported")
    ids = {piece.piece: token for token, piece in enumerate(proto.pieces)}
    unknown = proto.pieces[proto.trainer_spec.unk_id].piece
    backend = Tokenizer(models.WordLevel(ids, unk_token=unknown))
    wrapped = Templates.from_pretrained(str(directory), tokenizer_object=backend, local_files_only=True)
    for name, token in (("bos_token", proto.trainer_spec.bos_id), ("eos_token", proto.trainer_spec.eos_id)):
        if getattr(wrapped, name) is None and token >= 0:
            setattr(wrapped, name, proto.pieces[token].piece)
    return wrapped, SentencePieceVocabulary(proto, wrapped.added_tokens_decoder, wrapped)


class SentencePieceVocabulary(Vocabulary):
    """The tokens of a model of sentencepiece, and those that the checkpoint has added.

    The package converts what is between the special and added tokens that are spelled out in a text. Every token has
    bytes of its own, save that a text loses the space at its beginning that the model has put there.
    """

    has_bytes = True
    has_byte_tokens = False

    def __init__(self, proto: Any, added: Mapping[int, AddedToken], settings: PreTrainedTokenizerFast) -> None:
        """proto: the model. added: the added tokens by id. settings: which special tokens surround a text."""
        from sentencepiece import SentencePieceProcessor

        chosen = settings.init_kwargs
        if chosen.get("add_prefix_space") is False:
            proto.normalizer_spec.add_dummy_prefix = False
        self._first = SentencePieceProcessor(model_proto=proto.SerializeToString())
        self._prefixed = proto.normalizer_spec.add_dummy_prefix
        self._strips = proto.normalizer_spec.remove_extra_whitespaces
        self.drops_space = self._prefixed or self._strips
        proto.normalizer_spec.add_dummy_prefix = False
        # After a special token, a text has no prefix; with transformers' "legacy" setting, it has.
        legacy = bool(chosen.get("legacy"))
        self._later = self._first if legacy else SentencePieceProcessor(model_proto=proto.SerializeToString())

        kinds = type(proto.pieces[0])
        self._bytes = dict(enumerate(self._piece_bytes(proto, kinds)))
        controls = {token for token, piece in enumerate(proto.pieces) if piece.type == kinds.CONTROL}
        self._spaced = {
            token
            for token, piece in enumerate(proto.pieces)
            if piece.piece.startswith(SPACE) and piece.type not in (kinds.CONTROL, kinds.UNKNOWN)
        }
        own = {token for token, piece in enumerate(proto.pieces) if piece.type in (kinds.USER_DEFINED, kinds.UNKNOWN)}
        apart = {token: about for token, about in added.items() if token not in own}
        self._bytes |= {token: about.content.encode() for token, about in apart.items()}
        self.special_tokens = frozenset(controls | {token for token, about in apart.items() if about.special})
        self._size = max(self._bytes) + 1
        self._apart = {proto.pieces[token].piece: token for token in controls}
        self._apart |= {about.content: token for token, about in apart.items()}
        self._find_apart = re.compile("|".join(map(re.escape, sorted(self._apart, key=len, reverse=True))))
        self._strip_left = {token for token, about in apart.items() if about.lstrip}
        self._strip_right = {token for token, about in apart.items() if about.rstrip}
        strips = self._strip_left | self._strip_right
        self.separators = Separators(AddedText(text, token not in strips) for text, token in self._apart.items())
        self._around = [
            [token] if token is not None and chosen.get(name, default) else []
            for token, name, default in (
                (settings.bos_token_id, "add_bos_token", True),
                (settings.eos_token_id, "add_eos_token", False),
            )
        ]

    @staticmethod
    def _piece_bytes(proto: Any, kinds: Any) -> Iterator[bytes]:
        """The bytes of each piece of the model."""
        for piece in proto.pieces:
            if piece.type == kinds.BYTE and (match := BYTE_TOKEN.fullmatch(piece.piece)):
                yield bytes([int(match[1], 16)])
            elif piece.type == kinds.UNKNOWN:
                yield proto.trainer_spec.unk_surface.encode()
            elif piece.type == kinds.CONTROL:
                yield piece.piece.encode()
            else:
                yield piece.piece.replace(SPACE, " ").encode()

    @property
    def size(self) -> int:
        return self._size

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        before, after = self._around if add_special_tokens else ([], [])
        try:
            return [*before, *self._encode(text), *after]
        except (UnicodeEncodeError, RuntimeError) as error:  # what the package raises for a lone surrogate
            raise not_unicode() from error

    def _encode(self, text: str) -> Iterator[int]:
        end = 0
        for match in self._find_apart.finditer(text) if self._apart else ():
            token = self._apart[match[0]]
            before = text[end : match.start()]
            yield from self._plain(before.rstrip() if token in self._strip_left else before, end)
            yield token
            end = match.end()
            if token in self._strip_right and (spaces := _WHITESPACE.match(text, end)):
                end = spaces.end()
        yield from self._plain(text[end:], end)

    def _plain(self, text: str, begin: int) -> list[int]:
        """The tokens of text without special tokens, which begins there in the whole."""
        if not text:
            return []
        ids: list[int] = (self._later if begin else self._first).encode(text)
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        skipped = self.special_tokens if skip_special_tokens else frozenset[int]()
        parts: list[bytes] = []
        begun = not self.drops_space
        for token in ids:
            if token in skipped:
                continue
            data, begun = (self.own_bytes(token), True) if begun else self.first_bytes(token)
            parts.append(data)
        return b"".join(parts).decode("utf-8", "replace")

    def own_bytes(self, token: int) -> bytes:
        if not 0 <= token < 2**32:
            raise InvalidRequestError(NO_ID)
        return self._bytes.get(token, b"")

    def first_bytes(self, token: int) -> tuple[bytes, bool]:
        data = self.own_bytes(token)
        if token not in self._spaced:
            return data, bool(data)
        data = data[1:]
        return data, bool(data) or not self._strips
