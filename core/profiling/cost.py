"""FLOPs and bytes of a step, by module: the minimum that the device must compute and move, on one rank.

Conventions:

- FLOPs are those of matrix products, two per multiplication with its addition. Norms, activations, rotary embeddings,
  softmax, routing and sampling count none; they are bound by memory.
- Attention counts the pairs of a query and a key that the query sees: 4 * heads * head_dim per pair (q.k, and the sum
  over values). A causal mask therefore halves the work of a whole prompt, and a window limits the pairs: kernels skip
  what is masked. (vLLM counts new tokens * context instead: up to twice as much for a prompt, the same for a decode.)
- Weights are read once per step (per iteration of a multi-step step), with their bytes on the device: quantized values,
  scales and biases. A mixture of experts reads the distinct experts that its tokens are expected to choose if all are
  equally likely, E * (1 - (1 - k/E)^T) of E experts for T tokens with k experts each.
- The KV cache is read once per sequence: the keys and values that some query of the step sees, those of the step's own
  tokens included; sequences that share a prefix each read it. Keys and values of new tokens are written once.
- Activations are what a module must read and write if all operations within it are fused, in the model's dtype: the
  inputs and outputs of linear layers, queries, keys, values and outputs of attention. Logits count nothing: a fused
  argmax writes none.
- The bytes of a module are all of these. Those of a whole step leave out activations, since whether they pass through
  memory depends on fusion and on the size of caches: the step's floor is that of weights, KV cache, states and FLOPs.
"""

from __future__ import annotations

from typing import Any, Literal

from attrs import evolve, fields, frozen

from engine.core.profiling.step_shape import StepShape, Window

ModuleKind = Literal["embedding", "norm", "linear", "attention", "experts", "state", "lm_head", "other"]


@frozen(kw_only=True)
class Peaks:
    """The maximum rates of a device."""

    bandwidth: float
    """Bytes per second, read and written."""
    flops: float
    """FLOPs per second of dense matrix products in the model's dtype."""
    flops8: float | None = None
    """FLOPs per second of dense products of 8-bit numbers; None: as `flops`."""
    source: str = ""
    """How the peaks are known, for people to read."""


@frozen(kw_only=True)
class Work:
    """FLOPs and bytes."""

    flops: float = 0
    flops8: float = 0
    """The part of `flops` in layers with 8-bit weights."""
    weight_bytes: float = 0
    kv_read: float = 0
    """Bytes of keys, values and states read."""
    kv_written: float = 0
    """Bytes of keys, values and states written."""
    activation_bytes: float = 0
    """Bytes of activations read and written."""

    def __add__(self, other: Work) -> Work:
        return Work(
            flops=self.flops + other.flops,
            flops8=self.flops8 + other.flops8,
            weight_bytes=self.weight_bytes + other.weight_bytes,
            kv_read=self.kv_read + other.kv_read,
            kv_written=self.kv_written + other.kv_written,
            activation_bytes=self.activation_bytes + other.activation_bytes,
        )

    @property
    def step_bytes(self) -> float:
        """Bytes of a whole step: all but activations."""
        return self.weight_bytes + self.kv_read + self.kv_written

    @property
    def bytes(self) -> float:
        """Bytes of a module on its own: activations too."""
        return self.step_bytes + self.activation_bytes

    @property
    def intensity(self) -> float:
        """FLOPs per byte of a module; 0 without bytes."""
        return self.flops / self.bytes if self.bytes else 0.0

    def compute_seconds(self, peaks: Peaks) -> float:
        """Minimum seconds that the FLOPs take."""
        return (self.flops - self.flops8) / peaks.flops + self.flops8 / (peaks.flops8 or peaks.flops)

    def step_floor(self, peaks: Peaks) -> float:
        """Minimum seconds of a whole step."""
        return max(self.step_bytes / peaks.bandwidth, self.compute_seconds(peaks))

    def module_floor(self, peaks: Peaks) -> float:
        """Minimum seconds of a module on its own. The floors of all modules exceed that of their step."""
        return max(self.bytes / peaks.bandwidth, self.compute_seconds(peaks))


