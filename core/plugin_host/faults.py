"""Turns an unintended error of a plugin into one that names the plugin, the call and the line of code."""

from __future__ import annotations

import dis
import inspect
import signal
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import PurePath
from types import CodeType, FrameType, TracebackType
from typing import Any

from attrs import define, evolve, frozen

from engine.core.errors import EngineError, ExecutorError, PluginError, PluginFaultError, StepFaultError
from engine.core.extras import DISTRIBUTION

CONSTRUCTOR = "its constructor"
MEMORY = ("MemoryError", "OutOfMemoryError")
"""Names of exceptions for lack of memory, which is no plugin's fault; names, so that torch need not be imported."""
DEVICE = "AcceleratorError"
"""Name of torch's exception for a device failure, which may be gone the next time."""
MEND = "mend it or choose another"
TRACEBACK = "the traceback says where (engine --debug)"
INSTALL = "install what it needs in the Python environment that the engine runs in"
MAX_TEXT = 200
"""Characters of an exception's text, or of an answer, in the sentence about a fault; the traceback has all of them."""
EXITS = (SystemExit, KeyboardInterrupt)
"""Exceptions that would end an event loop, and with it the process; a plugin may raise them by mistake."""
CORE = "engine.core."
FORWARD_METHODS = ("forward", "forward_into", "rotate_and_forward")
"""Methods of attention backends whose first argument is the number of a layer, which errors name."""


@frozen
class PluginCall:
    """A call of a plugin's method, as errors name it. Found in the frames of a traceback by `name_fault`."""

    owner: str
    """The plugin: attention 'mine' of mine 1.0."""
    call: str
    """The method, and the layer if there is one: forward() of layer 3."""


@define
class _Culprit:
    """The plugin's method that a traceback leads through, and the last line of the plugin's own code in it."""

    made: PluginCall
    of: object = None
    """The object whose method it is; None: not entered, because the arguments do not match."""
    packages: tuple[str, ...] = ()
    """The packages of the plugin's code: its class's, and the method's, which may be inherited."""
    place: str = ""

    def __str__(self) -> str:
        return f"{self.made.owner} in {self.made.call}" + (f" ({self.place})" if self.place else "")


@contextmanager
def blame(owner: str, call: str, hint: str = MEND) -> Iterator[None]:
    """Report an unintended error in the `with` block as the fault of the plugin `owner` in `call`.

    Raises PluginFaultError from the original, or ExecutorError if the device failed. EngineErrors are raised on purpose
    and pass unchanged; so do lack of memory and what a signal raises.
    """
    try:
        yield
    except BaseException as error:
        if is_no_fault(error):
            raise
        kinds = _kinds(error)
        place = traceback.extract_tb(error.__traceback__)[-1]
        message = f"{owner} failed in {call}: {kinds[0]}: {said(error)} ({place.filename}, line {place.lineno})"
        if DEVICE in kinds:
            raise ExecutorError(message) from error
        raise PluginFaultError(f"{message}; {INSTALL if isinstance(error, ImportError) else hint}") from error


def expect(right: object, owner: str, call: str, found: object, wanted: str) -> None:
    """Raise PluginError unless `right`: the plugin `owner` returned `found` from `call`, where `wanted` is due."""
    if not right:
        raise PluginError(f"{owner} returned {shown(found)} from {call}, not {wanted}; {MEND}")


def shown(found: object) -> str:
    """A plugin's answer, as errors say it: at most MAX_TEXT characters."""
    try:
        text = repr(found)
    except Exception as error:  # of the plugin's own class
        text = f"a {type(found).__qualname__} whose repr() raises {type(error).__name__}"
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}..."


def said(error: BaseException) -> str:
    """The text of an exception, which may be of the plugin's own class."""
    try:
        return str(error)
    except Exception as raised:
        return f"an exception whose str() raises {type(raised).__name__}"


def import_fault(error: BaseException) -> str:
    """An error of a plugin's import, as errors say it: with the file and line that raised it, unless core or Python's
    own import did, as for a module that does not exist."""
    places = [
        f" ({frame.f_code.co_filename}, line {line})"
        for frame, line in _frames(error.__traceback__)
        if not frame.f_globals.get("__name__", "").startswith((CORE, "importlib"))
    ]
    return f"{type(error).__name__}: {said(error)}{places[-1] if places else ''}"


def is_no_fault(error: BaseException) -> bool:
    """Whether an error is deliberate (an EngineError), a lack of memory, or raised by a signal, as by Ctrl-C."""
    if isinstance(error, EngineError) or _lacks_memory(error):
        return True
    return not isinstance(error, Exception) and _from_signal(error)


def raise_interrupt(error: BaseException) -> None:
    """Raise an error again if a signal raised it, as Ctrl-C does; return for whatever a plugin raised."""
    if not isinstance(error, Exception) and _from_signal(error):
        raise error


def name_fault(error: BaseException, runs: PluginCall | None = None, not_built_in: str = "") -> None:
    """Raise StepFaultError from `error`, naming the plugin whose method was running; return if there was none.

    The traceback says which method, so a step pays nothing until something is raised. runs: the call to name where no
    frame of the traceback is a plugin's. not_built_in: the end of the message if all plugins in the traceback are
    built in: other plugins, which may have returned what these cannot compute with. Also returns if
    `is_no_fault(error)`; then the text of an error for lack of memory says which plugin raised it.
    """
    if is_no_fault(error):
        if _lacks_memory(error):
            _add_culprit(error)
        return
    culprits = _culprits(error.__traceback__)
    if not culprits and runs is not None:
        culprits = [_Culprit(runs, place=_place(*_frames(error.__traceback__)[-1]))]
    if not culprits:
        return
    *callers, last = culprits
    text = said(error).strip().partition("\n")[0]
    text = f": {text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + '...'}" if text else ""
    place = f" ({last.place})" if last.place else ""
    # The mistake may be in the arguments with which a third party's plugin calls a built-in one.
    called = "".join(f", called by {one}" for one in reversed(callers) if not _is_built_in(one))
    suspects = not_built_in if all(map(_is_built_in, culprits)) else ""
    raise StepFaultError(
        f"{last.made.owner} failed in {last.made.call}: {type(error).__name__}{text}{place}{called}{suspects}"
    ) from error


