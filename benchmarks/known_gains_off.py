"""The plain ways of doing what the engine does, for known_gains.py: each a context manager that replaces a function.

They work on what runs in this process, so the executor must be `uniproc`.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pkgutil import resolve_name
from typing import Any
from unittest.mock import patch

import attrs
import torch


@contextmanager
def batch_built_anew() -> Iterator[None]:
    """Nothing of a batch is kept between steps, although its sequences are the same.

    Each step lists the decoding sequences again, builds their sampling batch, and with CUDA graphs sends their rows and
    positions to the device.
    """

    def forgetting(method: Callable[..., Any], forget: Callable[[Any], None]) -> Callable[..., Any]:
        def call(self: Any, *arguments: Any, **named: Any) -> Any:
            forget(self)
            return method(self, *arguments, **named)

        return call

    def forget_members(self: Any) -> None:
        self._changed, self._numbers = True, (-1,)

    def forget_batch(self: Any) -> None:
        self._batch = None

    def forget_rows(self: Any) -> None:
        self._current = None

    with ExitStack() as stack:
        for method, forget in (
            ("engine.core.schedulers.decode_set.DecodeSet.members", forget_members),
            ("engine.core.sampling.sampler.Sampler._batch_of", forget_batch),
            ("engine.core.runner.cuda_graphs.DecodeGraphs._send", forget_rows),
        ):
            stack.enter_context(patch(method, forgetting(resolve_name(method), forget)))
        yield


@contextmanager
def outputs_as_attrs() -> Iterator[None]:
    """The outputs of a step are instances of an ordinary frozen class, which the garbage collector tracks."""
    from engine.core.types import Output

    fields = {
        name: attrs.field(default=default)
        for name, default in zip(Output.__struct_fields__[1:], Output.__struct_defaults__, strict=True)
    }
    plain = attrs.make_class("Output", {"request": attrs.field(), **fields}, frozen=True, kw_only=True)
    with _replaced_everywhere(Output, plain):
        yield


@contextmanager
def blocking_copies() -> Iterator[None]:
    """Copies between host and device use ordinary memory, and the host waits for each."""
    from engine.core import transfer

    def to_device(arrays: Sequence[Any], device: torch.device) -> list[torch.Tensor]:
        return [torch.from_numpy(array.copy()).to(device) for array in arrays]

    def tensor_to_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
        return values.to(device)

    def begin(*tensors: torch.Tensor) -> transfer.HostCopy:
        return transfer.HostCopy([each.to("cpu", copy=True) for each in tensors], torch.device("cpu"))

    with (
        _replaced_everywhere(transfer.to_device, to_device),
        _replaced_everywhere(transfer.tensor_to_device, tensor_to_device),
        patch.object(transfer.HostCopy, "begin", begin),
    ):
        yield


@contextmanager
def no_greedy_path() -> Iterator[None]:
    """Greedy batches take the path of drawn tokens, on which greedy rows take the most likely token too."""
    with patch("engine.core.sampling.sampler.Sampler.sampling_path", lambda self, sequences: self.draw_path):
        yield


@contextmanager
def no_gc_freeze() -> Iterator[None]:
    """The garbage collector scans the objects of the start-up too."""
    with patch.object(gc, "freeze", lambda: None):
        yield


@contextmanager
def _replaced_everywhere(original: Any, replacement: Any) -> Iterator[None]:
    """Replace a class or function in every module of the engine that has imported it."""
    import engine.core.runner  # noqa: F401  (imports all modules of a step)

    with ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            if name.startswith("engine."):
                for attribute, value in list(vars(module).items()):
                    if value is original:
                        stack.enter_context(patch.object(module, attribute, replacement))
        yield
