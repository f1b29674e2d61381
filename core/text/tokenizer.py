"""The checkpoint's tokenizer and chat template: text to tokens and back."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.core.config.tree import ModelConfig
from engine.core.errors import CheckpointError, ConfigError, InvalidRequestError
from engine.core.text.token_stream import REPLACEMENT, TokenStream
from engine.core.weights.checkpoint import model_directory

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
        if self._byte_fallback and REPLACEMENT in text:
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


def _byte_alphabet() -> dict[str, int]:
    """The byte each character of a byte-level vocabulary stands for: printable Latin-1 for itself, and from U+0100 on
    the other bytes in order (the format of GPT-2's vocabulary)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + at): byte for at, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
