"""How the processes of a server log: as text or as JSON, one line per entry, on standard error."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType

import msgspec
from attrs import frozen

FIELDS = "fields"
"""Attribute of a log record with further fields of its JSON object: log.info(..., extra={FIELDS: {...}})."""
ALWAYS = ("engine.core.startup_display",)
"""Loggers whose info entries JSON logs contain whatever the log level is; in text, they are printed without a level."""

Fields = Mapping[str, object]


@frozen
class Process:
    """The process that logs."""

    name: str
    """Name of the process in text logs."""
    fields: Fields
    """Fields of JSON logs: the kind of process, and which one of its kind."""


def supervisor_process() -> Process:
    """The main process of a server."""
    return Process("server", {"process": "supervisor"})


def front_end_process(row: int) -> Process:
    """A front end; row: its number."""
    return Process("server", {"process": "front end", "front_end": row})


def engine_process(replica: int, replicas: int) -> Process:
    """An engine process, one of several replicas."""
    return Process("engine" if replicas == 1 else f"engine {replica}", {"process": "engine", "replica": replica})


def worker_process(rank: int) -> Process:
    """A worker of an engine process, which started it."""
    return Process(f"worker {rank}", {"process": "worker", "rank": rank, "engine_pid": os.getppid()})


def configure(process: Process, *, style: str, level: str, context: Callable[[], Fields] | None = None) -> None:
    """Set up the logs of this process.

    style: server.log_format. level: server.log_level. context: returns further fields of a JSON entry when it is
    written, such as those of the request being answered. As text, handlers that are there already are kept.
    """
    root = logging.getLogger()
    if style == "json":
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(JsonFormatter(process.fields, context))
        logging.basicConfig(handlers=[handler], force=True)
        logging.captureWarnings(True)
        sys.excepthook = _log_exception
        threading.excepthook = _log_thread_exception
        for name in ALWAYS:
            logging.getLogger(name).setLevel(min(logging.INFO, logging.getLevelName(level.upper())))
    else:
        logging.basicConfig(format=f"%(asctime)s %(levelname)s {process.name}: %(message)s")
    root.setLevel(level.upper())


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object on one line; its traceback, if any, is a string in the object."""

    def __init__(self, fields: Fields, context: Callable[[], Fields] | None = None) -> None:
        """fields: in each object. context: see `configure`."""
        super().__init__()
        self._fields = fields
        self._context = context

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "time": rfc3339(record.created),
            "level": record.levelname.lower(),
            **self._fields,
            "pid": record.process,
            "logger": record.name,
            "message": _encodable(record.getMessage()),
        }
        if self._context is not None:
            entry |= self._context()
        entry |= getattr(record, FIELDS, {})
        if record.exc_info:
            entry["exception"] = _encodable(self.formatException(record.exc_info))
        if record.stack_info:
            entry["stack"] = _encodable(record.stack_info)
        return msgspec.json.encode(entry, enc_hook=str).decode()


def rfc3339(seconds: float) -> str:
    """A time, as time.time() returns it, in UTC with milliseconds."""
    whole = int(seconds)
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(whole))}.{int((seconds - whole) * 1000):03}Z"


def _encodable(text: str) -> str:
    """The text without lone surrogates, which names of files may have."""
    return text.encode("utf-8", "backslashreplace").decode()


def _log_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Log the exception that ends the process."""
    if not issubclass(kind, KeyboardInterrupt):
        logging.getLogger(__name__).critical("an unexpected error ends the process", exc_info=(kind, error, trace))


def _log_thread_exception(arguments: threading.ExceptHookArgs) -> None:
    """Log the exception that ends a thread."""
    if arguments.exc_value is not None and not issubclass(arguments.exc_type, SystemExit):
        name = arguments.thread.name if arguments.thread is not None else "unknown"
        trace = (arguments.exc_type, arguments.exc_value, arguments.exc_traceback)
        logging.getLogger(__name__).critical("an unexpected error ends the thread %s", name, exc_info=trace)
