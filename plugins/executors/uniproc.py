"""Runs the model on one device in the engine's own process."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import Any

import torch

from engine.core.config import EngineConfig
from engine.core.device import DeviceInfo
from engine.core.errors import EngineError, ExecutorError, StepFaultError
from engine.core.executors import (
    Deployment,
    Executor,
    Health,
    PendingResult,
    answer_call,
    answer_values,
    clear_frames,
    decode_call,
    encode_call,
    never_free,
    never_free_frames,
)
from engine.core.runner import Runner
from engine.core.startup import Listener, Phases
from engine.core.types import CacheInfo, Step


class UniprocExecutor(Executor):
    """Calls the runner directly. A CPU computes a step within `submit`; a GPU computes it asynchronously."""

    api = "2"

    @classmethod
    def refuses(cls, config: EngineConfig, device: DeviceInfo) -> str | None:
        if config.executor.tensor_parallel > 1:
            return f"it runs one device, not {config.executor.tensor_parallel}; use --executor tp, or --tp 1"
        return None

    def __init__(self, deployment: Deployment, options: Any) -> None:
        self._device = deployment.device
        self._runner: Runner | None = deployment.make_runner()
        self._failure = ""
        self._listener: Listener | None = None

    @property
    def asynchronous(self) -> bool:
        return self._device.type != "cpu"

    def watch(self, listener: Listener) -> None:
        self._listener = listener

    def start(self) -> CacheInfo:
        try:
            return self._running().start(Phases(self._listener))
        except BaseException as error:
            if self._device_works():
                clear_frames(error)  # they hold the weights
            else:
                never_free_frames(error)  # its frames may hold the memory of CUDA graphs
            self.shutdown()
            raise

    def submit(self, step: Step) -> PendingResult:
        try:
            return self._running().launch(step)
        except StepFaultError as error:
            self._failure = str(error)
            raise
        except EngineError:
            raise
        except Exception as error:  # torch's, out of memory included, and those of kernel compilers
            self._failure = f"step {step.id} failed on {self._device.torch_name}: {type(error).__name__}: {error}"
            raise ExecutorError(self._failure) from error

    def call(self, name: str, arguments: Mapping[str, Any]) -> list[Any]:
        runner = self._running()
        call = decode_call(encode_call(0, name, arguments))  # a copy of plain data, as in another process
        try:
            if self.asynchronous:
                torch.cuda.synchronize(self._device.torch_name)
            return answer_values([answer_call(runner, call)])
        except ExecutorError as error:
            self._failure = str(error)
            raise
        except RuntimeError as error:
            self._failure = f"a step before {name} failed on {self._device.torch_name}: {type(error).__name__}: {error}"
            raise ExecutorError(self._failure) from error

    def check(self) -> Health:
        """Return whether the runner exists and no step has failed in `submit`, nor the device in `call`."""
        if self._runner is None:
            return Health(ok=False, detail="the executor is shut down")
        return Health(ok=not self._failure, detail=self._failure)

    def shutdown(self) -> None:
        runner, self._runner = self._runner, None
        if runner is None:
            return
        if not self._device_works():
            never_free(runner)
            return
        layers = runner.layer_references()
        del runner
        if any(layer() is not None for layer in layers):  # models of other libraries refer to themselves
            gc.collect()
        if self.asynchronous:
            torch.cuda.empty_cache()

    def _device_works(self) -> bool:
        """Wait until the device has finished, as running kernels may still write to host memory; return whether it
        could. Where it could not, the failure was reported already."""
        if not self.asynchronous:
            return True
        try:
            torch.cuda.synchronize(self._device.torch_name)
        except RuntimeError:
            return False
        return True

    def _running(self) -> Runner:
        if self._runner is None:
            raise ExecutorError("the executor is shut down; make a new engine")
        return self._runner
