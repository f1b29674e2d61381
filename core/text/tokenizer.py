"""The checkpoint's tokenizer and chat template: converts text and conversations to tokens, and tokens to text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.core.config.tree import ModelConfig
from engine.core.errors import CheckpointError, ConfigError, InvalidRequestError
from engine.core.parsers.base import Templates
from engine.core.parsers.chat_templates import syntax_error
from engine.core.text.sentencepiece_vocabulary import has_sentencepiece_model, open_sentencepiece
from engine.core.text.token_cache import Separators
from engine.core.text.token_stream import REPLACEMENT, TokenStream
from engine.core.text.vocabulary import LibraryVocabulary, Vocabulary
from engine.core.weights.checkpoint import model_directory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_VOCABULARIES = ("tokenizer.json", "*.model", "vocab.json", "vocab.txt", "tekken.json", "*.tiktoken")
_MARK = "\ufeff"
"""Byte order mark, with which editors on Windows begin files in UTF-8."""
_RENDERING = frozenset(
    {"conversation", "chat_template", "tokenize", "sanitize_control_tokens", "padding", "truncation", "max_length"}
    | {"return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"}
)
"""Arguments of transformers' apply_chat_template; not available as variables of the template."""
_PIECE = 2**15
"""Characters of a long text that are tokenized at a time while only the number of tokens is in question."""

_CUT = 8
"""Tokens that cutting a text at one place may add."""


