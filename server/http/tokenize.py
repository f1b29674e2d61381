"""POST /tokenize and /detokenize, GET /tokenizer_info."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from engine.server.http.errors import READ, invalid, json_response
from engine.server.http.params import check_tokens
from engine.server.http.request_bodies import DetokenizeBody, TokenizeBody, read
from engine.server.http.responses import SendResponse, prepared
from engine.server.http.service import Service


def routes(service: Service) -> APIRouter:
    """The routes of this module."""
    router = APIRouter()

    @router.post("/tokenize", response_model=None)
    async def tokenize(request: Request) -> Response:
        body = await read(request, TokenizeBody, service.limits)

        async def respond() -> SendResponse:
            tokens = await _tokenize(service, body)
            return json_response({"tokens": tokens, "count": len(tokens), "max_model_len": service.max_len})

        return prepared(respond)

    @router.post("/detokenize", response_model=None)
    async def detokenize(request: Request) -> Response:
        body = await read(request, DetokenizeBody, service.limits)

        async def respond() -> SendResponse:
            return json_response({"prompt": await _detokenize(service, body)})

        return prepared(respond)

    @router.api_route("/tokenizer_info", methods=READ, response_model=None)
    async def tokenizer_info() -> Response:
        return json_response(service.tokenizer.description | {"model_max_length": service.max_len})

    return router


async def _tokenize(service: Service, body: TokenizeBody) -> list[int]:
    service.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise invalid("give either prompt or messages", "prompt")
    if body.prompt is not None:
        return await service.encode(body.prompt, special=body.add_special_tokens is not False)
    if body.add_special_tokens is not None:
        raise invalid("add_special_tokens is allowed only with prompt", "add_special_tokens")
    return list((await service.encode_chat(body.messages or [])).tokens)


async def _detokenize(service: Service, body: DetokenizeBody) -> str:
    service.check_model(body.model)
    if len(body.tokens) > service.max_len:
        raise invalid(
            f"tokens has {len(body.tokens)} token ids, but this model's context holds {service.max_len}; "
            "send them in several requests",
            "tokens",
        )
    check_tokens(body.tokens, service.vocab_size, "tokens")
    return await service.decode(body.tokens, bool(body.skip_special_tokens))
