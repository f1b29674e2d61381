"""Hostile requests below HTTP's bodies: framing, limits of heads, keys, disconnects."""

from __future__ import annotations

import random

from cases import Case, Maker
from wire import Manners, Target

from engine.server.shared.authority import authority

POSTS = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")
GETS = ("/health", "/metrics", "/v1/models")


def small(target: Target) -> bytes:
    """A valid request that costs little."""
    return target.post("/v1/completions", {"model": target.model, "prompt": [1], "max_tokens": 1})


def _raw(name: str, *parts: bytes, expect: str = "refused", closes: bool = False, waits: bool = False) -> Maker:
    """The same bytes each time; HOST and BODY in them are replaced."""

    def make(target: Target, draw: random.Random) -> Case:
        body = b'{"model":"%b","prompt":[1],"max_tokens":1}' % target.model.encode()
        key = b"\r\nAuthorization: Bearer " + target.key.encode() if target.key else b""
        host = authority(target.host, target.port).encode() + key
        made = tuple(part.replace(b"HOST", host).replace(b"LENGTH", b"%d" % len(body)) for part in parts)
        made = tuple(part.replace(b"BODY", body).replace(b"SIZE", b"%x" % len(body)) for part in made)
        return Case(name, made, expect, closes=closes, waits=waits, timeout=5 if waits else 30)

    return make


POST = b"POST /v1/completions HTTP/1.1\r\nHost: HOST\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
GET = b"GET /health HTTP/1.1\r\nHost: HOST\r\n"

