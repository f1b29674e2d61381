"""Hostile request bodies: types and values of every parameter, and sizes; and valid ones among them."""

from __future__ import annotations

import json
import random
from typing import Any

from cases import Case, Maker
from wire import Target

SHARED = [
    "model", "stream", "stream_options", "n", "max_tokens", "temperature", "top_p", "presence_penalty", "stop", "seed",
    "frequency_penalty", "logit_bias", "user", "top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos",
    "stop_token_ids", "skip_special_tokens", "priority", "cache_salt",
]  # fmt: skip
COMPLETION = [*SHARED, "prompt", "echo", "logprobs", "best_of", "suffix"]
CHAT = [*SHARED, "messages", "max_completion_tokens", "logprobs", "top_logprobs", "response_format"]
CHAT += ["chat_template_kwargs", "tools", "tool_choice", "functions", "modalities", "reasoning_effort", "metadata"]
FIELDS = {
    "/v1/completions": COMPLETION,
    "/v1/chat/completions": CHAT,
    "/tokenize": ["model", "prompt", "messages", "add_special_tokens"],
    "/detokenize": ["model", "tokens", "skip_special_tokens"],
}


class Literal(str):
    """Text that goes into the JSON as it is."""


VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, -(2**63), 10**400, 0.0, -0.0, 1.5, 1e308, 1e-320,
    "", "x", "1", "\x00", "\u200b\ufeff", "é" * 100, "😀", "<|endoftext|>", [], [[]], [None], [True], [1, "x"],
    [[1], "x"],
    [[1], 2], [-1], [2**31], [2**63], [1.5], [{}], {}, {"a": 1}, {"1": 1}, {"-1": 1}, {"1": "x"}, {"1": 1e308},
    {"x" * 100: 1}, {"type": "text", "text": 1}, [{"role": "user"}], [{"role": 1, "content": "x"}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}],
    [{"role": "user", "content": [{"type": "text"}]}], [{"role": "nobody", "content": "x"}],
    [{"role": "user", "content": "x", "tool_calls": [1]}], {"type": "json_schema"}, {"include_usage": "yes"},
    Literal("NaN"), Literal("Infinity"), Literal("-Infinity"), Literal("1e999"), Literal("-1e999"), Literal("01"),
    Literal('"\\ud800"'), Literal('"\\udc00\\ud800"'), Literal('"\\u0000"'), Literal("0x10"), Literal("1_000"),
    Literal("'x'"), Literal("undefined"), Literal(""), Literal("[1,]"), Literal("{,}"), Literal("/* c */ 1"),
    Literal("[" * 500 + "]" * 500), Literal('{"a":' * 500 + "1" + "}" * 500), Literal("1" * 5000),
]  # fmt: skip
"""Values that belong nowhere, or to few parameters."""


def base(target: Target, path: str) -> dict[str, Any]:
    """A valid body for a path, of few tokens."""
    if path == "/detokenize":
        return {"model": target.model, "tokens": [1, 2, 3]}
    if path == "/tokenize":
        return {"model": target.model, "prompt": "once upon a time"}
    body: dict[str, Any] = {"model": target.model, "max_tokens": 2}
    given = {"messages": [{"role": "user", "content": "hello"}]} if "chat" in path else {"prompt": [1, 2]}
    return body | given


def encode(body: dict[str, Any]) -> bytes:
    """JSON, with each Literal as it stands and lone surrogates as escapes."""
    parts = (
        f"{json.dumps(key)}:{value if isinstance(value, Literal) else json.dumps(value)}" for key, value in body.items()
    )
    return ("{" + ",".join(parts) + "}").encode()


def wrong_field(target: Target, draw: random.Random) -> Case:
    """One parameter of a path with one of the values: refused by name or honoured."""
    path = draw.choice(tuple(FIELDS))
    name, value = draw.choice(FIELDS[path]), draw.choice(VALUES)
    return Case(f"{path}: a value of {name}", (target.post(path, encode(base(target, path) | {name: value})),), "any")


def wrong_fields(target: Target, draw: random.Random) -> Case:
    """Several parameters together."""
    path = draw.choice(tuple(FIELDS))
    changes = {draw.choice(FIELDS[path]): draw.choice(VALUES) for _ in range(draw.randint(2, 6))}
    return Case(f"{path}: several values", (target.post(path, encode(base(target, path) | changes)),), "any")


def unknown_field(target: Target, draw: random.Random) -> Case:
    path = draw.choice(tuple(FIELDS))
    name = draw.choice(("", "nonsense", "x" * 3000, "__proto__", "max_token", "model\x00", "é", "a.b[0]"))
    return Case(f"{path}: an unknown parameter", (target.post(path, encode(base(target, path) | {name: 1})),))


def not_an_object(target: Target, draw: random.Random) -> Case:
    path = draw.choice(tuple(FIELDS))
    made = (b"", b"null", b"[]", b"1", b'"x"', b"{", b"}", b"\xff\xfe{}", b"\xef\xbb\xbf{}", b"{}{}", b"[" * 100_000)
    body = draw.choice((*made, draw.randbytes(200), b'{"model": "' + b"\xc0\x80" + b'"}'))
    return Case(f"{path}: not an object", (target.post(path, body),))


def cut_json(target: Target, draw: random.Random) -> Case:
    path = draw.choice(tuple(FIELDS))
    body = encode(base(target, path))
    return Case(f"{path}: JSON cut off", (target.post(path, body[: draw.randrange(len(body))]),))


