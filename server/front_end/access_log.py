"""The access log: one entry per request, as a line or as JSON, on standard error."""

from __future__ import annotations

import logging
import sys
import time
import uuid
from collections.abc import Callable, Mapping

import msgspec

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
    key: int | None = None
    """Number of the client's API key, in the order in which the keys are configured, from 1."""

    def line(self) -> str:
        """The entry for people to read, with local time as in the other logs."""
        target = self.target.replace('"', "%22")
        key = "" if self.key is None else f" key {self.key}"
        request = f'"{self.method} {target}" {self.status} {self.seconds:.3f} s {self.request_id}{key}'
        return f"{_time(time.localtime, ' ', ',')} access: {self.client or '-'} {request}"

    def json(self) -> str:
        """The entry as a JSON object, with the time (UTC) at which the response ended."""
        fields = msgspec.structs.asdict(self) | {"seconds": round(self.seconds, 6)}
        return msgspec.json.encode({"time": _time(time.gmtime, "T", ".") + "Z"} | fields).decode()


def _time(convert: Callable[[float], time.struct_time], between: str, point: str) -> str:
    """The present time in milliseconds; between: between date and time."""
    now = time.time()
    return time.strftime(f"%Y-%m-%d{between}%H:%M:%S{point}", convert(now)) + f"{int(now % 1 * 1000):03}"


FORMATS: Mapping[str, Callable[[Access], str]] = {"line": Access.line, "json": Access.json}
"""Values of server.access_log, except off."""


def configure(style: str) -> None:
    """Turn the access log on; style: a value of server.access_log."""
    log.propagate = False
    log.setLevel(logging.INFO if style in FORMATS else logging.CRITICAL)
    if style in FORMATS:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(_Formatter(FORMATS[style]))
        log.addHandler(handler)


def is_on() -> bool:
    """Whether entries are written."""
    return log.isEnabledFor(logging.INFO)


def write(access: Access) -> None:
    """Write an entry, if the access log is on."""
    log.info(access)


def target(path: bytes, query: bytes) -> str:
    """Path and query of a request, for an entry."""
    return excerpt((path + b"?" + query if query else path).decode("latin-1"))


def new_request_id() -> bytes:
    """A request ID, for a client that gives none."""
    return b"req-%b" % uuid.uuid4().hex.encode()


class _Formatter(logging.Formatter):
    """Formats records whose message is an Access."""

    def __init__(self, to_text: Callable[[Access], str]) -> None:
        super().__init__()
        self._to_text = to_text

    def format(self, record: logging.LogRecord) -> str:
        assert isinstance(record.msg, Access)
        return self._to_text(record.msg)