LINES: list[Maker] = [
    _raw("an empty line first", b"\r\n\r\n" + GET + b"\r\n", expect="any"),
    _raw("only line ends", b"\r\n" * 50, closes=True, waits=True),
    _raw("HTTP/0.9", b"GET /health\r\n", closes=True, waits=True),
    _raw("HTTP/2 preface", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", closes=True),
    _raw("HTTP/3.7", b"GET /health HTTP/3.7\r\nHost: HOST\r\n\r\n", expect="any", closes=True),
    _raw("no version", b"GET /health HTTP/\r\nHost: HOST\r\n\r\n", closes=True),
    _raw("a lower-case method", b"get /health HTTP/1.1\r\nHost: HOST\r\n\r\n", closes=True),
    _raw("an unknown method", b"BREW /health HTTP/1.1\r\nHost: HOST\r\n\r\n", closes=True),
    _raw("CONNECT", b"CONNECT HOST HTTP/1.1\r\nHost: HOST\r\n\r\n", closes=True),
    _raw("OPTIONS *", b"OPTIONS * HTTP/1.1\r\nHost: HOST\r\n\r\n", expect="any", closes=True),
    _raw("an absolute address", b"GET http://x.test/health HTTP/1.1\r\nHost: HOST\r\n\r\n", expect="any", closes=True),
    _raw("a TLS hello", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 100, closes=True, waits=True),
    _raw("bare line feeds", b"GET /health HTTP/1.1\nHost: HOST\n\n", expect="any", closes=True, waits=True),
    _raw("a space before the colon", GET + b"X-A : 1\r\n\r\n", expect="any", closes=True),
    _raw("a folded header", GET + b"X-A: 1\r\n 2\r\n\r\n", expect="any", closes=True),
    _raw("a NUL in a header", GET + b"X-A: a\0b\r\n\r\n", expect="any", closes=True),
    _raw("a NUL in the path", b"GET /hea\0lth HTTP/1.1\r\nHost: HOST\r\n\r\n", closes=True),
    _raw("a header without a name", GET + b": 1\r\n\r\n", expect="any", closes=True),
    _raw("a header without a colon", GET + b"nothing\r\n\r\n", expect="any", closes=True, waits=True),
    _raw("bytes above 127", GET + b"X-A: \xff\xfe\r\nX-\xc3\xa9: 1\r\n\r\n", expect="any", closes=True),
    _raw("no Host", b"GET /health HTTP/1.1\r\n\r\n", expect="any", closes=True),
    _raw("two Hosts", GET + b"Host: evil.test\r\n\r\n", expect="any", closes=True),
    _raw("a websocket upgrade", GET + b"Upgrade: websocket\r\nConnection: Upgrade\r\n\r\n", expect="any"),
    _raw("an h2c upgrade", GET + b"Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\n\r\n", expect="any"),
    _raw("HTTP/1.0", b"GET /health HTTP/1.0\r\nHost: HOST\r\n\r\n", expect="ok"),
    _raw("HTTP/1.0 kept alive", b"GET /health HTTP/1.0\r\nHost: HOST\r\nConnection: keep-alive\r\n\r\n", expect="ok"),
    _raw("HTTP/1.0 without Host", b"GET /health HTTP/1.0\r\n\r\n", expect="any"),
    _raw("ten requests in one write", (GET + b"\r\n") * 10, expect="ok"),
]

LENGTH = b"Content-Length: LENGTH\r\n"
CODED = b"Transfer-Encoding: chunked\r\n"
IN_CHUNKS = b"\r\nSIZE\r\nBODY\r\n0\r\n\r\n"


def _odd(name: str, *parts: bytes, waits: bool = False) -> Maker:
    """A request that RFC 9112 lets a server refuse or understand."""
    return _raw(name, *parts, expect="any", closes=True, waits=waits)


LENGTHS: list[Maker] = [
    _raw("a negative length", POST + b"Content-Length: -1\r\n\r\nBODY", closes=True),
    _raw("a length that is a word", POST + b"Content-Length: ten\r\n\r\nBODY", closes=True),
    _raw("a length with a plus", POST + b"Content-Length: +5\r\n\r\nBODY", closes=True),
    _raw("a length beyond 64 bits", POST + b"Content-Length: 99999999999999999999999\r\n\r\nBODY", closes=True),
    _raw("a huge length", POST + b"Content-Length: 9223372036854775807\r\n\r\nBODY", closes=True),
    _raw("two lengths", POST + b"Content-Length: 5\r\n" + LENGTH + b"\r\nBODY", closes=True),
    _raw("a list of lengths", POST + b"Content-Length: LENGTH, LENGTH\r\n\r\nBODY", closes=True),
    _raw("a length too short", POST + b"Content-Length: 5\r\n\r\nBODY"),
    _odd("equal lengths", POST + LENGTH * 2 + b"\r\nBODY"),
    _odd("a length and chunks", POST + b"Content-Length: 5\r\n" + CODED + IN_CHUNKS),
    _odd("chunks twice", POST + b"Transfer-Encoding: chunked, chunked\r\n" + IN_CHUNKS),
    _odd("identity", POST + b"Transfer-Encoding: identity\r\n" + LENGTH + b"\r\nBODY", waits=True),
    _odd("a disguised coding", POST + b"Transfer-Encoding: xchunked\r\n" + LENGTH + b"\r\nBODY", waits=True),
    _odd("another expectation", POST + b"Expect: wonders\r\n" + LENGTH + b"\r\nBODY"),
    _odd("an encoded body", POST + b"Content-Encoding: gzip\r\n" + LENGTH + b"\r\nBODY"),
    _odd("a trailer", CHUNKED + b"SIZE\r\nBODY\r\n0\r\nX-A: 1\r\n\r\n"),
    _odd("a body with GET", GET + LENGTH + b"\r\nBODY"),
    _raw("an unknown coding", POST + b"Transfer-Encoding: gzip\r\n\r\nBODY", closes=True, waits=True),
    _raw("chunks", POST + CODED + IN_CHUNKS, expect="ok"),
    _raw("a chunk size that is a word", CHUNKED + b"hello\r\nBODY\r\n0\r\n\r\n", closes=True),
    _raw("a negative chunk", CHUNKED + b"-5\r\nBODY\r\n0\r\n\r\n", closes=True),
    _raw("a chunk beyond 64 bits", CHUNKED + b"FFFFFFFFFFFFFFFFFF\r\nBODY\r\n0\r\n\r\n", closes=True),
    _raw("a chunk longer than it says", CHUNKED + b"2\r\nBODY\r\n0\r\n\r\n", closes=True),
    _raw("a chunk shorter than it says", CHUNKED + b"fff\r\nBODY\r\n0\r\n\r\n", closes=True, waits=True),
    _raw("no body", POST + b"\r\n"),
    _raw("Expect: 100-continue", POST + b"Expect: 100-continue\r\n" + LENGTH + b"\r\n", b"BODY", expect="ok"),
]


def flipped(target: Target, draw: random.Random) -> Case:
    """A valid request with a few bytes changed."""
    data = bytearray(small(target))
    for _ in range(draw.randint(1, 8)):
        data[draw.randrange(len(data))] = draw.randrange(256)
    return Case("bytes changed", (bytes(data),), "any", closes=True, waits=True, timeout=3)


def shuffled(target: Target, draw: random.Random) -> Case:
    """A valid request with a stretch cut out, doubled, or moved."""
    data = small(target)
    begin, end = sorted((draw.randrange(len(data)), draw.randrange(len(data))))
    made = draw.choice((data[:begin] + data[end:], data[:end] + data[begin:], data[begin:] + data[:begin]))
    return Case("a stretch moved", (made,), "any", closes=True, waits=True, timeout=3)


def noise(target: Target, draw: random.Random) -> Case:
    return Case("random bytes", (draw.randbytes(draw.randint(1, 4096)),), closes=True, waits=True, timeout=3)


def in_pieces(target: Target, draw: random.Random) -> Case:
    """A valid request, a few bytes at a time."""
    data, size = small(target), draw.randint(7, 40)
    parts: list[bytes | float] = []
    for place in range(0, len(data), size):
        parts += [data[place : place + size], 0.001]
    return Case("in small pieces", tuple(parts), "ok")


def odd_path(target: Target, draw: random.Random) -> Case:
    paths = ("/", "//", "/..", "/v1", "/v1/", "/v1/models/", "/v1/models/none", "/v1/completions/", "/%00", "/%ff%fe")
    more = ("/health?deep=2", "/health?" + "a=1&" * 200, "/" + "x" * 4000, "/v1/models/%2e%2e%2fetc", "/docs", "/é")
    path = draw.choice((*paths, *more, "/" + "".join(draw.choices("abc/.%25?#&=", k=20))))
    method = draw.choice(("GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "TRACE"))
    data = target.request(method, path, b"", {"Host": draw.choice(("", "evil.test", "x" * 300))})
    return Case("an odd path", (data,), "any", closes=True, head_only=method == "HEAD")


def _header(name: str, low: int, high: int, make: str) -> Maker:
    """A head that is larger than it should be, of `low` to `high` bytes or headers."""

    def maker(target: Target, draw: random.Random) -> Case:
        size = draw.choice((low, high, draw.randint(low, high)))
        fill = b"a" * size
        head = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        data = {
            "value": head + b"X-A: " + fill + b"\r\n\r\n",
            "name": head + fill + b": 1\r\n\r\n",
            "many": head + b"".join(b"X-%d: 1\r\n" % number for number in range(size)) + b"\r\n",
            "path": b"GET /" + fill + b" HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
            "query": b"GET /health?deep=" + fill + b" HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
            "method": fill.upper() + b" / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
            "trailer": b"POST /tokenize HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX-A: "
            + fill
            + b"\r\n\r\n",
            "extension": b"POST /tokenize HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n1;"
            + fill
            + b"\r\n{\r\n0\r\n\r\n",
        }[make]
        return Case(name, (data,), closes=True)

    return maker


LIMITS: list[Maker] = [
    _header("a long header", 100_000, 2_000_000, "value"),
    _header("a long name of a header", 100_000, 500_000, "name"),
    _header("many headers", 500, 20_000, "many"),
    _header("a long path", 100_000, 2_000_000, "path"),
    _header("a long query", 100_000, 2_000_000, "query"),
    _header("a long method", 1_000, 200_000, "method"),
    _header("a long trailer", 100_000, 2_000_000, "trailer"),
    _header("a long chunk extension", 100_000, 2_000_000, "extension"),
]


def wrong_key(target: Target, draw: random.Random) -> Case:
    """A request with a wrong key, and one of many ways to write the path: never answered with content."""
    word = "".join(draw.choices("abcdefgh", k=12))
    values = ("", "Bearer", "Bearer ", f"Bearer {word}", f"Basic {word}", f"bearer {word}", "Bearer " + "x" * 5000)
    more = (f"Bearer {target.key}x", f"Bearer {target.key[:-1]}", f"Token {target.key}", "Bearer \xff", "Bearer null")
    value = draw.choice((*values, *more))
    if target.key and value.strip().lower() == f"bearer {target.key}".lower():
        value = "Bearer"
    path = draw.choice((*POSTS, *GETS[1:], "//v1/models", "/v1//models", "/health/../v1/models", "/v1/models?key=x"))
    body = small(target).partition(b"\r\n\r\n")[2] if path in POSTS else b""
    headers = {"Authorization": value, "X-Api-Key": draw.choice(("", target.key))}
    expect = "refused" if target.key else "any"
    data = target.request("POST" if body else "GET", path, body, headers)
    return Case("a wrong key", (data,), expect, closes=True)


def two_keys(target: Target, draw: random.Random) -> Case:
    """A wrong key next to the right one: either answer is fair."""
    lines = f"Authorization: Bearer wrong\r\nAuthorization: Bearer {target.key}\r\n"
    return Case(
        "two keys", (f"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\n{lines}\r\n".encode(),), "any", closes=True
    )


KEYS: list[Maker] = [wrong_key, wrong_key, wrong_key, two_keys]


def _streamed(target: Target, draw: random.Random, tokens: int, **more: object) -> bytes:
    body = {"model": target.model, "prompt": [1] * draw.randint(1, 64), "max_tokens": tokens, "stream": True, **more}
    return target.post("/v1/completions", body | {"ignore_eos": True})


def cut_off(target: Target, draw: random.Random) -> Case:
    """Hangs up within the request."""
    data = small(target)
    manners = Manners("none", close=draw.choice(("plain", "reset")))
    return Case("hung up within the request", (data[: draw.randrange(len(data))],), "nothing", manners=manners)


def unread(target: Target, draw: random.Random) -> Case:
    """Hangs up before the answer."""
    data = _streamed(target, draw, draw.randint(1, min(200, target.max_len // 2)))
    manners = Manners("none", close=draw.choice(("plain", "reset")))
    return Case("hung up before the answer", (data,), "nothing", manners=manners)


def half_read(target: Target, draw: random.Random) -> Case:
    """Hangs up within the stream."""
    data = _streamed(target, draw, min(200, target.max_len // 2), n=draw.randint(1, 4))
    manners = Manners("some", draw.randint(1, 5000), draw.choice(("plain", "reset")))
    return Case("hung up within the stream", (data,), "nothing", manners=manners)


def not_reading(target: Target, draw: random.Random) -> Case:
    """Reads nothing for a while."""
    data = _streamed(target, draw, min(200, target.max_len // 2), n=4)
    return Case("a reader that stops", (data,), "nothing", manners=Manners("stall", draw.uniform(0.1, 1.0), "reset"))


def half_closed(target: Target, draw: random.Random) -> Case:
    """Shuts its sending side down after the request, as `nc -N` does: the answer must still come."""
    return Case("half-closed", (small(target),), "ok", manners=Manners(half_close=True))


def too_large(target: Target, draw: random.Random) -> Case:
    """Announces a body above the limit and sends some of it: 413 must arrive, not a reset."""
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {target.key}\r\n"
    size = draw.choice((9 * 2**20, 2**33))
    sent = b" " * draw.choice((0, 1000, 4 * 2**20))
    return Case("a body above the limit", (f"{head}Content-Length: {size}\r\n\r\n".encode(), sent))


FRAMING: list[Maker] = [*LINES, *LENGTHS, *[flipped, shuffled, noise, in_pieces, odd_path] * 6]
DISCONNECTS: list[Maker] = [cut_off, unread, half_read, not_reading, half_closed, too_large, cut_off, unread, half_read]
