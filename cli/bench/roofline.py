"""The minimum time of a model's work on a machine: bytes over bandwidth, operations over matmul rate.

What is counted: in a decode step every weight of the linear layers and of the LM head is read once (of the embedding a
few rows, which do not count; a tied one is the LM head), and the keys and values of every context. Operations are those
of the linear layers, the LM head's for the rows that are sampled, and of attention; two a multiplication with its sum.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attrs import frozen

from engine.cli.bench.ceilings import Ceilings, find_ceilings
from engine.cli.bench.load import say
from engine.core.config import AUTO
from engine.core.errors import CheckpointError
from engine.core.runner import DTYPE_BYTES
from engine.core.weights import read_key

if TYPE_CHECKING:
    from engine.core.config import EngineConfig
    from engine.core.engine import Engine

SCALE_BITS = 16
"""Bits of the scale of a group of weights."""


@frozen(kw_only=True)
class Shape:
    """Shape of a dense decoder with a gated MLP."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied: bool
    """Whether the LM head shares the weights of the embedding."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Shape:
        """Read the shape from config.json. Raises CheckpointError for another kind of model."""
        for key in ("num_experts", "num_local_experts", "n_routed_experts"):
            if config.get(key):
                raise CheckpointError(f"a step of a mixture of experts ({key} in config.json) reads no fixed weights")
        hidden = read_key(config, "hidden_size", int, least=1)
        heads = read_key(config, "num_attention_heads", int, least=1)
        return cls(
            num_layers=read_key(config, "num_hidden_layers", int, least=1),
            hidden_size=hidden,
            intermediate_size=read_key(config, "intermediate_size", int, least=1),
            num_heads=heads,
            num_kv_heads=read_key(config, "num_key_value_heads", int, heads, least=1),
            head_dim=read_key(config, "head_dim", int, hidden // heads, least=1),
            vocab_size=read_key(config, "vocab_size", int, least=1),
            tied=read_key(config, "tie_word_embeddings", bool, False),
        )

    @property
    def linear_weights(self) -> int:
        """Number of weights of all layers: q, k, v and output projections, gate, up and down."""
        attention = self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        return self.num_layers * self.hidden_size * (attention + 3 * self.intermediate_size)

    @property
    def head_weights(self) -> int:
        """Number of weights of the LM head."""
        return self.hidden_size * self.vocab_size

    def attention_flops(self, pairs: int) -> int:
        """Operations of `pairs` pairs of a query and a key, in all layers: q.k, and the sum over v."""
        return 4 * self.num_layers * self.num_heads * self.head_dim * pairs


@frozen(kw_only=True)
class Work:
    """Bytes and operations of the steps of one model."""

    shape: Shape
    linear_bytes: int
    """Bytes of the weights of the linear layers, scales included."""
    head_bytes: int
    kv_bytes: int
    """Bytes of the keys and values of one token in all layers."""

    @property
    def weight_bytes(self) -> int:
        """Bytes that a decode step reads at any batch size."""
        return self.linear_bytes + self.head_bytes

    @property
    def weight_bits(self) -> float:
        """Bits per weight of a linear layer."""
        return self.linear_bytes * 8 / self.shape.linear_weights

    def flops(self, tokens: int, sampled: int) -> int:
        """Operations of the linear layers for `tokens` tokens, and of the LM head for the sampled ones."""
        return 2 * (self.shape.linear_weights * tokens + self.shape.head_weights * sampled)


@frozen(kw_only=True)
class Roofline:
    """Minimum times of a model's work on a device."""

    work: Work
    ceilings: Ceilings

    def weights(self) -> float:
        """Seconds to read the weights once: the floor of a decode step of one short sequence."""
        return self.work.weight_bytes / self.ceilings.bandwidth

    def decode(self, batch: int, context: float) -> float:
        """Seconds of a decode step; context: average tokens per sequence."""
        moved = self.work.weight_bytes + self.work.kv_bytes * batch * context
        return self._seconds(
            moved, self.work.flops(batch, batch) + self.work.shape.attention_flops(round(batch * context))
        )

    def prefill(self, lengths: Iterable[int]) -> float:
        """Seconds to compute prompts, one row of logits each."""
        prompts = list(lengths)
        flops = sum(self.work.flops(length, 1) for length in prompts)
        return self._seconds(self.work.weight_bytes, flops + sum(map(self._causal, prompts)))

    def load(self, lengths: Sequence[tuple[int, int]], max_running: int) -> float:
        """Seconds of requests (prompt tokens, output tokens) that all wait at the start, at most max_running per step.

        The first output token comes with the prompt. Steps that compute prompts and decode at once read the weights
        once for both, so neither bytes nor operations are a bound on top of the other: the larger counts.
        """
        decodes = [outputs - 1 for _, outputs in lengths]
        steps = max(*decodes, -(-sum(decodes) // max_running)) + 1
        # The decode of output token i (from 1) reads a context of inputs + i.
        contexts = sum(
            inputs * more + more * (more + 1) // 2 for (inputs, _), more in zip(lengths, decodes, strict=True)
        )
        flops = sum(
            self.work.flops(inputs + more, 1 + more) + self._causal(inputs)
            for (inputs, _), more in zip(lengths, decodes, strict=True)
        )
        moved = steps * self.work.weight_bytes + contexts * self.work.kv_bytes
        return self._seconds(moved, flops + self.work.shape.attention_flops(contexts))

    def _causal(self, length: int) -> int:
        return self.work.shape.attention_flops(length * (length + 1) // 2)

    def _seconds(self, moved: float, flops: float) -> float:
        return max(moved / self.ceilings.bandwidth, flops / self.ceilings.flops)


def make_work(
    config: Mapping[str, Any], *, dtype: str, kv_dtype: str, quantized: bool, loaded_bytes: int | None = None
) -> Work:
    """Bytes and operations of a model.

    config: its config.json. quantized: whether its linear layers are; how many bits they have, quantization_config
    says, or else loaded_bytes, what all weights take on the device.
    Raises CheckpointError where neither says it, and for a model that is no dense decoder.
    """
    shape = Shape.from_config(config)
    itemsize = DTYPE_BYTES[dtype]
    head = shape.head_weights * itemsize
    linear = shape.linear_weights * itemsize
    if quantized:
        bits = stored_bits(config.get("quantization_config"))
        if bits is not None:
            linear = round(shape.linear_weights * bits / 8)
        elif loaded_bytes is not None:
            linear = min(linear, loaded_bytes - head * (1 if shape.tied else 2))
        else:
            raise CheckpointError("config.json does not say how many bits a weight has")
    kv = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * DTYPE_BYTES[kv_dtype]
    return Work(shape=shape, linear_bytes=linear, head_bytes=head, kv_bytes=kv)


def stored_bits(quantization: Mapping[str, Any] | None) -> float | None:
    """Bits per weight of a linear layer by a quantization_config, scales of groups included; None: unknown.

    Read: fp8, awq, gptq and the first group of compressed-tensors.
    """
    if not quantization:
        return None
    stored: Mapping[str, Any] = quantization
    for group in quantization.get("config_groups", {}).values():
        stored = group.get("weights") or {}
        break
    bits = stored.get("num_bits", stored.get("bits", stored.get("w_bit")))
    if bits is None and "fp8" in str(quantization.get("quant_method", "")):
        bits = 8
    if bits is None:
        return None
    group_size = stored.get("group_size", stored.get("q_group_size")) or 0
    return float(bits) + (SCALE_BITS / group_size if group_size > 0 else 0.0)


def measured_roofline(engine: Engine, bandwidth: float | None, matmul: float | None) -> Roofline | None:
    """The roofline of an engine's model on its device, from the given limits (TB/s, TFLOP/s) or measured ones.

    None, and why on stderr, for a model that is no dense decoder. The engine should be closed, so that its memory is
    free for the measurement.
    """
    info = engine.cache_info
    [quant] = [choice.name for choice in engine.parts.choices if choice.extension_point == "quant"]
    try:
        work = make_work(
            engine.checkpoint.config,
            dtype=info.dtype,
            kv_dtype=info.kv_dtype or info.dtype,
            quantized=quant != "none",
            loaded_bytes=info.weights_bytes,
        )
    except CheckpointError as error:
        say(f"no roofline: {error}")
        return None
    return Roofline(work=work, ceilings=find_ceilings(engine.device, info.dtype, work.weight_bits, bandwidth, matmul))


def configured_roofline(config: EngineConfig, bandwidth: float | None, matmul: float | None) -> Roofline | None:
    """As `measured_roofline`, for an engine that ran in another process."""
    from engine.core.device import find_device
    from engine.core.plugin_host import find_quant, load_plugins, resolve_dtype, resolve_kv_dtype
    from engine.core.weights import Checkpoint

    stored = Checkpoint.open(config.model.path).config
    device = find_device(config.executor.device)
    dtype = resolve_dtype(config, stored, device)
    quant = find_quant(config, load_plugins(config.plugins), device, stored)
    try:
        work = make_work(
            stored,
            dtype=dtype,
            kv_dtype=resolve_kv_dtype(config, dtype, stored, quant, device),
            quantized=bool(stored.get("quantization_config")) or config.quant.name not in (AUTO, "none"),
        )
    except CheckpointError as error:
        say(f"no roofline: {error}")
        return None
    return Roofline(work=work, ceilings=find_ceilings(device, dtype, work.weight_bits, bandwidth, matmul))
