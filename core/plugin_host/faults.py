"""Turns an unintended error of a plugin, raised while an engine starts, into one that names the plugin."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from engine.core.errors import EngineError, ExecutorError, PluginFaultError

CONSTRUCTOR = "its constructor"
MEMORY = ("MemoryError", "OutOfMemoryError")
"""Names of exceptions for lack of memory, which is no plugin's fault; names, so that torch need not be imported."""
DEVICE = "AcceleratorError"
"""Name of torch's exception for a device failure, which may be gone the next time."""
MEND = "mend it or choose another"
TRACEBACK = "the traceback says where (engine --debug)"
INSTALL = "install what it needs in the Python environment that the engine runs in"


@contextmanager
def blame(owner: str, call: str, hint: str = MEND) -> Iterator[None]:
    """Report an unintended error in the `with` block as the fault of the plugin `owner` in `call`.

    Raises PluginFaultError from the original, or ExecutorError if the device failed. EngineErrors are raised on purpose
    and pass unchanged; so does lack of memory.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        kinds = [cls.__name__ for cls in type(error).__mro__]
        if isinstance(error, EngineError) or any(name in kinds for name in MEMORY):
            raise
        place = traceback.extract_tb(error.__traceback__)[-1]
        message = f"{owner} failed in {call}: {kinds[0]}: {error} ({place.filename}, line {place.lineno})"
        if DEVICE in kinds:
            raise ExecutorError(message) from error
        raise PluginFaultError(f"{message}; {INSTALL if isinstance(error, ImportError) else hint}") from error
