"""What a plugin raises without meaning to, while an engine starts, as an error that names the plugin."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from engine.core.errors import EngineError, ExecutorError, PluginFaultError

CONSTRUCTOR = "its constructor"
MEMORY = ("MemoryError", "OutOfMemoryError")
"""Classes, by name as torch need not be imported, that say there is no room: nobody's mistake, and others add hints."""
DEVICE = "AcceleratorError"
"""What torch raises when a device fails, which may be well the next time."""
MEND = "mend it or choose another"
TRACEBACK = "the traceback says where (engine --debug)"
INSTALL = "install what it needs in the Python environment that the engine runs in"


@contextmanager
def blame(owner: str, call: str, hint: str = MEND) -> Iterator[None]:
    """Whatever is raised in the `with` block is the fault of `owner`, a plugin, in `call`.

    It becomes a PluginFaultError with the original as its cause, or an ExecutorError if the device failed. EngineErrors
    are raised on purpose, and pass as they are; so does lack of memory.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        kinds = [cls.__name__ for cls in type(error).__mro__]
        if isinstance(error, EngineError) or any(name in kinds for name in MEMORY):
            raise
        place = traceback.extract_tb(error.__traceback__)[-1]
        told = f"{owner} failed in {call}: {kinds[0]}: {error} ({place.filename}, line {place.lineno})"
        if DEVICE in kinds:
            raise ExecutorError(told) from error
        raise PluginFaultError(f"{told}; {INSTALL if isinstance(error, ImportError) else hint}") from error
