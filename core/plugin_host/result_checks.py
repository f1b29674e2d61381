"""Checks what methods of plugins return in a runner's first steps: type, shape, dtype and device of tensors."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import new_class
from typing import TYPE_CHECKING, Any, TypeVar, cast

from attrs import evolve

from engine.core.attention.pair import AttentionPair
from engine.core.errors import StepFaultError
from engine.core.plugin_host.faults import FORWARD_METHODS, PluginCall
from engine.core.plugin_host.guard import owner_of

if TYPE_CHECKING:
    import torch

    from engine.core.attention.groups import CacheLayout
    from engine.core.models.base import ModelSpec
    from engine.core.models.forward_pass import ForwardPass

T = TypeVar("T", bound=type)

Check = Callable[..., str | None]
"""Called with a method's result and its arguments; what is wrong with the result, or None."""
FLOATS = ("float32", "bfloat16", "float16")


class ResultChecks:
    """The checks of one runner. After `end` the checked methods are the plugin's own again, and nothing is left."""

    def __init__(self) -> None:
        self._at_end: list[Callable[[], None]] = []

    def model(self, cls: T, spec: ModelSpec, dtype: str) -> T:
        """A subclass of a model's class whose results are checked. dtype: of activations."""

        def forward(result: object, run: ForwardPass) -> str | None:
            tokens = run.batch.tokens
            return tensor_error(result, (len(tokens), spec.hidden_size), (dtype,), tokens.device)

        def logits(result: object, hidden: torch.Tensor) -> str | None:
            return tensor_error(result, (len(hidden), spec.vocab_size), FLOATS, hidden.device)

        def greedy(result: object, hidden: torch.Tensor) -> str | None:
            if not (isinstance(result, tuple) and len(result) == 2):
                return f"{describe(result)}, not a pair of the max logits and their tokens"
            for one, what, wanted in zip(result, ("max logits", "tokens"), ("float32", "int64"), strict=True):
                wrong = tensor_error(one, (len(hidden),), (wanted,), hidden.device)
                if wrong:
                    return f"as {what}: {wrong}"
            return None

        return self._checked(cls, {"forward": forward, "logits": logits, "greedy": greedy})

    def attention(self, cls: Any, layout: CacheLayout | None = None) -> Any:
        """A subclass of an attention backend's class whose results are checked, or a pair of such classes."""
        if isinstance(cls, AttentionPair):
            prefill, decode = (self.attention(part, layout) for part in cls.parts)
            return evolve(cls, parts=(prefill, decode))
        resized = layout is not None and any(group.spec.value_head_dim is not None for group in layout.groups)

        def forward(result: object, layer: int, q: torch.Tensor, *others: object, **named: object) -> str | None:
            shape = (*q.shape[:-1], None if resized else q.shape[-1])
            return tensor_error(result, shape, (_name(q.dtype),), q.device)

        def forward_into(result: object, *arguments: object, **named: object) -> str | None:
            return None if result is None else f"{describe(result)}, which is ignored; write to `out` and return None"

        def rotate_and_forward(
            result: object, layer: int, qkv: torch.Tensor, *others: object, **named: object
        ) -> str | None:
            if result is None:
                return None
            return tensor_error(result, (len(qkv), None, None), (_name(qkv.dtype),), qkv.device)

        checks: dict[str, Check] = {
            "forward": forward,
            "forward_into": forward_into,
            "rotate_and_forward": rotate_and_forward,
        }
        return self._checked(cls, checks)

    def speculator(self, cls: T, dtype: str) -> T:
        """A subclass of the class of a speculator on the device whose results are checked. dtype: of activations."""

        def hidden(result: object, run: ForwardPass, *others: object, **named: object) -> str | None:
            tokens = run.batch.tokens
            return tensor_error(result, (len(tokens), None), (dtype,), tokens.device)

        def choose(result: object, hidden: torch.Tensor) -> str | None:
            return tensor_error(result, (len(hidden),), ("int64",), hidden.device)

        return self._checked(cls, {"observe": hidden, "advance": hidden, "choose": choose})

    def call(self, function: Callable[..., Any], plugin_call: PluginCall, check: Check) -> Callable[..., Any]:
        """A function that calls a plugin's `function` and checks its result. The caller drops it `at_end`."""

        def checked(*arguments: Any, **named: Any) -> Any:
            return _accept(function(*arguments, **named), plugin_call, check, arguments, named)

        return checked

    def at_end(self, drop: Callable[[], None]) -> None:
        """Have `drop` called when the checks end."""
        self._at_end.append(drop)

    def end(self) -> None:
        """Remove all checks; a second call does nothing."""
        while self._at_end:
            self._at_end.pop()()

    def _checked(self, cls: T, checks: Mapping[str, Check]) -> T:
        """A subclass of `cls` whose methods are checked until `end`, and then inherited as they are."""
        owner = owner_of(cls)
        members: dict[str, Any] = {
            "__module__": cls.__module__,
            "__qualname__": cls.__qualname__,
            "__doc__": cls.__doc__,
            "__slots__": (),
            "plugin_owner": owner,
            **{name: _checked_method(cls, name, owner, checks[name]) for name in checks},
        }
        made = cast(T, new_class(cls.__name__, (cls,), exec_body=lambda namespace: namespace.update(members)))
        for name in checks:
            self.at_end(functools.partial(delattr, made, name))
        return made


def _checked_method(cls: type, name: str, owner: str, check: Check) -> Callable[..., Any]:
    """What replaces a method of the plugin's class until the checks end."""
    original = inspect.getattr_static(cls, name)

    @functools.wraps(original)
    def checked(self: Any, *arguments: Any, **named: Any) -> Any:
        numbered = name in FORWARD_METHODS and arguments and isinstance(arguments[0], int)
        plugin_call = PluginCall(owner, f"{name}() of layer {arguments[0]}" if numbered else f"{name}()")
        result = original.__get__(self, type(self))(*arguments, **named)
        return _accept(result, plugin_call, check, arguments, named)

    return checked


def _accept(result: Any, call: PluginCall, check: Check, arguments: Sequence[Any], named: Mapping[str, Any]) -> Any:
    """The result, if it is right. Raises StepFaultError, naming plugin and method."""
    wrong = check(result, *arguments, **named)
    if wrong is None:
        return result
    raise StepFaultError(f"{call.owner} returned a wrong result from {call.call}: {wrong}")


def tensor_error(
    found: object, shape: tuple[int | None, ...], dtypes: Sequence[str], device: torch.device
) -> str | None:
    """What is wrong with a result that must be a tensor of this shape, on this device, of one of these types.

    shape: None for a size that may be any.
    """
    import torch

    if isinstance(found, torch.Tensor):
        sizes = found.shape
        fits = len(sizes) == len(shape) and all(
            size is None or own == size for own, size in zip(sizes, shape, strict=True)
        )
        if fits and _name(found.dtype) in dtypes and found.device == device:
            return None
    wanted = f"[{', '.join('any' if size is None else str(size) for size in shape)}] {' or '.join(dtypes)} on {device}"
    return f"{describe(found)}, not {'' if isinstance(found, torch.Tensor) else 'a tensor '}of {wanted}"


def describe(found: object) -> str:
    """An object, as errors say it."""
    import torch

    if isinstance(found, torch.Tensor):
        return f"a tensor of {list(found.shape)} {_name(found.dtype)} on {found.device}"
    return "None" if found is None else f"an object of class {type(found).__qualname__}"


@functools.cache
def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
