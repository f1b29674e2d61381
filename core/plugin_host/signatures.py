"""Compares the signatures of a plugin's methods with those of its contract."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from engine.core.plugin_host.extension_points import ExtensionPoint


def wrong_signature(point: ExtensionPoint, cls: type) -> str | None:
    """A sentence on the first method of a plugin's class that cannot be called as its contract says; None if all can.

    A method may take further optional parameters, and give parameters other names: core passes them by position.
    Classes for an older version of the contract are not compared.
    """
    if getattr(cls, "api", None) != point.api:
        return None
    contract = next(one for one in point.contracts if issubclass(cls, one))
    for name, method in _methods(contract):
        problem = _problem(contract, cls, name, method)
        if problem is not None:
            shown = f"{contract.__name__}.{name}{_parameters(method)}"
            return f"{cls.__qualname__}.{name} {problem}; the contract is {shown}"
    return None


def _methods(contract: type) -> Iterator[tuple[str, Any]]:
    """The public methods and the constructor of a contract, as they stand in the class."""
    for name, member in vars(contract).items():
        is_public = not name.startswith("_") or name == "__init__"
        if is_public and inspect.isfunction(getattr(member, "__func__", member)):
            yield name, member


def _problem(contract: type, cls: type, name: str, method: Any) -> str | None:
    """Why a method of the class cannot stand for the contract's; None if it can."""
    found = inspect.getattr_static(cls, name)
    if found is method:
        return None
    of_class = isinstance(method, classmethod | staticmethod)
    is_descriptor = hasattr(type(found), "__get__")
    function = getattr(cls, name)
    if isinstance(found, functools.partial):  # which is passed self from Python 3.14 on
        return None
    if not callable(function):
        of_instance = is_descriptor and not of_class  # as a property, whose value only an instance has
        return None if of_instance else f"is {found!r}, not a method"
    if inspect.iscoroutinefunction(function) and not inspect.iscoroutinefunction(getattr(contract, name)):
        return "is a coroutine (async def), which is never awaited"
    try:
        signature = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):  # of a function that is not written in Python
        return None
    has_self = is_descriptor and not of_class and not isinstance(found, classmethod | staticmethod)
    this = [None] if has_self else []
    for arguments in _calls(getattr(contract, name), of_class=of_class, every=name == "__init__"):
        try:
            signature.bind(*this, *arguments)
        except TypeError as error:
            hint = "; mark it with @classmethod" if of_class and inspect.isfunction(found) else ""
            return f"takes {_parameters(function)}: {error}{hint}"
    return None


def _calls(function: Callable[..., Any], *, of_class: bool, every: bool) -> Iterator[list[None]]:
    """The positional arguments of calls that the contract allows: with all parameters, and unless `every` with those
    that have no default."""
    parameters = list(inspect.signature(function).parameters.values())
    parameters = parameters if of_class else parameters[1:]
    yield [None for _ in parameters]
    if not every:
        yield [None for one in parameters if one.default is inspect.Parameter.empty]


def _parameters(method: Any) -> str:
    """The parameters of a method as its source has them, without annotations."""
    signature = inspect.signature(getattr(method, "__func__", method), follow_wrapped=False)
    plain = [one.replace(annotation=inspect.Parameter.empty) for one in signature.parameters.values()]
    return str(signature.replace(parameters=plain, return_annotation=inspect.Signature.empty))