@frozen(kw_only=True)
class ModuleCost:
    """What a module, or several alike, cost per step, token, pair and so on, on one rank.

    `name` distinguishes modules of one kind; the other fields that are not sums (`rows`, `eight_bit`, `window`,
    `num_experts`, `top_k`) say what the numbers are multiplied with.
    """

    name: str
    """Qualified name, as model.layers.0.mlp.down_proj."""
    kind: ModuleKind
    rows: Literal["tokens", "sampled"] = "tokens"
    """What counts as a row: every token, or only those whose logits are computed."""
    eight_bit: bool = False
    """Whether the weights have about 8 bits, for which devices have faster matrix products."""
    window: Window = None
    num_experts: int = 0
    """Over all ranks; 0: no experts."""
    top_k: int = 0
    """Experts per token."""

    weight_bytes: int = 0
    """Bytes of weights that are read in every step, those of experts excluded."""
    expert_bytes: int = 0
    """Bytes of the weights of all experts on this rank."""
    flops_per_row: float = 0
    activation_bytes_per_row: int = 0
    flops_per_pair: int = 0
    """Per pair of a query and a key."""
    kv_bytes_per_token: int = 0
    """Bytes of the keys and values of one token."""
    state_bytes: int = 0
    """Bytes of one sequence's state, which is read and written."""

    def work(self, shape: StepShape) -> Work:
        """FLOPs and bytes in a step of this shape."""
        rows = shape.tokens if self.rows == "tokens" else shape.sampled
        flops = self.flops_per_row * rows
        if self.flops_per_pair:
            flops += self.flops_per_pair * shape.pairs[self.window]
        weights = self.weight_bytes * shape.iterations if rows else 0.0
        if self.num_experts and rows:
            chosen = 1 - (1 - self.top_k / self.num_experts) ** (rows / shape.iterations)
            weights += self.expert_bytes * chosen * shape.iterations
        kv_read = kv_written = self.state_bytes * shape.sequences
        if self.kv_bytes_per_token:
            kv_read += self.kv_bytes_per_token * shape.keys[self.window]
            kv_written += self.kv_bytes_per_token * shape.tokens
        return Work(
            flops=flops,
            flops8=flops if self.eight_bit else 0,
            weight_bytes=weights,
            kv_read=kv_read,
            kv_written=kv_written,
            activation_bytes=self.activation_bytes_per_row * rows,
        )

    def _added(self, other: ModuleCost) -> ModuleCost:
        return evolve(self, **{name: getattr(self, name) + getattr(other, name) for name in _SUMMED})

    @property
    def _key(self) -> ModuleCost:
        """Equal for modules whose sum has a cost of the same form."""
        zeros: dict[str, Any] = dict.fromkeys(_SUMMED, 0)
        return evolve(self, name="", **zeros)


_FACTORS = ("name", "kind", "rows", "eight_bit", "window", "num_experts", "top_k")
_SUMMED = tuple(field.name for field in fields(ModuleCost) if field.name not in _FACTORS)


@frozen(kw_only=True)
class ModelCost:
    """The costs of all modules of a model, on one rank. Plain data."""

    modules: tuple[ModuleCost, ...]
    uncounted: tuple[str, ...] = ()
    """Tensors, or layers with a state, of modules that core does not know, so that their FLOPs are unknown."""

    @property
    def windows(self) -> tuple[Window, ...]:
        """The windows of the attention layers, each once."""
        found = dict.fromkeys(module.window for module in self.modules if module.flops_per_pair)
        return tuple(found) or (None,)

    def work(self, shape: StepShape) -> Work:
        """FLOPs and bytes of a whole step."""
        total = Work()
        for module in self.modules:
            total += module.work(shape)
        return total

    def condensed(self) -> ModelCost:
        """The same costs, as few modules: those of a kind are summed as far as their costs have the same form."""
        sums: dict[ModuleCost, ModuleCost] = {}
        for module in self.modules:
            key = module._key
            known = sums.get(key)
            sums[key] = evolve(module, name=module.kind) if known is None else known._added(module)
        return ModelCost(modules=tuple(sums.values()), uncounted=self.uncounted)