def _lacks_memory(error: BaseException) -> bool:
    return any(name in _kinds(error) for name in MEMORY)


def _add_culprit(error: BaseException) -> None:
    """Add the plugin whose method was running to the text of an error, whose class must stay. Once."""
    culprits = _culprits(error.__traceback__)
    if culprits and (raised := f"raised by {culprits[-1]}") not in str(error):
        error.args = ("; ".join(filter(None, (str(error), raised))),)


def _is_built_in(culprit: _Culprit) -> bool:
    return f" of {DISTRIBUTION} " in culprit.made.owner


def _culprits(trace: TracebackType | None) -> list[_Culprit]:
    """The plugins' methods that a traceback leads through, outermost first."""
    found: list[_Culprit] = []
    layer: PluginCall | None = None
    for frame, line in _frames(trace):
        module = frame.f_globals.get("__name__", "")
        arguments = _arguments(frame)
        if module.startswith(CORE):
            made = frame.f_locals.get("plugin_call")
            if isinstance(made, PluginCall):
                found.append(_Culprit(made))
            layers = [getattr(one, "plugin_call", None) for one in arguments]
            layer = next((one for one in layers if isinstance(one, PluginCall)), layer)
            continue
        this = arguments[0] if arguments else None
        call = _call_of(this, _method_name(this, frame.f_code), arguments, layer)
        if call is not None and not (found and found[-1].of is this):
            if found and found[-1].of is None and found[-1].made.owner == call.owner:
                call = found.pop().made  # noted by the engine's own frame before the call
            found.append(_Culprit(call, this, (_package(_class(this).__module__), _package(module))))
        if found and _package(module) in found[-1].packages:
            found[-1].place = _place(frame, line)
    return found


def _call_of(this: object, method: str, arguments: list[Any], layer: PluginCall | None) -> PluginCall | None:
    """The call of a plugin's method that a frame is; None if the frame's first argument is no plugin's object."""
    from engine.core.quant.base import FusedInputQuantization, LinearKernel

    if isinstance(this, LinearKernel | FusedInputQuantization):
        return None if layer is None else evolve(layer, call=f"{method}() of {layer.call}")
    owner = getattr(_class(this), "plugin_owner", None)
    if not isinstance(owner, str):
        return None
    numbered = method in FORWARD_METHODS and len(arguments) > 1 and isinstance(arguments[1], int)
    return PluginCall(owner, f"{method}() of layer {arguments[1]}" if numbered else f"{method}()")


def _arguments(frame: FrameType) -> list[Any]:
    """The positional arguments of the call that a frame is."""
    code = frame.f_code
    found = [frame.f_locals.get(name) for name in code.co_varnames[: code.co_argcount]]
    if code.co_flags & inspect.CO_VARARGS:
        rest = frame.f_locals.get(code.co_varnames[code.co_argcount + code.co_kwonlyargcount])
        found += rest if isinstance(rest, tuple) else ()
    return found


def _method_name(this: object, code: CodeType) -> str:
    """The name that an object's class has for a function; the function's own may be another."""
    for cls in _class(this).__mro__:
        for name, member in vars(cls).items():
            if code in (_code_of(member), _code_of(getattr(member, "__wrapped__", None))):
                return name
    return code.co_name


def _class(this: object) -> type:
    return this if isinstance(this, type) else type(this)


def _package(module: str) -> str:
    """The package of a plugin's own code: its top-level package; for a built-in plugin, engine.plugins."""
    parts = module.split(".")
    return ".".join(parts[:2]) if parts[0] == "engine" else parts[0]


def _place(frame: FrameType, line: int) -> str:
    """File and line; the file from the top-level package on."""
    path = PurePath(frame.f_code.co_filename)
    depth = len(frame.f_globals.get("__name__", "").split(".")) + (path.name == "__init__.py")
    return f"{PurePath(*path.parts[-depth:])}, line {line}"


def _frames(trace: TracebackType | None) -> list[tuple[FrameType, int]]:
    """(frame, line) of each entry of a traceback, outermost first."""
    found = []
    while trace is not None:
        found.append((trace.tb_frame, trace.tb_lineno))
        trace = trace.tb_next
    return found


def _kinds(error: BaseException) -> list[str]:
    return [cls.__name__ for cls in type(error).__mro__]


def _from_signal(error: BaseException) -> bool:
    """Whether a signal raised an error: through a handler in Python, or as Ctrl-C does, between two instructions."""
    trace, last = error.__traceback__, None
    handlers = {_code_of(signal.getsignal(number)) for number in signal.valid_signals()} - {None}
    while trace is not None:
        if trace.tb_frame.f_code in handlers:
            return True
        trace, last = trace.tb_next, trace
    if last is None or not isinstance(error, KeyboardInterrupt):
        return False
    instruction = last.tb_frame.f_code.co_code[last.tb_lasti]
    return dis.opname[instruction] not in ("RAISE_VARARGS", "RERAISE")


def _code_of(function: Any) -> CodeType | None:
    """The code of a function or method; None for one that is not written in Python."""
    while isinstance(function, partial):
        function = function.func
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    return code if isinstance(code, CodeType) else None
