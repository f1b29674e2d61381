"""Wraps a plugin's class so that every mistake in its start-up calls is reported as the fault of that plugin."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable
from types import new_class
from typing import Any

from attrs import frozen

from engine.core.plugin_host.faults import CONSTRUCTOR, MEND, TRACEBACK, blame


@frozen
class StartupCall:
    """A member of a contract that the engine uses while it starts, and never during a step."""

    name: str
    hint: str = MEND
    """End of the error message: what to do about the fault."""
    runs_other_plugins: bool = False
    """Whether the fault may be in another plugin, which this call runs."""

    def __str__(self) -> str:
        return CONSTRUCTOR if self.name == "__init__" else f"{self.name}()"


REFUSES = StartupCall("refuses")
CONSTRUCT = StartupCall("__init__")
STARTUP_CALLS: dict[str, tuple[StartupCall, ...]] = {
    "attention": (REFUSES, CONSTRUCT),
    "quant": (REFUSES, StartupCall("kv_dtype"), StartupCall("from_checkpoint")),
    "schedulers": (REFUSES, CONSTRUCT),
    "executors": (
        REFUSES,
        CONSTRUCT,
        StartupCall("asynchronous"),
        StartupCall("watch"),
        StartupCall("start", hint=TRACEBACK, runs_other_plugins=True),
    ),
    "models": (
        REFUSES,
        StartupCall(
            "spec",
            hint="where config.json lacks something, it should raise CheckpointError"
            " (engine.core.weights.read_key does)",
        ),
        CONSTRUCT,
    ),
    "parsers": (REFUSES, StartupCall("recognizes"), CONSTRUCT),
    "grammars": (REFUSES, CONSTRUCT),
    "speculators": (REFUSES, StartupCall("shape"), CONSTRUCT),
}
"""Extension point -> the calls that `guarded` wraps."""


def guarded(cls: type, owner: str, calls: Iterable[StartupCall]) -> type:
    """A subclass of `cls` whose `calls` raise PluginFaultError, naming `owner`, in place of an unintended error.

    Every other method is inherited as it is: a step pays nothing. `__wrapped__` is `cls`.
    """
    members: dict[str, Any] = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "__slots__": (),
        "__wrapped__": cls,
        "plugin_owner": owner,
    }
    for call in calls:
        original = inspect.getattr_static(cls, call.name, None)
        if hasattr(original, "__get__"):  # a method or a property, not a plain value
            members[call.name] = _guarded_member(original, owner, call)
    return new_class(cls.__name__, (cls,), exec_body=lambda namespace: namespace.update(members))


def owner_of(cls: object) -> str:
    """The plugin of a class (or of a pair of attention backends), as errors name it."""
    owner: str | None = getattr(cls, "plugin_owner", None)
    return owner if owner is not None else getattr(cls, "__qualname__", str(cls))


def _guarded_member(original: Any, owner: str, call: StartupCall) -> Any:
    """What replaces a method or property of the plugin's class."""
    if call.runs_other_plugins:
        owner = f"{owner}, or what it runs,"

    if isinstance(original, classmethod | staticmethod):

        @functools.wraps(original.__func__)
        def class_call(cls: type, *arguments: Any, **named: Any) -> Any:
            with blame(owner, str(call), call.hint):
                return original.__get__(None, cls)(*arguments, **named)

        return classmethod(class_call)

    if callable(original):

        @functools.wraps(original)
        def instance_call(self: Any, *arguments: Any, **named: Any) -> Any:
            with blame(owner, str(call), call.hint):
                return original.__get__(self, type(self))(*arguments, **named)

        return instance_call

    def read(self: Any) -> Any:
        with blame(owner, call.name, call.hint):
            return original.__get__(self, type(self))

    return property(read)
