"""The contract of the hook `register_routes`: what a plugin's routes may use of the HTTP server."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from typing import Any, TypeVar

from attrs import field, frozen

from engine.core.config import ServerConfig
from engine.core.protocols.answer import AnswerWriter
from engine.core.protocols.conversation import Conversation
from engine.core.protocols.errors import ApiError
from engine.core.types import SamplingParams

API = "1"
"""Version of this contract."""

BodyT = TypeVar("BodyT")
AsgiMessage = MutableMapping[str, Any]
Reply = Callable[
    [MutableMapping[str, Any], Callable[[], Awaitable[AsgiMessage]], Callable[[AsgiMessage], Awaitable[None]]],
    Awaitable[None],
]
"""Sends the response to one request: an ASGI application, such as `Routes.respond` and `Routes.json` return."""


@frozen
class Call:
    """What a request says besides its body."""

    headers: Mapping[str, str] = field(factory=dict)
    """Headers by name, in lower case."""
    query: Mapping[str, str] = field(factory=dict)
    """Parameters of the URL."""


class Routes(ABC):
    """Adds a plugin's routes to the HTTP server, and gives their handlers what they may use of the server.

    What holds for built-in routes holds for these: host, origin and API key are checked, a POST counts for the limits
    of its key, server.request_timeout ends it, the body has at most server.max_body_bytes, a client that leaves ends
    its request, every request has an x-request-id and a line in the access log, and no POST is accepted while the
    server shuts down.
    """

    @abstractmethod
    def post(
        self,
        path: str,
        body: type[BodyT],
        handler: Callable[[BodyT, Call], Awaitable[Reply]],
        *,
        api: str,
        summary: str = "",
        answer: type | None = None,
        streams: bool = False,
        error_body: Callable[[ApiError], object] | None = None,
    ) -> None:
        """Answer POST requests to `path`.

        path: a literal path, such as /v1/mine, that no other route has.
        body: the type of the JSON body, which msgspec decodes: a msgspec.Struct, with forbid_unknown_fields unless
        unknown parameters are to be ignored. What it refuses is a 400 that names the parameter.
        handler: checks a request and returns its reply; runs in the event loop, so it must not work for more than a few
        milliseconds without an await. It may raise ApiError, or InvalidRequestError for a 400; any other exception is a
        500, logged with the plugin's name.
        api: version of this contract that the plugin was written for.
        summary: one line for /openapi.json, which describes the path if this is not empty; answer: the type of the
        JSON answer there; streams: whether the answer may be server-sent events.
        error_body: the JSON body of an error response to this path or one below it, those of keys and limits included;
        None: OpenAI's.

        Raises PluginError for an invalid argument or a path that is taken. Unless the hook catches it, none of the
        plugin's routes is added.
        """

    @abstractmethod
    def get(
        self,
        path: str,
        handler: Callable[[Call], Awaitable[Reply]],
        *,
        api: str,
        summary: str = "",
        answer: type | None = None,
        error_body: Callable[[ApiError], object] | None = None,
    ) -> None:
        """Answer GET and HEAD requests to `path`. See `post`."""

    @property
    @abstractmethod
    def model(self) -> str:
        """Name of the served model."""

    @property
    @abstractmethod
    def max_len(self) -> int:
        """Length of the model's context, tokens."""

    @property
    @abstractmethod
    def limits(self) -> ServerConfig:
        """The settings [server]."""

    @property
    @abstractmethod
    def chat_template(self) -> str:
        """Source of the model's chat template, the one for tools if there are several; empty if there is none."""

    @abstractmethod
    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """A short conversation as the chat template renders it, to find out what the template can express.

        messages: see Conversation. Raises InvalidRequestError if the template rejects them.
        """

    @property
    @abstractmethod
    def default_params(self) -> SamplingParams:
        """The model's default sampling parameters, for those that a request leaves out."""

    @abstractmethod
    def check_model(self, model: str | None) -> None:
        """Raise ApiError with status 404 unless `model` is the served model or None."""

    @abstractmethod
    async def respond(
        self,
        name: str,
        conversation: Conversation,
        writer: AnswerWriter,
        *,
        stream: bool,
        headers: Mapping[str, str] | None = None,
    ) -> Reply:
        """Check, render and tokenize a conversation; the reply, which generates the answer when it is sent.

        name: id of the response, unique; also its x-request-id unless the client gives one. writer: writes the answer.
        stream: whether as server-sent events. headers: further headers of the response. Raises ApiError or
        InvalidRequestError.
        """

    @abstractmethod
    async def count_tokens(self, conversation: Conversation) -> int:
        """Number of tokens of a conversation's prompt. Raises ApiError or InvalidRequestError."""

    @abstractmethod
    def token_bytes(self, token: int) -> bytes:
        """The bytes of a token's text, for log probabilities."""

    @abstractmethod
    def new_call_id(self) -> str:
        """An id for a tool call to which the model has given none, as the model's format has them."""

    @abstractmethod
    def json(self, body: object, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Reply:
        """A reply with a JSON body. body: anything that msgspec can encode."""
