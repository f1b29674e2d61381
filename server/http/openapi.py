"""GET /openapi.json: the API as an OpenAPI document, made from the types that decode bodies and the server's limits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from engine.core.config import ServerConfig
from engine.server.http.errors import json_response
from engine.server.http.openapi_schemas import STREAM, Schema, components, ref
from engine.server.http.plugin_routes import PluginRoute
from engine.server.http.service import Service

PATH = "/openapi.json"
API_VERSION = "1"
"""As in the paths, /v1."""
ERRORS: Mapping[int, str] = {
    400: "The request is malformed, or a parameter is unknown, unsupported or out of range.",
    401: "The API key is missing or wrong.",
    403: "The host name or the web page is not allowed.",
    404: "There is no such model.",
    408: "The request did not arrive in time.",
    413: "The body exceeds server.max_body_bytes or server.max_body_values.",
    414: "The URL is larger than server.max_header_bytes.",
    415: "The body is compressed; the header accept-encoding says what is accepted.",
    429: "Too many requests per minute or in progress.",
    431: "The headers exceed server.max_headers or server.max_header_bytes.",
    500: "The server itself failed.",
    503: "The server is overloaded, shutting down, or its engine has failed.",
    504: "The request took longer than server.request_timeout.",
}
"""What each status of a refusal or failure means."""
ALWAYS = (400, 403, 408, 414, 431, 500, 503)
"""Statuses that any request may get."""
RETRY = (429, 503)
"""Statuses whose responses may say when to try again."""
REQUEST_ID: Schema = {
    "description": "The client's own x-request-id, or one made by the server.",
    "required": True,
    "schema": {"type": "string", "minLength": 1, "maxLength": 128},
}
RETRY_AFTER: Schema = {"description": "Seconds.", "schema": {"type": "string", "pattern": "^[0-9]+$"}}


def routes(service: Service, of_plugins: Sequence[PluginRoute], *, has_keys: bool) -> APIRouter:
    """The route of this module; has_keys: whether clients need an API key."""
    router = APIRouter()
    described = document(service, of_plugins, has_keys=has_keys)

    @router.api_route(PATH, methods=["GET", "HEAD"], response_model=None)
    async def openapi() -> Response:
        return json_response(described)

    return router


def document(service: Service, of_plugins: Sequence[PluginRoute], *, has_keys: bool) -> dict[str, Any]:
    """The OpenAPI document of a server."""
    operations = _Operations(service.limits, has_keys=has_keys)
    body = service.limits.max_body_bytes
    paths = {
        "/v1/completions": {
            "post": operations.post("createCompletion", ref("CompletionBody"), ref("Completion"), body, STREAM)
        },
        "/v1/chat/completions": {
            "post": operations.post("createChatCompletion", ref("ChatBody"), ref("ChatCompletion"), body, STREAM)
        },
        "/tokenize": {"post": operations.post("tokenize", ref("TokenizeBody"), ref("Tokens"), body)},
        "/detokenize": {"post": operations.post("detokenize", ref("DetokenizeBody"), ref("Text"), body)},
        "/v1/models": operations.read("listModels", _json(ref("Models"))),
        "/v1/models/{model}": operations.read(
            "getModel", _json(ref("Model")), parameters=[_parameter("model", "path")], errors=(404,)
        ),
        "/health": operations.read(
            "health",
            _json(ref("Health")),
            parameters=[_parameter("deep", "query", {"type": "string", "enum": ["0", "1"]})],
            public=True,
            other={503: _json({"anyOf": [ref("Health"), ref("Error")]})},
        ),
        "/ping": operations.read(
            "ping", _json(ref("Health")), public=True, other={503: _json({"anyOf": [ref("Health"), ref("Error")]})}
        ),
        "/version": operations.read("version", _json(ref("Version"))),
        "/tokenizer_info": operations.read("tokenizerInfo", _json(ref("TokenizerInfo"))),
        "/metrics": operations.read("metrics", {"text/plain": {"schema": {"type": "string"}}}),
        PATH: operations.read("openapi", _json({"type": "object"})),
    }
    schemas, references = components(service, [kind for one in of_plugins for kind in (one.body, one.answer) if kind])
    for one in of_plugins:
        if one.summary:
            paths.setdefault(one.path, {}).update(_of_plugin(one, operations, references, body))
    described: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "engine", "version": API_VERSION},
        "paths": paths,
        "components": {"schemas": schemas},
    }
    if has_keys:
        described["components"]["securitySchemes"] = {
            "key": {"type": "http", "scheme": "bearer"},
            "keyHeader": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
        described["security"] = [{"key": []}, {"keyHeader": []}]
    return described


def _of_plugin(
    route: PluginRoute, operations: _Operations, references: Mapping[type, Schema], max_bytes: int
) -> dict[str, Any]:
    """The operations of a plugin's route; references: the schema of each type."""
    answer = references[route.answer] if route.answer is not None else {"type": "object"}
    name = "_".join(part for part in route.path.split("/") if part)
    if route.body is None:
        found = operations.read(name, _json(answer))
    else:
        stream: Schema | None = {"description": "Server-sent events."} if route.streams else None
        found = {"post": operations.post(f"post_{name}", references[route.body], answer, max_bytes, stream)}
    return {method: {**operation, "summary": route.summary} for method, operation in found.items()}


