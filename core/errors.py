"""The errors that the engine raises. Each message says what happened and what would work."""

from collections.abc import Iterable


class EngineError(Exception):
    """Base class of all errors that the engine raises deliberately."""


class ConfigError(EngineError):
    """A setting is unknown, of the wrong type, or incompatible with another setting."""


class PluginError(EngineError):
    """A plugin is missing or broken, refuses to serve, or violates its contract."""


class PluginFaultError(PluginError):
    """A plugin raised an unexpected error, which is the `__cause__` of this one."""


class CheckpointError(EngineError):
    """A model directory lacks a file or a tensor, or a tensor has an unexpected shape or data type."""


class DownloadError(CheckpointError):
    """A model cannot be fetched from the hub, or lacks files that the engine reads."""


class CapacityError(EngineError):
    """The model or its KV cache does not fit into the memory available."""


class InvalidRequestError(EngineError):
    """A request cannot be served as given; `parameter` names the field at fault, if there is one."""

    def __init__(self, message: str, parameter: str | None = None) -> None:
        super().__init__(message)
        self.parameter = parameter


class ExecutorError(EngineError):
    """A step failed, or a worker has exited."""


class ControlError(EngineError):
    """A control call was refused, or failed on a rank; the engine goes on."""


class ControlBusyError(ControlError):
    """A control call was refused because another one is in progress."""


class StepFaultError(PluginFaultError, ExecutorError):
    """A plugin raised an unexpected error in a step, or returned what its contract does not allow."""


def near_misses(name: str, known: Iterable[str]) -> str:
    """The end of an error message about an unknown name: similar names, and all known ones."""
    import difflib  # takes milliseconds, for errors alone

    names = list(known)
    close = difflib.get_close_matches(name, names, n=3)
    hint = f"did you mean {' or '.join(close)}? " if close else ""
    return f"{hint}known: {', '.join(names) or 'nothing'}"
