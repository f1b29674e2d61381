"""Errors a user can cause or meet. Each message is a sentence that says what happened and what would work."""

from collections.abc import Iterable


class EngineError(Exception):
    """Base of every error this framework raises on purpose."""


class ConfigError(EngineError):
    """A setting is unknown, of the wrong type, or impossible together with another."""


class PluginError(EngineError):
    """A plugin is missing, broken, refused or breaks its contract."""


class PluginFaultError(PluginError):
    """A plugin raised an error that it did not mean to raise, which is the cause of this one."""


class CheckpointError(EngineError):
    """A model directory lacks a file or a tensor, or one has another shape or type than expected."""


class CapacityError(EngineError):
    """The model or its KV cache does not fit into the memory given."""


class InvalidRequestError(EngineError):
    """A request asks for something impossible; `parameter` names the field at fault, if one is."""

    def __init__(self, message: str, parameter: str | None = None) -> None:
        super().__init__(message)
        self.parameter = parameter


class ExecutorError(EngineError):
    """A step could not be run, or a worker is gone."""


def near_misses(name: str, known: Iterable[str]) -> str:
    """The end of a sentence about an unknown name: what may have been meant, and all that is known."""
    import difflib  # takes milliseconds, for errors alone

    names = list(known)
    close = difflib.get_close_matches(name, names, n=3)
    hint = f"did you mean {' or '.join(close)}? " if close else ""
    return f"{hint}known: {', '.join(names) or 'nothing'}"
