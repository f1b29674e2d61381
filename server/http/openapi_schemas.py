"""JSON schemas of the bodies and responses: what msgspec's types do not say, and the shape of each response."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from engine.core.types import MAX_SEED
from engine.server.http.messages import ROLES, RefusalPart, TextPart
from engine.server.http.params import MAX_LOGIT_BIAS, RANDOM_SEED
from engine.server.http.request_bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from engine.server.http.service import Service

Schema = Mapping[str, Any]

STRING: Schema = {"type": "string"}
NUMBER: Schema = {"type": "number"}
COUNT: Schema = {"type": "integer", "minimum": 0}
NULL: Schema = {"type": "null"}
REF = "#/components/schemas/"
OF_PLUGINS = "plugin."
"""Prefix of the names of plugins' schemas, so that none is the name of another schema."""
STREAM: Schema = {"description": "Events `data: {...}`, the last one `data: [DONE]`."}
FINISH_REASON: Schema = {"enum": ["stop", "length"]}
CHAT_FINISH_REASON: Schema = {"enum": ["stop", "length", "tool_calls"]}


def ref(name: str) -> Schema:
    """A reference to a schema of the document."""
    return {"$ref": REF + name}


def components(service: Service, others: Sequence[type] = ()) -> tuple[dict[str, Any], dict[type, Schema]]:
    """All schemas by name, and references to those of `others`, which are types of plugins."""
    bodies = (CompletionBody, ChatBody, TokenizeBody, DetokenizeBody, TextPart, RefusalPart)
    _, schemas = msgspec.json.schema_components(bodies, ref_template=REF + "{name}")
    for body in ("CompletionBody", "ChatBody", "TokenizeBody", "DetokenizeBody", "Message", "Function"):
        _narrow(schemas[body], constraints(service))
    schemas["ChatBody"]["properties"]["logprobs"] = {"anyOf": [{"type": "boolean"}, NULL], "default": None}
    found, of_plugins = msgspec.json.schema_components(others, ref_template=REF + OF_PLUGINS + "{name}")
    schemas |= {OF_PLUGINS + name: schema for name, schema in of_plugins.items()}
    return schemas | _responses(service), dict(zip(others, found, strict=True))


