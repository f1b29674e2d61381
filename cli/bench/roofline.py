"""The minimum time of a model's work on a machine: bytes over bandwidth, operations over matmul rate.

What is counted, and by which conventions, is in core/profiling/cost.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attrs import frozen

from engine.cli.bench.ceilings import Ceilings, find_ceilings
from engine.cli.bench.load import say
from engine.core.config import AUTO
from engine.core.errors import CheckpointError
from engine.core.profiling import ModelCost, Peaks, StepShape, visible_keys, visible_pairs

if TYPE_CHECKING:
    from engine.core.config import EngineConfig
    from engine.core.device import DeviceInfo
    from engine.core.engine import Engine


@frozen(kw_only=True)
class Roofline:
    """Minimum times of a model's work on a device."""

    cost: ModelCost
    """Cost of the steps on one rank."""
    ceilings: Ceilings

    @property
    def weight_bytes(self) -> float:
        """Bytes of weights that a decode step of one sequence reads."""
        return self.cost.work(StepShape.of(decodes=[1], windows=self.cost.windows)).weight_bytes

    def weights(self) -> float:
        """Seconds to read the weights once: the floor of a decode step of one short sequence."""
        return self.weight_bytes / self.ceilings.bandwidth

    def decode(self, batch: int, context: float) -> float:
        """Seconds of a decode step; context: average tokens per sequence."""
        seen = {
            window: round(batch * (context if window is None else min(context, window))) for window in self.cost.windows
        }
        return self._seconds(StepShape(tokens=batch, sampled=batch, sequences=batch, pairs=seen, keys=seen))

    def prefill(self, lengths: Iterable[int]) -> float:
        """Seconds to compute prompts, one row of logits each."""
        return self._seconds(StepShape.of(chunks=[(0, length) for length in lengths], windows=self.cost.windows))

    def load(self, lengths: Sequence[tuple[int, int]], max_running: int) -> float:
        """Seconds of requests (prompt tokens, output tokens) that all wait at the start, at most max_running per step.

        The first output token comes with the prompt. Steps with prefill and decode read the weights
        once for both, so neither bytes nor operations are a bound on top of the other: the larger counts.
        """
        parts = [(inputs, outputs - 1) for inputs, outputs in lengths]
        decodes = [more for _, more in parts]
        windows = self.cost.windows
        # The decode of output token i (from 1) sees a context of inputs + i.
        contexts = {window: sum(visible_pairs(inputs, more, window) for inputs, more in parts) for window in windows}
        prompts = {window: sum(visible_pairs(0, inputs, window) for inputs, _ in parts) for window in windows}
        read = {window: sum(visible_keys(0, inputs, window) for inputs, _ in parts) for window in windows}
        return self._seconds(
            StepShape(
                tokens=sum(map(sum, parts)),
                sampled=len(parts) + sum(decodes),
                sequences=len(parts) + sum(decodes),
                pairs={window: prompts[window] + contexts[window] for window in windows},
                keys={window: read[window] + contexts[window] for window in windows},
                iterations=max(*decodes, -(-sum(decodes) // max_running)) + 1,
            )
        )

    def _seconds(self, shape: StepShape) -> float:
        peaks = Peaks(bandwidth=self.ceilings.bandwidth, flops=self.ceilings.flops)
        return self.cost.work(shape).step_floor(peaks)


def find_roofline(
    cost: ModelCost, device: DeviceInfo, dtype: str, bandwidth: float | None, matmul: float | None
) -> Roofline:
    """The roofline of a model on a device, from the given limits (TB/s, TFLOP/s) or measured ones.

    Raises CheckpointError for a model with parts whose operations are unknown.
    """
    if cost.uncounted:
        more = f" and {len(cost.uncounted) - 1} others" if len(cost.uncounted) > 1 else ""
        raise CheckpointError(f"the operations of {cost.uncounted[0]}{more} are unknown")
    return Roofline(cost=cost, ceilings=find_ceilings(device, dtype, weight_bits(cost), bandwidth, matmul))


def weight_bits(cost: ModelCost) -> float:
    """Bits per weight of the linear layers and experts, scales included."""
    bits = numbers = 0.0
    for module in cost.modules:
        if module.kind == "linear":
            bits += 8 * module.weight_bytes
            numbers += module.flops_per_row / 2
        elif module.kind == "experts":
            bits += 8 * module.expert_bytes
            numbers += module.flops_per_row / 2 * module.num_experts / module.top_k
    return bits / numbers if numbers else 0.0


def measured_roofline(engine: Engine, bandwidth: float | None, matmul: float | None) -> Roofline | None:
    """The roofline of an engine's model on its device, from the given limits (TB/s, TFLOP/s) or measured ones.

    None, and why on stderr, where the model's work is unknown. The engine should be closed, so that its memory is free
    for the measurement.
    """
    info = engine.cache_info
    try:
        if info.cost is None:
            raise CheckpointError("the executor does not say what steps cost")
        return find_roofline(info.cost, engine.device, info.dtype, bandwidth, matmul)
    except CheckpointError as error:
        say(f"no roofline: {error}")
        return None


def configured_roofline(config: EngineConfig, bandwidth: float | None, matmul: float | None) -> Roofline | None:
    """As `measured_roofline`, for an engine that ran in another process."""
    from engine.core.device import find_device
    from engine.core.plugin_host import resolve_dtype
    from engine.core.weights import Checkpoint

    stored = Checkpoint.open(config.model.path).config
    device = find_device(config.executor.device)
    try:
        cost = stored_cost(config, stored, device)
        return find_roofline(cost, device, resolve_dtype(config, stored, device), bandwidth, matmul)
    except CheckpointError as error:
        say(f"no roofline: {error}")
        return None


def configured_running(config: EngineConfig) -> int:
    """The max_running of an engine of this configuration that ran in another process."""
    if config.scheduler.max_running:
        return config.scheduler.max_running
    from engine.core.device import find_device
    from engine.core.plugin_host import fit_running, load_plugins, resolve, settle, shape_of
    from engine.core.weights import Checkpoint

    device = find_device(config.executor.device)
    settled = settle(config, device)
    stored = Checkpoint.open(config.model.path).config
    model = resolve(settled, load_plugins(config.plugins), device, stored).model
    return fit_running(settled, shape_of(model, stored), device).scheduler.max_running


def stored_cost(config: EngineConfig, stored: Mapping[str, Any], device: DeviceInfo) -> ModelCost:
    """The cost of a model's steps, from a checkpoint whose weights are not loaded.

    stored: its config.json. Raises CheckpointError for weights that are quantized while they are loaded, since their
    size is then not in the checkpoint.
    """
    from engine.core.plugin_host import load_plugins, resolve, resolve_dtype, resolve_kv_dtype, settle
    from engine.core.profiling import count_unloaded

    if config.quant.name not in (AUTO, "none") and not stored.get("quantization_config"):
        raise CheckpointError("config.json does not say how many bits per weight quantization while loading leaves")
    config = settle(config, device)
    parts = resolve(config, load_plugins(config.plugins), device, stored)
    dtype = resolve_dtype(config, stored, device)
    quantization = stored.get("quantization_config")
    return count_unloaded(
        parts.model,
        stored,
        config,
        dtype=dtype,
        kv_dtype=resolve_kv_dtype(config, dtype, stored, parts.quant, device),
        quant=parts.quant.from_checkpoint(quantization, parts.options["quant"]),
        options=parts.options["models"],
        ranks=config.executor.tensor_parallel,
    ).condensed()
