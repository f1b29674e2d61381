"""Reports what the AnswerWriter of a plugin raises by mistake, in the plugin's name."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import NoReturn, TypeVar

from engine.core.plugin_host import EXITS, raise_interrupt
from engine.core.protocols import AnswerWriter, ApiError, Delta, Template, Usage

log = logging.getLogger(__name__)

T = TypeVar("T")


class PluginWriter(AnswerWriter):
    """The writer of a plugin. What it raises by mistake is logged with the plugin's name and becomes a 500."""

    def __init__(self, writer: AnswerWriter, plugin: str) -> None:
        """plugin: with its distribution and version."""
        self.stream_end = writer.stream_end
        self.keep_alive = writer.keep_alive
        self._writer = writer
        self._plugin = plugin

    def add(self, delta: Delta) -> Iterator[None]:
        return self._each("add", lambda: self._writer.add(delta))

    def body(self, usage: Usage) -> Iterator[bytes]:
        return self._each("body", lambda: self._writer.body(usage))

    def events(self, delta: Delta, usage: Callable[[], Usage]) -> Iterator[bytes]:
        return self._each("events", lambda: self._writer.events(delta, usage))

    def end(self, usage: Usage) -> bytes:
        with self._named("end"):
            return self._writer.end(usage)

    def templates(self) -> Mapping[int, Template] | None:
        with self._named("templates"):
            return self._named_templates("templates", self._writer.templates())

    def reasoning_templates(self) -> Mapping[int, Template] | None:
        with self._named("reasoning_templates"):
            return self._named_templates("reasoning_templates", self._writer.reasoning_templates())

    def error_event(self, error: ApiError) -> bytes:
        with self._named("error_event"):
            return self._writer.error_event(error)

    def _each(self, method: str, begin: Callable[[], Iterator[T]]) -> Iterator[T]:
        try:
            yield from begin()
        except (Exception, *EXITS) as error:
            self._raise_fault(method, error)

    def _named_templates(self, method: str, templates: Mapping[int, Template] | None) -> Mapping[int, Template] | None:
        return None if templates is None else _Templates(templates, partial(self._raise_fault, method))

    @contextmanager
    def _named(self, method: str) -> Iterator[None]:
        try:
            yield
        except (Exception, *EXITS) as error:
            self._raise_fault(method, error)

    def _raise_fault(self, method: str, error: BaseException) -> NoReturn:
        """Raise `error` if it is deliberate or a signal's, else log it and raise an ApiError that names the plugin."""
        if isinstance(error, ApiError):
            raise error
        raise_interrupt(error)
        log.error("%s failed in %s() of its AnswerWriter", self._plugin, method, exc_info=error)
        raise ApiError(500, f"{self._plugin} failed in {method}(); see the server's log") from error


class _Templates(Mapping[int, Template]):
    """The templates of a plugin's writer, which may be made when they are read."""

    def __init__(self, templates: Mapping[int, Template], raise_fault: Callable[[BaseException], NoReturn]) -> None:
        self._templates = templates
        self._raise_fault = raise_fault

    def __getitem__(self, choice: int) -> Template:
        try:
            return self._templates[choice]
        except (Exception, *EXITS) as error:
            self._raise_fault(error)

    def __iter__(self) -> Iterator[int]:
        return iter(self._templates)

    def __len__(self) -> int:
        return len(self._templates)