def constraints(service: Service) -> dict[str, Schema]:
    """The schema of each parameter whose values are limited further than by its type; none accepts null."""
    limits = service.limits
    room = service.max_len - 1
    token: Schema = {"type": "integer", "minimum": 0, "maximum": service.vocab_size - 1}
    stop: dict[str, Any] = {"type": "string", "minLength": 1, "maxLength": limits.max_stop_chars}
    tokens = {"type": "array", "items": token, "minItems": 1, "maxItems": room}
    text = {"type": "string", "minLength": 1}
    logprobs = _integer(0, limits.max_logprobs)
    return {
        "model": {"const": service.name},
        "n": _integer(1, limits.max_n),
        "best_of": _integer(1, limits.max_n) | {"description": "Equal to n."},
        "max_tokens": _integer(1, room),
        "max_completion_tokens": _integer(1, room),
        "min_tokens": _integer(0, room) | {"description": "At most max_tokens."},
        "temperature": {"type": "number", "minimum": 0, "maximum": 100},
        "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
        "top_k": _integer(-1, 2**31),
        "min_p": {"type": "number", "minimum": 0, "maximum": 1},
        "repetition_penalty": {"type": "number", "minimum": 0.01, "maximum": 100},
        "presence_penalty": {"type": "number", "minimum": -2, "maximum": 2},
        "frequency_penalty": {"type": "number", "minimum": -2, "maximum": 2},
        "seed": _integer(RANDOM_SEED, MAX_SEED) | {"description": "-1: a random one."},
        "stop": {"anyOf": [stop | {"minLength": 0}, {"type": "array", "items": stop, "maxItems": limits.max_stop}]},
        "stop_token_ids": {"type": "array", "items": token, "maxItems": limits.max_stop},
        "logit_bias": {
            "type": "object",
            "description": f"Token id, at most {service.vocab_size - 1} -> bias.",
            "propertyNames": {"pattern": "^(0|[1-9][0-9]*)$"},
            "additionalProperties": {"type": "number", "minimum": -MAX_LOGIT_BIAS, "maximum": MAX_LOGIT_BIAS},
            "maxProperties": limits.max_logit_bias,
        },
        "logprobs": logprobs,
        "top_logprobs": logprobs | {"description": "Above 0 only with logprobs: true."},
        "stream_options": {**ref("StreamOptions"), "description": "Only with stream: true."},
        "response_format": {"oneOf": [_format("text"), _format("json_object"), _json_schema_format()]},
        "structured_outputs": {
            "type": "object",
            "description": "At most one grammar that the output must match.",
            "properties": {
                "json": {"type": ["object", "string", "boolean", "null"], "description": "A JSON schema."},
                "json_object": {"type": ["boolean", "null"]},
                "regex": {"type": ["string", "null"]},
                "choice": {"anyOf": [{"type": "array", "items": text, "minItems": 1}, NULL]},
                "grammar": {"type": ["string", "null"], "description": "A grammar in Lark."},
                "structural_tag": {
                    "type": ["object", "string", "null"],
                    "description": "A format of texts, special tokens and parts with grammars of their own.",
                },
            },
            "additionalProperties": False,
        },
        "prompt": {
            "anyOf": [
                text,
                {"type": "array", "items": text, "minItems": 1, "maxItems": limits.max_prompts},
                tokens,
                {"type": "array", "items": tokens, "minItems": 1, "maxItems": limits.max_prompts},
            ]
        },
        "tokens": {"type": "array", "items": token},
        "role": {"enum": list(ROLES)},
        "content": {
            "anyOf": [STRING, {"type": "array", "items": {"anyOf": [ref("TextPart"), ref("RefusalPart")]}}],
            "description": "Null or absent only from an assistant; refusals too.",
        },
        "store": {"const": False},
        "tool_choice": _tool_choice(),
    }


def _tool_choice() -> Schema:
    named: list[Schema] = [
        {
            "type": "object",
            "properties": {"type": {"const": kind}, kind: {"type": "object", "required": ["name"]}},
            "required": ["type", kind],
        }
        for kind in ("function", "custom")
    ]
    allowed = _format(
        "allowed_tools",
        allowed_tools={
            "type": "object",
            "properties": {
                "mode": {"enum": ["auto", "required"]},
                "tools": {"type": "array", "items": {"anyOf": named}},
            },
            "required": ["mode", "tools"],
        },
    )
    return {"anyOf": [{"enum": ["none", "auto", "required"]}, *named, allowed]}


def _format(kind: str, **properties: Schema) -> Schema:
    """A `response_format` of one type; all its properties are required."""
    return {
        "type": "object",
        "properties": {"type": {"const": kind}, **properties},
        "required": ["type", *properties],
        "additionalProperties": False,
    }


def _json_schema_format() -> Schema:
    own = {
        "name": STRING,
        "schema": {"type": ["object", "null"], "description": "A JSON schema; null: any JSON object."},
        "description": {"type": ["string", "null"]},
        "strict": {"type": ["boolean", "null"], "description": "The schema is enforced in any case."},
    }
    return _format(
        "json_schema",
        json_schema={"type": "object", "properties": own, "required": ["name"], "additionalProperties": False},
    )


def _narrow(schema: dict[str, Any], narrower: Mapping[str, Schema]) -> None:
    """Replace the schemas of limited properties; those that accept null still do."""
    properties = schema["properties"]
    for name in properties.keys() & narrower.keys():
        given = properties[name]
        if name == "prompt" and "default" in given:  # of /tokenize: a text, which may be empty
            continue
        properties[name] = {"anyOf": [narrower[name], NULL], "default": None} if "default" in given else narrower[name]


def _integer(low: int, high: int) -> dict[str, Any]:
    return {"type": "integer", "minimum": low, "maximum": high}


def _object(optional: Mapping[str, Schema] = {}, **properties: Schema) -> Schema:
    """An object with exactly these properties, and perhaps the optional ones."""
    return {
        "type": "object",
        "properties": {**properties, **optional},
        "required": list(properties),
        "additionalProperties": False,
    }


