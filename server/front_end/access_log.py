"""The access log: one entry per request, as a line or as JSON, on standard error."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Mapping

import msgspec

from engine.core.logs import FIELDS, rfc3339
from engine.server.front_end.errors import excerpt

log = logging.getLogger("engine.server.access")

CLIENT_LEFT = 499
"""Status of a request whose client left before the response began, as nginx logs it."""


class Access(msgspec.Struct, frozen=True, kw_only=True):
    """One request and its response."""

    client: str
    """Address and port; empty for a Unix domain socket."""
    method: str
    """Empty if the request was malformed."""
    target: str
    """Path and query as sent, without the middle of a long one."""
    status: int
    seconds: float
    """From the request's head to the end of the response."""
    request_id: str
    trace_id: str | None = None
    """Of the client's trace, or of the one that tracing began."""
    key: int | None = None
    """Number of the client's API key, in the order in which the keys are configured, from 1."""

    def line(self) -> str:
        """The entry for people to read, with local time as in the other logs."""
        now = time.time()
        local = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now))
        key = "" if self.key is None else f" key {self.key}"
        request = f"{self.request} {self.seconds:.3f} s {self.request_id}{key}"
        return f"{local},{int(now % 1 * 1000):03} access: {self.client or '-'} {request}"

    def json(self) -> str:
        """The entry as a JSON object, with the time (UTC) at which the response ended."""
        return msgspec.json.encode({"time": rfc3339(time.time())} | self.fields()).decode()

    def fields(self) -> dict[str, object]:
        """The entry as fields of a JSON object."""
        return msgspec.structs.asdict(self) | {"seconds": round(self.seconds, 6)}

    @property
    def request(self) -> str:
        """Method, target and status."""
        target = self.target.replace('"', "%22")
        return f'"{self.method} {target}" {self.status}'


FORMATS: Mapping[str, Callable[[Access], str]] = {"line": Access.line, "json": Access.json}
"""Values of server.access_log, except off."""


def configure(style: str, *, structured: bool = False) -> None:
    """Turn the access log on. style: a value of server.access_log. structured: write entries as all others are, in
    JSON.
    """
    log.propagate = structured
    log.setLevel(logging.INFO if style in FORMATS else logging.CRITICAL)
    if style in FORMATS and not structured:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(_Formatter(FORMATS[style]))
        log.addHandler(handler)


def is_on() -> bool:
    """Whether entries are written."""
    return log.isEnabledFor(logging.INFO)


def write(access: Access) -> None:
    """Write an entry, if the access log is on."""
    if log.propagate:
        log.info("%s", access.request, extra={FIELDS: access.fields()})
    else:
        log.info(access)


def target(path: bytes, query: bytes) -> str:
    """Path and query of a request, for an entry."""
    return excerpt((path + b"?" + query if query else path).decode("latin-1"))


class _Formatter(logging.Formatter):
    """Formats records whose message is an Access."""

    def __init__(self, to_text: Callable[[Access], str]) -> None:
        super().__init__()
        self._to_text = to_text

    def format(self, record: logging.LogRecord) -> str:
        assert isinstance(record.msg, Access)
        return self._to_text(record.msg)
