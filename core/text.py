"""Text to tokens and back: the checkpoint's tokenizer, and text out of tokens one at a time."""

from __future__ import annotations

import codecs
import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import frozen

from engine.core.checkpoint import model_directory
from engine.core.config import ModelConfig
from engine.core.errors import CheckpointError, ConfigError, InvalidRequestError
from engine.core.types import FINISH_STOP, Output, SamplingParams, TokenLogprobs

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_VOCABULARIES = ("tokenizer.json", "*.model", "vocab.json", "vocab.txt", "tekken.json", "*.tiktoken")
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_RENDERING = frozenset(
    {"conversation", "chat_template", "tokenize", "sanitize_control_tokens", "padding", "truncation", "max_length"}
    | {"return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"}
)
"""Arguments of transformers' apply_chat_template that are no variables of the template."""
_NO_ID = "a token id is negative or above 2**32"
_REPLACEMENT = "\ufffd"
_CONTEXT = 8
"""Tokens before the next one that are decoded with it. One would do for spaces; a character of 4 bytes wants 4."""


class Tokenizer:
    """A checkpoint's tokenizer and chat template. Safe to use from several threads."""

    def __init__(self, wrapped: PreTrainedTokenizerFast, chat_template: str | None = None) -> None:
        """wrapped: transformers' tokenizer; chat_template: Jinja source, instead of the checkpoint's own."""
        self._wrapped = wrapped
        self._chat_template = chat_template
        self._backend = wrapped.backend_tokenizer
        # Set per call by transformers, which is not safe with threads; here no text is cut or filled up, ever.
        self._backend.no_truncation()
        self._backend.no_padding()
        decoder = json.loads(self._backend.decoder.__getstate__()) if self._backend.decoder is not None else {}
        parts = decoder.get("decoders", [decoder])
        self._byte_level = [part.get("type") for part in parts] == ["ByteLevel"]
        self._byte_fallback = any(part.get("type") == "ByteFallback" for part in parts)
        self._own_bytes: dict[int, bytes | None] = {}
        self._tables: dict[bool, Mapping[int, bytes]] = {}
        added = self._backend.get_added_tokens_decoder()
        self.special_tokens = frozenset(token for token, about in added.items() if about.special)
        """Left out of the text on request."""

    @classmethod
    def open(cls, path: str | Path, trust_remote_code: bool = False, chat_template: str | None = None) -> Tokenizer:
        """Read the tokenizer of a model directory; torch is not imported when there is a tokenizer.json.

        Raises CheckpointError.
        """
        directory = model_directory(path)
        if not trust_remote_code and not any(any(directory.glob(name)) for name in _VOCABULARIES):
            raise CheckpointError(
                f"{directory} has no tokenizer (no tokenizer.json, nor any other vocabulary); copy the model's "
                "tokenizer files there, or give prompts as token ids"
            )
        loader: Any
        try:
            if (directory / "tokenizer.json").is_file() and not trust_remote_code:
                from transformers import PreTrainedTokenizerFast as loader  # noqa: N813
            else:
                from transformers import AutoTokenizer as loader  # noqa: N813
            wrapped = loader.from_pretrained(str(directory), trust_remote_code=trust_remote_code, local_files_only=True)
        except Exception as error:  # transformers raises of every kind for files it cannot make sense of
            raise CheckpointError(f"the tokenizer in {directory} cannot be read: {error}") from error
        if getattr(wrapped, "backend_tokenizer", None) is None:
            raise CheckpointError(
                f"the tokenizer in {directory} is written in Python ({type(wrapped).__name__}); only those that the "
                "`tokenizers` library can run are supported: convert it to a tokenizer.json"
            )
        return cls(wrapped, chat_template)

    @classmethod
    def of_model(cls, model: ModelConfig) -> Tokenizer:
        """The tokenizer that a configuration names. Raises CheckpointError or, for a bad template file, ConfigError."""
        file = model.chat_template
        try:
            template = Path(file).read_text(encoding="utf-8") if file else None
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"the chat template {file} cannot be read ({error}); check --chat-template") from None
        return cls.open(model.tokenizer or model.path, model.trust_remote_code, template)

    @property
    def eos_token_id(self) -> int | None:
        """The token that ends a text, if the tokenizer names one."""
        token: int | None = self._wrapped.eos_token_id
        return token

    @property
    def vocab_size(self) -> int:
        """How many tokens there are, added ones included."""
        size: int = self._backend.get_vocab_size(with_added_tokens=True)
        return size

    @property
    def has_chat_template(self) -> bool:
        """Whether `chat` can work."""
        return bool(self._chat_template or self._wrapped.chat_template)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Tokens of a text, with what the tokenizer puts around it (as a rule: the beginning-of-text token)."""
        try:
            # A batch of one: only then does the library let other threads run, and a long text takes seconds.
            [encoding] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except TypeError as error:  # what the library says of a lone surrogate, which JSON can smuggle in
            raise InvalidRequestError("the text has half of a surrogate pair, so it is not Unicode") from error
        ids: list[int] = encoding.ids
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of tokens; ids that are not in the vocabulary have none.

        Bytes that are not UTF-8 become U+FFFD. As in the Detokenizer, they leave the bytes beside them alone; the
        `tokenizers` library drops all bytes of a run together when one of a byte-fallback tokenizer's is wrong.
        """
        text = self.decode_plainly(ids, skip_special_tokens)
        if self._byte_fallback and _REPLACEMENT in text:
            stream = TokenStream(self, skip_special_tokens)
            text = "".join(map(stream.push, ids)) + stream.flush()
        return text

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
        add_generation_prompt: bool | None = None,
        **variables: Any,
    ) -> list[int]:
        """Tokens of a conversation, up to where the model's answer begins, or where its last message goes on.

        messages: as in OpenAI's API, content as text; tools: JSON schemas; variables: further ones of the template.
        Raises InvalidRequestError when there is no template, or it refuses the conversation.
        """
        if not self.has_chat_template:
            raise InvalidRequestError(
                "this model has no chat template; start with --chat-template, or use completions instead", "messages"
            )
        if not messages:
            raise InvalidRequestError("messages is empty; give at least one", "messages")
        reserved = sorted(_RENDERING & variables.keys())
        if reserved:
            raise InvalidRequestError(f"{reserved[0]} is not a variable of a chat template", "chat_template_kwargs")
        schemas: list[Any] | None = [dict(tool) for tool in tools] if tools else None
        template = self._wrapped.get_chat_template(self._chat_template, schemas)
        if schemas and "tools" not in template:
            raise InvalidRequestError("this model's chat template has no place for tools", "tools")
        if add_generation_prompt is None:
            add_generation_prompt = not continue_final_message
        try:
            text: Any = self._wrapped.apply_chat_template(
                [dict(message) for message in messages],
                tools=schemas,
                chat_template=template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tokenize=False,
                **variables,
            )
        except Exception as error:  # a template is a program run on what the client sent
            raise InvalidRequestError(f"the chat template refuses this conversation: {error}", "messages") from error
        return self.encode(text, add_special_tokens=False)

    def token_text(self, token: int) -> str:
        """What a token adds to a text; bytes that are no whole character become U+FFFD."""
        return self.token_bytes(token).decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        """What a token adds to a text, in UTF-8, or the part of a character it stands for."""
        own = self.own_bytes(token)
        if own is not None:
            return own
        before = self.encode("a", add_special_tokens=False)
        known = len(self.decode_plainly(before, False))
        return self.decode_plainly([*before, token], False)[known:].encode()

    def own_bytes(self, token: int) -> bytes | None:
        """The bytes that a token stands for whatever is beside it; None for a token of whole characters, whose text
        depends on its neighbours; empty for an id not in the vocabulary."""
        if token not in self._own_bytes:
            content = self._content(token)
            if content is None:
                return b""
            self._own_bytes[token] = self._find_own_bytes(content)
        return self._own_bytes[token]

    def byte_table(self, skip_special_tokens: bool) -> Mapping[int, bytes] | None:
        """The bytes of each token, none of those left out; None where some have none of their own (`own_bytes`)."""
        if not self._byte_level:
            return None
        if skip_special_tokens not in self._tables:
            silent = self.special_tokens if skip_special_tokens else frozenset[int]()
            self._tables[skip_special_tokens] = _ByteTable(self, silent)
        return self._tables[skip_special_tokens]

    def decode_plainly(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """As the `tokenizers` library decodes, whatever it does to bytes that are not UTF-8."""
        try:
            text: str = self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        except OverflowError:
            raise InvalidRequestError(_NO_ID) from None
        return text

    @property
    def splits_characters(self) -> bool:
        """Whether a token may be part of a character without `own_bytes` telling: an unusual decoder."""
        return not (self._byte_level or self._byte_fallback)

    def _content(self, token: int) -> str | None:
        """A token as the vocabulary writes it."""
        try:
            content: str | None = self._backend.id_to_token(token)
        except OverflowError:
            raise InvalidRequestError(_NO_ID) from None
        return content

    def _find_own_bytes(self, content: str) -> bytes | None:
        if self._byte_level:
            if all(character in _BYTE_OF for character in content):
                return bytes(_BYTE_OF[character] for character in content)
            return content.encode()
        if self._byte_fallback and (match := _BYTE_TOKEN.fullmatch(content)):
            return bytes([int(match[1], 16)])
        return None


class _ByteTable(dict[int, bytes]):
    """The bytes of tokens, filled as they are asked for."""

    def __init__(self, tokenizer: Tokenizer, silent: frozenset[int]) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._silent = silent

    def __missing__(self, token: int) -> bytes:
        own = b"" if token in self._silent else self._tokenizer.own_bytes(token) or b""
        if own or token in self._silent:  # not for ids outside the vocabulary, of which there is no end
            self[token] = own
        return own


class TokenStream:
    """Decodes tokens one by one into text that never changes afterwards, at a constant cost each.

    Tokens that stand for bytes go through an incremental UTF-8 decoder. What another adds shows when it is decoded
    behind a few tokens before it: alone, it would lack its space, or have one too many.

    The `tokenizers` library has a DecodeStream, which is not used: it keeps bytes that are no character back for as
    long as more of them come, and for good when the text ends, and it is slower than a table of bytes.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool, context: Sequence[int] = ()) -> None:
        """context: tokens before the first; a character that they leave incomplete is put out when it is whole."""
        self._tokenizer = tokenizer
        self._skipped: frozenset[int] = tokenizer.special_tokens if skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._incomplete = False
        """Whether the decoder holds the beginning of a character; unused without the table."""
        self._table = tokenizer.byte_table(skip_special_tokens)
        self._window: list[int] = []
        """The last tokens that have text; unused where a table has the bytes of all."""
        with_text = (token for token in reversed(context) if not self._is_silent(token))
        for token in reversed(list(itertools.islice(with_text, _CONTEXT))):
            self.push(token)

    def push(self, token: int) -> str:
        """The text that is certain after one more token, beyond that put out already."""
        if self._table is not None:
            return self._whole(self._table[token])
        if self._is_silent(token):
            return ""
        own = self._tokenizer.own_bytes(token)
        if own == b" " and not self._window:
            new = self._decode([token])  # which drops a space at the very beginning, if this decoder does
        elif own is not None:
            new = self._utf8.decode(own)
        else:
            told = self._certain(self._decode(self._window))
            text = self._decode([*self._window, token])
            new = self._utf8.decode(b"", final=True) + text[told : self._certain(text)]
        self._window = [*self._window[1 - _CONTEXT :], token]
        return new

    def extend(self, tokens: Sequence[int]) -> str:
        """As `push` of each in turn."""
        if self._table is None:
            return "".join(map(self.push, tokens))
        if len(tokens) == 1:
            return self._whole(self._table[tokens[0]])
        return self._whole(b"".join([self._table[token] for token in tokens]))

    def flush(self) -> str:
        """The rest, at the end: U+FFFD for an incomplete character."""
        text = self._decode(self._window)
        return self._utf8.decode(b"", final=True) + text[self._certain(text) :]

    def _whole(self, new: bytes) -> str:
        """The characters that more bytes complete."""
        if not self._incomplete:
            try:
                return new.decode()
            except UnicodeDecodeError:
                pass  # they end within a character, or are none
        text = self._utf8.decode(new)
        self._incomplete = bool(self._utf8.getstate()[0])
        return text

    def _is_silent(self, token: int) -> bool:
        return token in self._skipped or self._tokenizer.own_bytes(token) == b""

    def _decode(self, ids: list[int]) -> str:
        # Nothing in the window is to be skipped.
        return self._tokenizer.decode_plainly(ids, False)

    def _certain(self, text: str) -> int:
        """How many characters no further token can change."""
        return len(text) - (self._tokenizer.splits_characters and text.endswith(_REPLACEMENT))


@frozen(kw_only=True)
class TextDelta:
    """What is new in a request's text."""

    text: str = ""
    tokens: tuple[int, ...] = ()
    """Tokens that count as output: none after the one that completed a stop string. Their text may come later."""
    offsets: tuple[int, ...] = ()
    """For each token, where in the whole output text its own begins, in characters, a stop string and held text
    counted in; the same for tokens that share a character."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """For each token, when asked for."""
    finish_reason: str | None = None
    """None while running, else stop, length, abort or error."""
    stop_string: str | None = None
    """The stop string that ended the text, if one did."""


class Detokenizer:
    """Turns one request's outputs into text, and ends it at a stop string.

    Text that may be the beginning of a stop string is held back until it is known. Of several stop strings the one
    completed first counts, of those the one that begins first; so the result does not depend on how the text is cut
    into tokens. A stop string completed by one of the first min_tokens tokens does not count.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], params: SamplingParams) -> None:
        self._stream = TokenStream(tokenizer, params.skip_special_tokens, prompt)
        self._stops = params.stop
        self._min_tokens = params.min_tokens
        self._told = 0
        self._held = ""
        self._finished = False
        self.num_tokens = 0
        """Tokens so far that count as output."""
        self.stop_string: str | None = None
        """The stop string that has ended the text, if one has."""

    def push(self, tokens: Sequence[int]) -> str:
        """As the text of `feed` for an output that has these tokens and nothing else, at a fraction of the cost.

        Where `stop_string` is set afterwards, the text has ended.
        """
        if self._finished:
            return ""
        if not self._stops:
            self.num_tokens += len(tokens)
            text = self._stream.extend(tokens)
            self._told += len(text)
            return text
        texts: list[str] = []
        for token in tokens:
            texts.append(self._next(token))
            if self._finished:
                break
        return "".join(texts)

    def feed(self, output: Output) -> TextDelta:
        """The text after one more output. A TextDelta with a stop string ends the request, which the caller then
        aborts; outputs that come after the end give an empty TextDelta.
        """
        if self._finished:
            return TextDelta()
        texts: list[str] = []
        offsets: list[int] = []
        spoken = output.tokens if output.stop_token is None else output.tokens[:-1]
        for token in spoken:
            offsets.append(self._told + len(self._held))
            texts.append(self._next(token))
            if self._finished:
                break
        if not self._finished and output.finish_reason is not None:
            texts += [self._pass(self._stream.flush()), self._held]
            self._told += len(self._held)
        if self.stop_string is None and output.stop_token is not None:
            offsets.append(self._told)
            self.num_tokens += 1
        self._finished = self._finished or output.finish_reason is not None
        return TextDelta(
            text="".join(texts),
            tokens=output.tokens[: len(offsets)],
            offsets=tuple(offsets),
            logprobs=output.logprobs[: len(offsets)],
            finish_reason=output.finish_reason if self.stop_string is None else FINISH_STOP,
            stop_string=self.stop_string,
        )

    def _next(self, token: int) -> str:
        """What can be put out after one more token."""
        self.num_tokens += 1
        return self._pass(self._stream.push(token))

    def _pass(self, new: str) -> str:
        """What of the held text and the new can be put out; the text is finished when a stop string is in it."""
        held, old = self._held + new, len(self._held)
        stop = _first_stop(held, old, self._stops) if self.num_tokens > self._min_tokens else None
        if stop is None:
            end = _open_end(held, self._stops)
            self._held = held[end:]
        else:
            end, self.stop_string = stop
            self._held = ""
            self._finished = True
        self._told += end
        return held[:end]


def _first_stop(text: str, old: int, stops: Iterable[str]) -> tuple[int, str] | None:
    """Where the stop string begins that is completed first in the text after its first `old` characters, and which."""
    starts = ((text.find(stop, max(0, old - len(stop) + 1)), stop) for stop in stops)
    found = [(start + len(stop), start, stop) for start, stop in starts if start >= 0]
    if not found:
        return None
    _, start, stop = min(found)
    return start, stop


def _open_end(text: str, stops: Iterable[str]) -> int:
    """Where the longest end of the text begins that is the beginning of a stop string, but not the whole of it."""
    least = len(text)
    for stop in stops:
        start = text.find(stop[0], max(0, len(text) - len(stop) + 1), least)
        while start >= 0 and not stop.startswith(text[start:]):
            start = text.find(stop[0], start + 1, least)
        least = least if start < 0 else start
    return least


def _byte_alphabet() -> dict[str, int]:
    """The byte each character of a byte-level vocabulary stands for: printable Latin-1 for itself, and from U+0100 on
    the other bytes in order (the format of GPT-2's vocabulary)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + at): byte for at, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