def bounds(target: Target, draw: random.Random) -> Case:
    """A number at or around a bound."""
    name = draw.choice(("n", "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "logprobs", "min_tokens"))
    other = draw.choice(("presence_penalty", "frequency_penalty", "repetition_penalty", "priority", "best_of"))
    edge = draw.choice((0, 1, 2, -2, 20, 21, 64, 65, 2**31 - 1, 2**31, 2**32, 2**64 - 1, target.max_len, 1e-9, 2.0001))
    body = base(target, "/v1/completions") | {draw.choice((name, other)): edge}
    return Case("a number at a bound", (target.post("/v1/completions", body),), "any")


TYPES: list[Maker] = [*[wrong_field] * 6, wrong_fields, unknown_field, not_an_object, cut_json, bounds]


def _size(target: Target, draw: random.Random, name: str, path: str, body: dict[str, Any], expect: str = "any") -> Case:
    return Case(name, (target.post(path, base(target, path) | body),), expect, timeout=60)


def _text(draw: random.Random, size: int) -> str:
    return "".join(draw.choices(("the ", "x", "\n", "é", "1", "def ", "    "), k=size // 2))


def many_messages(target: Target, draw: random.Random) -> Case:
    count = draw.choice((1_000, 20_000, 200_000))
    messages = [{"role": "user", "content": ""}] * count
    return _size(target, draw, "many messages", "/v1/chat/completions", {"messages": messages})


def many_prompts(target: Target, draw: random.Random) -> Case:
    prompts = [_text(draw, min(8_000, 2 * target.max_len)) for _ in range(draw.choice((64, 257)))]
    return _size(target, draw, "many prompts", "/v1/completions", {"prompt": prompts, "max_tokens": 1})


def long_text(target: Target, draw: random.Random) -> Case:
    path = draw.choice(("/v1/completions", "/tokenize"))
    return _size(target, draw, "a long text", path, {"prompt": _text(draw, draw.choice((100_000, 2_000_000)))})


def one_long_word(target: Target, draw: random.Random) -> Case:
    """A text without boundaries between words, the worst case of byte-pair merging."""
    text = draw.choice(("a", "ab", " ", "\n")) * draw.choice((10_000, 500_000))
    return _size(target, draw, "one long word", "/tokenize", {"prompt": text})


def long_ids(target: Target, draw: random.Random) -> Case:
    count = draw.choice((target.max_len, target.max_len + 1, 100_000, 1_000_000))
    return _size(target, draw, "many token ids", "/v1/completions", {"prompt": [1] * count, "echo": True})


def many_ids_to_text(target: Target, draw: random.Random) -> Case:
    return _size(target, draw, "many ids to text", "/detokenize", {"tokens": [65] * draw.choice((10_000, 3_000_000))})


def long_salt(target: Target, draw: random.Random) -> Case:
    body = {"cache_salt": "s" * draw.choice((1_000, 200_000)), "n": 8, "max_tokens": 1}
    return _size(target, draw, "a long cache_salt", "/v1/completions", body)


def many_stops(target: Target, draw: random.Random) -> Case:
    stops = ["s" * draw.choice((1, 256, 257, 100_000))] * draw.choice((1, 16, 17, 1_000))
    return _size(target, draw, "many stop strings", "/v1/completions", {"stop": stops})


def much_bias(target: Target, draw: random.Random) -> Case:
    bias = {str(token): 1 for token in range(draw.choice((10, 300, 1_025, 50_000)))}
    return _size(target, draw, "a large logit_bias", "/v1/completions", {"logit_bias": bias})


def template_values(target: Target, draw: random.Random) -> Case:
    values: dict[str, Any] = {f"k{number}": number for number in range(draw.choice((10, 100_000)))}
    path = "/v1/chat/completions"
    return _size(target, draw, "many chat_template_kwargs", path, {"chat_template_kwargs": values})


def deep(target: Target, draw: random.Random) -> Case:
    depth = draw.choice((100, 10_000, 1_000_000))
    value = Literal("[" * depth + "]" * depth)
    path, name = draw.choice((("/v1/completions", "prompt"), ("/v1/chat/completions", "response_format")))
    return Case("deep nesting", (target.post(path, encode(base(target, path) | {name: value})),), timeout=60)


def long_logprobs(target: Target, draw: random.Random) -> Case:
    body = {"prompt": [1] * (target.max_len - 1), "max_tokens": 1, "echo": True, "logprobs": 20}
    return _size(target, draw, "logprobs of a long echo", "/v1/completions", body)


def many_choices(target: Target, draw: random.Random) -> Case:
    body = {
        "prompt": [1] * draw.choice((1, target.max_len // 2)),
        "n": 64,
        "max_tokens": 2,
        "stream": draw.random() < 0.5,
    }
    return _size(target, draw, "many choices", "/v1/completions", body)


SIZES: list[Maker] = [
    many_messages, many_prompts, long_text, one_long_word, long_ids, many_ids_to_text, long_salt, many_stops, much_bias,
    template_values, deep, long_logprobs, many_choices,
]  # fmt: skip


def valid(target: Target, draw: random.Random) -> Case:
    """A request that must be answered with 200, whatever goes on around it."""
    path = draw.choice(tuple(FIELDS))
    body = base(target, path)
    if path.startswith("/v1"):
        body |= {"temperature": draw.choice((0, 1)), "stream": draw.random() < 0.5, "seed": draw.randrange(2**31)}
    if "chat" in path and draw.random() < 0.3:
        body |= {"logprobs": True, "top_logprobs": 3}
    return Case(f"{path}: valid", (target.post(path, body),), "ok", timeout=60)


VALID: list[Maker] = [valid]
