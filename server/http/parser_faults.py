"""Reports what an output parser raises by mistake, in the name of its plugin."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from engine.core.errors import StepFaultError
from engine.core.plugin_host import PluginCall, name_fault
from engine.core.protocols import ApiError

log = logging.getLogger(__name__)


def raise_parser_fault(owner: str, method: str, error: BaseException) -> NoReturn:
    """Log an error of a parser's method and raise an ApiError that names the plugin.

    Raises `error` itself if it is deliberate, a lack of memory, or raised by a signal. owner: how errors name the
    plugin.
    """
    if isinstance(error, ApiError):
        raise error
    try:
        name_fault(error, PluginCall(owner, f"{method}()"))
    except StepFaultError as fault:
        log.error("%s", fault, exc_info=error)
        raise ApiError(500, str(fault)) from error
    raise error


@contextmanager
def parser_faults(owner: str, method: str) -> Iterator[None]:
    """Report an error in the `with` block, which calls a parser's method, as `raise_parser_fault` does."""
    try:
        yield
    except BaseException as error:
        raise_parser_fault(owner, method, error)
