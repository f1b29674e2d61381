"""Makes the W8 kernel of each linear layer for its device, and logs how layers compute."""

from __future__ import annotations

import logging

import torch
from attrs import evolve

from engine.core.quant import LinearSpec
from engine.plugins.quant.w8_cpu import cpu_kernel
from engine.plugins.quant.w8_kernel import NONE, W8Format, W8Kernel
from engine.plugins.quant.weight_only_matmuls import WeightOnlyMatmuls

log = logging.getLogger(__name__)


class W8Kernels:
    """Makes W8 kernels. Those of one device share a WeightOnlyMatmul."""

    def __init__(self, method: str) -> None:
        """method: name of the quantization method, for the log."""
        self._method = method
        self._logged: set[str] = set()
        self._matmuls = WeightOnlyMatmuls()

    def make(self, spec: LinearSpec, form: W8Format) -> W8Kernel:
        """The kernel of one layer. Raises CheckpointError where sharding the layer would cut blocks."""
        if spec.exact_input:
            form = evolve(form, activations=NONE)
        kernel = self._kernel(spec, form)
        self._log_once(kernel, form)
        return kernel

    def _kernel(self, spec: LinearSpec, form: W8Format) -> W8Kernel:
        if spec.device == "cpu":
            return cpu_kernel(spec, form)
        from engine.plugins.quant.w8_gpu import DequantizeEachCallKernel, W8GpuKernel
        from engine.plugins.quant.w8a8_matmul import has_tensor_cores_for

        device = torch.device(spec.device)
        can = form.dtype == "int8" or has_tensor_cores_for(device, form.torch_dtype)
        return (W8GpuKernel if can else DequantizeEachCallKernel)(spec, form, self._matmuls.on(device))

    def _log_once(self, kernel: W8Kernel, form: W8Format) -> None:
        """Log how layers compute, once per kind of layer."""
        text, slow = f"{form}: {kernel.describe()}", kernel.slow()
        where = f"(first: {kernel.spec.parts[0].name})"
        if text not in self._logged:
            self._logged.add(text)
            log.info("%s %s", text, where)
        if slow is not None and slow not in self._logged:
            self._logged.add(slow)
            log.warning("%s will be slow: %s %s", self._method, slow, where)