def _array(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _nullable(schema: Schema) -> Schema:
    return {"anyOf": [schema, NULL]}


def _responses(service: Service) -> dict[str, Schema]:
    """The schema of each response."""
    name: Schema = {"const": service.name}
    entry = {"token": STRING, "logprob": NUMBER, "bytes": _array(_integer(0, 255))}
    chat_logprobs = _object(
        content=_array(_object(**entry, top_logprobs=_array(_object(**entry)))),
        refusal=NULL,
    )
    logprobs = _object(
        tokens=_array(STRING),
        token_logprobs=_array(_nullable(NUMBER)),
        top_logprobs=_array(_nullable({"type": "object", "additionalProperties": NUMBER})),
        text_offset=_array(COUNT),
    )
    head = {"id": STRING, "created": COUNT, "model": name}
    calls: list[Schema] = [
        _object(id=STRING, type={"const": "function"}, function=_object(name=STRING, arguments=STRING)),
        _object(id=STRING, type={"const": "custom"}, custom=_object(name=STRING, input=STRING)),
    ]
    choice = {"index": COUNT, "finish_reason": FINISH_REASON}
    return {
        "Error": _object(
            error=_object(message=STRING, type=STRING, param=_nullable(STRING), code=_nullable(STRING)),
        ),
        "Usage": _object(
            prompt_tokens=COUNT,
            completion_tokens=COUNT,
            total_tokens=COUNT,
            prompt_tokens_details=_object(cached_tokens=COUNT),
            optional={
                "completion_tokens_details": _object(
                    optional={
                        "reasoning_tokens": COUNT,
                        "accepted_prediction_tokens": COUNT,
                        "rejected_prediction_tokens": COUNT,
                    }
                )
            },
        ),
        "Completion": _object(
            **head,
            object={"const": "text_completion"},
            choices=_array(_object(**choice, text=STRING, logprobs=_nullable(logprobs))),
            usage=ref("Usage"),
        ),
        "ChatCompletion": _object(
            **head,
            object={"const": "chat.completion"},
            choices=_array(
                _object(
                    index=COUNT,
                    finish_reason=CHAT_FINISH_REASON,
                    message=_object(
                        role={"const": "assistant"},
                        content=_nullable(STRING),
                        refusal=NULL,
                        optional={"reasoning_content": STRING, "tool_calls": _array({"anyOf": calls})},
                    ),
                    logprobs=_nullable(chat_logprobs),
                    optional={"parse_error": STRING},
                )
            ),
            usage=ref("Usage"),
        ),
        "Tokens": _object(tokens=_array(COUNT), count=COUNT, max_model_len=COUNT),
        "Text": _object(prompt=STRING),
        "Version": _object(version=STRING),
        "TokenizerInfo": _object(
            tokenizer_class=STRING,
            bos_token=_nullable(STRING),
            eos_token=_nullable(STRING),
            pad_token=_nullable(STRING),
            unk_token=_nullable(STRING),
            vocab_size=COUNT,
            chat_template=_nullable(STRING),
            model_max_length=COUNT,
        ),
        "Model": _object(
            id=name,
            object={"const": "model"},
            type={"const": "model"},
            display_name=name,
            created=COUNT,
            created_at={"type": "string", "format": "date-time"},
            owned_by={"const": "engine"},
            max_model_len=COUNT,
            revision=_nullable(STRING),
        ),
        "Models": _object(
            object={"const": "list"},
            data=_array(ref("Model")),
            first_id=name,
            last_id=name,
            has_more={"const": False},
        ),
        "Health": {
            "type": "object",
            "properties": {
                "status": {"enum": ["ok", "degraded", "failed", "starting", "draining"]},
                "level": STRING,
                "reason": STRING,
                "since": STRING,
                "restart": STRING,
                "step_seconds": NUMBER,
                "replicas": _array({"type": "object"}),
            },
            "required": ["status"],
            "additionalProperties": False,
        },
    }
