"""POST /tokenize and /detokenize."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from engine.server.http.errors import invalid, json_response
from engine.server.http.params import check_tokens
from engine.server.http.request_bodies import DetokenizeBody, TokenizeBody, read
from engine.server.http.service import Service


def routes(service: Service) -> APIRouter:
    """The routes of this module."""
    router = APIRouter()

    @router.post("/tokenize", response_model=None)
    async def tokenize(request: Request) -> Response:
        body = await read(request, TokenizeBody, service.limits.max_body_bytes)
        service.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise invalid("give either prompt or messages", "prompt")
        if body.prompt is not None:
            tokens = await service.encode(body.prompt, special=body.add_special_tokens is not False)
        elif body.add_special_tokens is not None:
            raise invalid("add_special_tokens is allowed only with prompt", "add_special_tokens")
        else:
            tokens = await service.encode_chat(body.messages or [])
        return json_response({"tokens": tokens, "count": len(tokens), "max_model_len": service.max_len})

    @router.post("/detokenize", response_model=None)
    async def detokenize(request: Request) -> Response:
        body = await read(request, DetokenizeBody, service.limits.max_body_bytes)
        service.check_model(body.model)
        check_tokens(body.tokens, service.vocab_size, "tokens")
        text = service.tokenizer.decode(body.tokens, skip_special_tokens=bool(body.skip_special_tokens))
        return json_response({"prompt": text})

    return router