class _Operations:
    """Describes operations with the errors that each may have."""

    def __init__(self, limits: ServerConfig, *, has_keys: bool) -> None:
        self._has_keys = has_keys
        self._of_posts = [404, 413, 415]
        """Statuses of requests with a body, besides `ALWAYS`."""
        if limits.rate_limit or limits.concurrency_limit:
            self._of_posts.append(429)
        if limits.request_timeout:
            self._of_posts.append(504)

    def post(
        self, name: str, body: Schema, answer: Schema, max_bytes: int, stream: Schema | None = None
    ) -> dict[str, Any]:
        """An operation with a body; stream: the schema of its server-sent events."""
        content = _json(answer) | ({} if stream is None else {"text/event-stream": {"schema": stream}})
        return {
            "operationId": name,
            "requestBody": {
                "required": True,
                "description": f"At most {max_bytes} bytes.",
                "content": _json(body),
            },
            "responses": self._responses(content, self._of_posts, public=False),
        }

    def read(
        self,
        name: str,
        content: Schema,
        *,
        parameters: Iterable[Schema] = (),
        errors: Iterable[int] = (),
        public: bool = False,
        other: Mapping[int, Schema] = {},
    ) -> dict[str, Any]:
        """The operations GET and HEAD; public: needs no key. other: content of further statuses."""
        common: dict[str, Any] = {"parameters": list(parameters)} | ({"security": []} if public else {})
        responses = self._responses(content, errors, public=public)
        responses |= {str(status): _response(ERRORS[status], also, status) for status, also in other.items()}
        without_content = {
            status: {key: value for key, value in response.items() if key != "content"}
            for status, response in responses.items()
        }
        return {
            "get": {"operationId": name, "responses": responses} | common,
            "head": {"operationId": f"{name}Head", "responses": without_content} | common,
        }

    def _responses(self, content: Schema, errors: Iterable[int], *, public: bool) -> dict[str, Any]:
        statuses = [*ALWAYS, *errors, *([401] if self._has_keys and not public else [])]
        failures = {str(status): _response(ERRORS[status], _json(ref("Error")), status) for status in sorted(statuses)}
        return {"200": _response("The answer.", content)} | failures


def _response(description: str, content: Schema, status: int = 200) -> Schema:
    headers = dict.fromkeys(("x-request-id", "request-id"), REQUEST_ID)
    if status in RETRY:
        headers["retry-after"] = RETRY_AFTER
    return {"description": description, "headers": headers, "content": content}


def _json(schema: Schema) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _parameter(name: str, place: str, schema: Schema | None = None) -> Schema:
    return {"name": name, "in": place, "required": place == "path", "schema": schema or {"type": "string"}}
