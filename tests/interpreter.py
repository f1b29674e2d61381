"""Makes Triton's interpreter quicker: what it does for every call in a kernel is done once per launch or never."""

from __future__ import annotations

import inspect
import math
import os
import sys
from collections.abc import Callable
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import Any

NOTHING = SimpleNamespace(restore=lambda: None)
"""Undoes a preparation that did nothing."""


def quicken() -> None:
    """Change the interpreter, if it runs the kernels, was imported and has not been changed.

    On a GPU it is imported too, but the compiler uses the types that this changes.
    """
    interpreter: Any = sys.modules.get("triton.runtime.interpreter")
    is_used = os.environ.get("TRITON_INTERPRET") == "1"
    if not is_used or interpreter is None or interpreter._patch_lang.__module__ == __name__:
        return
    interpreter._patch_lang = prepare_once(interpreter)
    interpreter._get_np_dtype = remember_dtypes(interpreter)
    remember_shapes(interpreter.tl.core)
    compare_to_bits(interpreter)
    # What it computes to check for overflow goes into assertions, which hold only where kernels are debugged.
    assert not interpreter.interpreter_builder.options.debug
    object.__setattr__(interpreter.interpreter_builder.options, "sanitize_overflow", False)


def prepare_once(interpreter: Any) -> Callable[..., Any]:
    """Replace the functions of triton.language by the interpreter's at a kernel's launch alone.

    The interpreter does so again for each call of a function of Triton's in a kernel, tl.sum and tl.cdiv among them.
    """
    prepare, prepared = interpreter._patch_lang, set[ModuleType]()

    @cache
    def languages(function: Callable[..., Any]) -> frozenset[ModuleType]:
        known = (interpreter.tl, interpreter.tl.core)
        return frozenset(one for one in function.__globals__.values() if inspect.ismodule(one) and one in known)

    def patch_lang(function: Callable[..., Any]) -> Any:
        wanted = languages(function)
        if wanted and wanted <= prepared:
            return NOTHING
        outermost, scope = not prepared, prepare(function)
        prepared.update(wanted)
        if outermost:
            restore = scope.restore
            scope.restore = lambda: (prepared.clear(), restore())
        return scope

    return patch_lang


def remember_dtypes(interpreter: Any) -> Callable[..., Any]:
    """Look numpy's dtypes up, rather than make a table of all of them for each value."""
    find, known = interpreter._get_np_dtype, dict[str, Any]()

    def get_np_dtype(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in known:
            known[name] = find(dtype)
        return known[name]

    return get_np_dtype


def remember_shapes(language: Any) -> None:
    """Check each shape once, and share what types and tensors of one shape have in common, which nothing changes."""

    @cache
    def of_type(sizes: tuple[int, ...]) -> tuple[Any, int]:
        if not sizes:
            raise TypeError("0d block_type is forbidden")
        return language.tuple(sizes), language.validate_block_shape(sizes)

    @cache
    def of_tensor(sizes: tuple[int, ...]) -> tuple[Any, Any]:
        return language.tuple([language.constexpr(size) for size in sizes]), language.constexpr(math.prod(sizes))

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        self.element_ty = element_ty
        self.shape, self.numel = of_type(tuple(language._unwrap_if_constexpr(size) for size in shape))

    def tensor(self: Any, handle: Any, type: Any) -> None:  # noqa: A002  (some callers name it)
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = of_tensor(tuple(type.shape) if type.is_block() else ())

    language.block_type.__init__ = block_type
    language.block_type.name = property(lambda self: f"<{self.shape}, {self.element_ty}>")
    language.tensor.__init__ = tensor


def compare_to_bits(interpreter: Any) -> None:
    """Give the results of comparisons the type of a bit, not that of what is compared.

    In Triton 3.9 a mask has integers else, where one of its parts is the comparison of two scalars, and is refused.
    """
    builder, handle, bit = interpreter.InterpreterBuilder, interpreter.TensorHandle, interpreter.tl.int1
    for name in dir(builder):
        if name.startswith(("create_icmp", "create_fcmp")):
            compare = getattr(builder, name)
            setattr(builder, name, lambda self, lhs, rhs, of=compare: handle(of(self, lhs, rhs).data, bit))
