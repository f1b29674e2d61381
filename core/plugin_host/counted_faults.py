"""Counts the faults of a plugin that do not stop the engine, because core has a fallback for them."""

from __future__ import annotations

import logging

from engine.core.errors import PluginError
from engine.core.plugin_host.faults import raise_interrupt, said, shown


class InvalidAnswerError(PluginError):
    """A method of a plugin returned an invalid value."""

    def __init__(self, answer: object, wanted: str) -> None:
        """wanted: what would have been valid, with its article."""
        super().__init__(f"{shown(answer)} is not {wanted}")


class CountedFaults:
    """The faults of one plugin. The first of each method is logged, with a traceback if it raised."""

    def __init__(self, owner: str, log: logging.Logger, *, instead: str, metric: str) -> None:
        """owner: the plugin, as errors name it. instead: what happens "until it answers well". metric: in which the
        faults are counted."""
        self.count = 0
        self._owner = owner
        self._log = log
        self._instead = instead
        self._metric = metric
        self._logged: set[str] = set()

    def add(self, method: str, error: BaseException) -> None:
        """Count a fault of a method. Raises `error` if a signal raised it, as Ctrl-C does."""
        raise_interrupt(error)
        self.count += 1
        if method in self._logged:
            return
        self._logged.add(method)
        invalid = isinstance(error, InvalidAnswerError)
        self._log.error(
            "%s %s %s(): %s; %s until it answers well (logged once per method, counted in %s)",
            self._owner,
            "gave an invalid answer in" if invalid else "failed in",
            method,
            error if invalid else f"{type(error).__name__}: {said(error)}",
            self._instead,
            self._metric,
            exc_info=None if invalid else error,
        )