class Tokenizer:
    """A checkpoint's tokenizer and chat template. Safe to use from several threads."""

    def __init__(
        self,
        wrapped: PreTrainedTokenizerFast,
        chat_template: str | None = None,
        vocabulary: Vocabulary | None = None,
    ) -> None:
        """wrapped: transformers' tokenizer; chat_template: Jinja source, instead of the checkpoint's own.

        vocabulary: converts text and tokens; None: `wrapped` does.
        """
        self._wrapped = wrapped
        self._chat_template = chat_template
        self._vocabulary = vocabulary or LibraryVocabulary(wrapped.backend_tokenizer)
        self._own_bytes: dict[int, bytes | None] = {}
        self._bytes_after_text: dict[int, bytes] = {}
        """`token_bytes` of tokens without bytes of their own, cached."""
        self._tables: dict[frozenset[int] | None, Mapping[int, bytes]] = {}  # by the special tokens kept; None: all
        self.special_tokens = self._vocabulary.special_tokens
        """Tokens left out of the text if `skip_special_tokens`."""

    @classmethod
    def open(cls, path: str | Path, trust_remote_code: bool = False, chat_template: str | None = None) -> Tokenizer:
        """Read the tokenizer of a model directory; does not import torch if there is a tokenizer.json.

        Raises CheckpointError.
        """
        directory = model_directory(path)
        if not trust_remote_code and not any(any(directory.glob(name)) for name in _VOCABULARIES):
            raise CheckpointError(
                f"{directory} has no tokenizer (no tokenizer.json, nor any other vocabulary); copy the model's "
                "tokenizer files there, or name a directory that has them with --tokenizer"
            )
        loader: Any
        try:
            if has_sentencepiece_model(directory) and not trust_remote_code:
                templates, vocabulary = open_sentencepiece(directory)
                return cls(templates, chat_template, vocabulary)
            if (directory / "tokenizer.json").is_file() and not trust_remote_code:
                from transformers import PreTrainedTokenizerFast as loader  # noqa: N813
            else:
                from transformers import AutoTokenizer as loader  # noqa: N813
            wrapped = loader.from_pretrained(str(directory), trust_remote_code=trust_remote_code, local_files_only=True)
        except CheckpointError:
            raise
        except Exception as error:  # transformers raises errors of many types for files it cannot parse
            raise CheckpointError(f"the tokenizer in {directory} cannot be read: {_cause(directory, error)}") from error
        if getattr(wrapped, "backend_tokenizer", None) is None:
            raise CheckpointError(
                f"the tokenizer in {directory} is written in Python ({type(wrapped).__name__}); only tokenizers of the "
                "`tokenizers` library are supported: convert it to a tokenizer.json"
            )
        return cls(wrapped, chat_template)

    @classmethod
    def of_model(cls, model: ModelConfig) -> Tokenizer:
        """The tokenizer of a configuration. Raises CheckpointError, or ConfigError for the template file."""
        file = model.chat_template
        try:
            template = Path(file).read_text(encoding="utf-8") if file else None
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"the chat template {file} cannot be read ({error}); check --chat-template") from None
        if template is not None and (wrong := syntax_error(template)):
            raise ConfigError(f"the chat template {file} is not valid Jinja ({wrong}); check --chat-template")
        return cls.open(model.tokenizer or model.path, model.trust_remote_code, template)

    @property
    def eos_token_id(self) -> int | None:
        """The end-of-sequence token, if the tokenizer has one."""
        token: int | None = self._wrapped.eos_token_id
        return token

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added tokens included."""
        return self._vocabulary.size

    @property
    def separators(self) -> Separators | None:
        """Where a text can be cut so that the tokens of the parts are those of the whole; None: nowhere."""
        return self._vocabulary.separators

    @property
    def has_chat_template(self) -> bool:
        """Whether there is a chat template, which `chat` needs."""
        return bool(self._chat_template or self._wrapped.chat_template)

    @property
    def description(self) -> dict[str, Any]:
        """Class, special tokens and chat template, under the names that they have in tokenizer_config.json."""
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        tokens = {name: None if (token := getattr(self._wrapped, name, None)) is None else str(token) for name in names}
        return {
            "tokenizer_class": type(self._wrapped).__name__,
            **tokens,
            "vocab_size": self.vocab_size,
            "chat_template": self.templates.chat or None,
        }

    @property
    def templates(self) -> Templates:
        """The sources of the chat template for tools, and transformers' response template."""
        try:
            chat = self._template([{}]) if self.has_chat_template else ""
        except ValueError:  # several templates, and none is the default
            chat = ""
        return Templates(chat=chat, response=getattr(self._wrapped, "response_template", None))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Tokens of a text. add_special_tokens: add what the tokenizer adds, usually a beginning-of-text token.

        Raises InvalidRequestError for text that is not Unicode.
        """
        return self._vocabulary.encode(text, add_special_tokens)

    def exceeds(self, text: str, max_tokens: int) -> bool:
        """Whether a text surely has more than `max_tokens` tokens. The cost is bounded by `max_tokens`.

        Pieces of the text have a few more tokens than the whole, where words are cut: so the pieces must have twice as
        many, and some more. False: unknown.
        """
        count = 0
        for start in range(0, len(text), _PIECE):
            count += len(self.encode(text[start : start + _PIECE], add_special_tokens=False)) - _CUT
            if count > 2 * max_tokens:
                return True
        return False

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of tokens; ids outside the vocabulary have no text.

        Bytes that are not UTF-8 become U+FFFD and, as in the Detokenizer, do not affect the bytes next to them. (For a
        byte-fallback tokenizer, the `tokenizers` library replaces a whole run of bytes if one of them is invalid.)
        """
        text = self.decode_plainly(ids, skip_special_tokens)
        if self._vocabulary.has_byte_tokens and REPLACEMENT in text:
            stream = TokenStream(self, skip_special_tokens)
            text = "".join(map(stream.push, ids)) + stream.flush()
        return text

    def chat(self, messages: Sequence[Mapping[str, Any]], **arguments: Any) -> list[int]:
        """Tokens of a conversation; arguments and errors as those of `render_chat`."""
        return self.encode(self.render_chat(messages, **arguments), add_special_tokens=False)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
        add_generation_prompt: bool | None = None,
        **variables: Any,
    ) -> str:
        """A conversation as text, up to where the model's answer begins, or where its last message is continued.

        messages: as in OpenAI's API, content as text. tools: JSON schemas. variables: additional template variables.
        Raises InvalidRequestError if there is no valid template, or the template rejects the conversation.
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
        template = self._template(schemas)
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
        except Exception as error:  # a template is a program, run on input from the client
            if wrong := syntax_error(template):
                raise InvalidRequestError(
                    f"this model's chat template is not valid Jinja ({wrong}); start with --chat-template, or use"
                    " completions instead",
                    "messages",
                ) from error
            raise InvalidRequestError(f"the chat template rejects this conversation: {error}", "messages") from error
        rendered: str = text
        return rendered

    def _template(self, tools: list[Any] | None) -> str:
        """The source of the chat template for these tools. Raises ValueError if there are several without a default."""
        template: str = self._wrapped.get_chat_template(self._chat_template, tools)
        return template.removeprefix(_MARK)  # else it would be a part of each prompt

    def token_bytes(self, token: int) -> bytes:
        """The UTF-8 bytes that a token adds to a text; possibly a part of a character."""
        own = self.own_bytes(token)
        if own is not None:
            return own
        if token not in self._bytes_after_text:
            before = self.encode("a", add_special_tokens=False)
            known = len(self.decode_plainly(before, False))
            self._bytes_after_text[token] = self.decode_plainly([*before, token], False)[known:].encode()
        return self._bytes_after_text[token]

    def own_bytes(self, token: int) -> bytes | None:
        """The bytes of a token whose text does not depend on its neighbours; None if the text does.

        Empty for an id outside the vocabulary.
        """
        if token not in self._own_bytes:
            own = self._vocabulary.own_bytes(token)
            if own == b"":  # ids outside the vocabulary are not kept: there is no limit to their number
                return own
            self._own_bytes[token] = own
        return self._own_bytes[token]

    def byte_table(self, skip_special_tokens: bool, keep: frozenset[int] = frozenset()) -> Mapping[int, bytes] | None:
        """The bytes by token, empty for skipped ones; None unless every token has bytes of its own (`own_bytes`).

        keep: special tokens that are not skipped.
        """
        if not self._vocabulary.has_bytes:
            return None
        kept = keep if skip_special_tokens else None
        if kept not in self._tables:
            silent = frozenset[int]() if kept is None else self.special_tokens - kept
            self._tables[kept] = _ByteTable(self, silent)
        return self._tables[kept]

    @property
    def drops_space(self) -> bool:
        """Whether a text loses a space at its beginning: tokens have other bytes there (`first_bytes`)."""
        return self._vocabulary.drops_space

    def first_bytes(self, token: int) -> tuple[bytes, bool]:
        """The bytes of a token before which there is no text, and whether there is text after it."""
        return self._vocabulary.first_bytes(token)

    def decode_plainly(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Decode by the library alone, which may replace more than the invalid bytes."""
        return self._vocabulary.decode(ids, skip_special_tokens)

    @property
    def splits_characters(self) -> bool:
        """Whether a token may be part of a character although `own_bytes` is None: so for unknown decoders."""
        return not (self._vocabulary.has_bytes or self._vocabulary.has_byte_tokens)


def _cause(directory: Path, error: Exception) -> str:
    """Why transformers cannot read the tokenizer: what the library says, and which files have a byte order mark."""
    marked = [file.name for file in sorted(directory.glob("*.json")) if _begins_with_mark(file)]
    if not marked:
        return str(error)
    return f"{error}; {' and '.join(marked)} may be the cause: save as UTF-8 without a byte order mark"


def _begins_with_mark(file: Path) -> bool:
    try:
        with file.open("rb") as content:
            return content.read(3) == _MARK.encode()
    except OSError:  # a link to nowhere, or a directory
        return False


class _ByteTable(dict[int, bytes]):
    """The bytes by token, each computed on first use."""

    def __init__(self, tokenizer: Tokenizer, silent: frozenset[int]) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._silent = silent

    def __missing__(self, token: int) -> bytes:
        own = b"" if token in self._silent else self._tokenizer.own_bytes(token) or b""
        if own or token in self._silent:  # ids outside the vocabulary are not kept: there is no limit to their number
            self[token] = own
        return own
