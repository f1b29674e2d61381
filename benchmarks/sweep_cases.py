"""Cases of shape_sweep.py: random shapes, the shapes of known models, and floors.

Nothing here needs a GPU.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Mapping
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from attrs import evolve, field, frozen
from models import MODELS

sys.path.append(str(Path(__file__).resolve().parents[1] / "scripts"))
import tune_kernels

LINEAR_KINDS = ("bf16", "fp8", "int8", "4bit")
ATTENTION_KINDS = ("decode", "decode-float8", "prefill")
KINDS = ("bf16", "fp8", "4bit", "decode", "prefill", "int8", "decode-float8")
"""Kinds of cases, in the order in which they are drawn."""
MAX_RATIO = 1.05
"""A case passes if its time is at most this multiple of the predicted time."""
MAX_UNQUANTIZED_ROWS = 32
"""Up to this many rows the engine does not quantize the input of an 8-bit layer."""
MAX_OWN_ROWS = 16
"""Up to this many rows 16-bit weights are multiplied by the engine's kernels, not by the library."""
GROUP = 128
"""Inputs per scale of 4-bit weights."""
MAX_CACHE_BYTES = 2**29
"""Maximum bytes of keys and values of a layer."""
ROLES = ("qkv", "output", "gate_up", "down")


@frozen(kw_only=True)
class Limits:
    """What the GPU can do."""

    bandwidth: float
    """Bytes per second, read and written."""
    flops: float
    """Operations per second of a large matmul in bfloat16."""
    flops_8bit: float
    """The same in float8; taken for int8 too, whose nominal rate is equal."""

    def __str__(self) -> str:
        return (
            f"copy {self.bandwidth / 1e12:.3g} TB/s, matmul {self.flops / 1e12:.4g} TFLOP/s in bfloat16,"
            f" {self.flops_8bit / 1e12:.4g} in float8"
        )


@frozen(kw_only=True)
class Heads:
    """Shape of an attention layer."""

    heads: int
    kv_heads: int
    head_dim: int

    def __str__(self) -> str:
        return f"{self.heads}/{self.kv_heads}x{self.head_dim}"

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes that distances are measured by: numbers per key, query heads per KV head, size of a head."""
        return self.kv_heads * self.head_dim, self.heads // self.kv_heads, self.head_dim


@frozen(kw_only=True)
class LinearShape:
    """Shape of a linear layer, merged as in the engine."""

    outputs: int
    """Of gate and up together, for a gated layer."""
    inputs: int
    gated: bool = False

    def __str__(self) -> str:
        return f"{'gated ' if self.gated else ''}{self.outputs}x{self.inputs}"

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes that distances are measured by."""
        return self.outputs, self.inputs


@frozen(kw_only=True)
class Model:
    """Sizes of a model's decoder layer."""

    hidden: int
    intermediate: int
    attention: Heads

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Model:
        """Read a config.json."""
        heads = Heads(
            heads=config["num_attention_heads"], kv_heads=config["num_key_value_heads"], head_dim=config["head_dim"]
        )
        return cls(hidden=config["hidden_size"], intermediate=config["intermediate_size"], attention=heads)

    @classmethod
    def from_name(cls, name: str) -> Model:
        """A model whose tuning results come with the package, or one of models.MODELS."""
        sizes = tune_kernels.MODELS.get(name)
        if sizes is None:
            return cls.from_config(MODELS[name])
        heads = Heads(heads=sizes.heads, kv_heads=sizes.kv_heads, head_dim=sizes.head_dim)
        return cls(hidden=sizes.hidden, intermediate=sizes.intermediate, attention=heads)

    @property
    def linears(self) -> Mapping[str, LinearShape]:
        """The linear layers by role."""
        heads = self.attention
        width = heads.heads * heads.head_dim
        return {
            "qkv": LinearShape(outputs=width + 2 * heads.kv_heads * heads.head_dim, inputs=self.hidden),
            "output": LinearShape(outputs=self.hidden, inputs=width),
            "gate_up": LinearShape(outputs=2 * self.intermediate, inputs=self.hidden, gated=True),
            "down": LinearShape(outputs=self.hidden, inputs=self.intermediate),
        }


@frozen(kw_only=True)
class Space:
    """Limits of what is drawn, and the models whose shapes are neighbours."""

    hidden: tuple[int, int] = (1024, 8192)
    hidden_units: tuple[int, ...] = (64, 128)
    head_dims: tuple[int, ...] = (64, 128)
    groups: tuple[int, int] = (1, 8)
    """Query heads per KV head."""
    mlp: tuple[float, float] = (2.5, 5.5)
    """Intermediate size over hidden size."""
    mlp_units: tuple[int, ...] = (64, 256)
    rows: int = 2048
    sequences: int = 256
    context: tuple[int, int] = (128, 16384)
    prompts: int = 8
    prompt: tuple[int, int] = (128, 4096)
    models: tuple[str, ...] = tuple(tune_kernels.MODELS)
    """Those whose tuning results come with the package."""
    dtype: str = "bfloat16"
    """Of activations; not drawn."""
    control: bool = False
    """Draw known models instead of random ones. The neighbours of their layers are then those of other shapes."""

    def known(self) -> list[Model]:
        """The models whose shapes are neighbours."""
        return [Model.from_name(name) for name in self.models]

    def is_neighbour(self, known: Shape, shape: Shape) -> bool:
        """Whether a case of `shape` may be predicted from a known shape."""
        return not self.control or known != shape

    def draw_model(self, pick: random.Random, *, attention: bool = False) -> Model:
        """A model of random sizes. The query heads together are about as wide as the hidden size.

        attention: draw the model for its attention. A known one then has heads of a size that others have, too.
        """
        if self.control:
            known = self.known()
            heads = {model.attention for model in known}
            shared = [one for one in known if sum(one.attention.head_dim == other.head_dim for other in heads) > 1]
            return pick.choice(shared if attention else known)
        hidden = _rounded(_log_uniform(pick, *self.hidden), pick.choice(self.hidden_units))
        head_dim, group = pick.choice(self.head_dims), pick.randint(*self.groups)
        kv_heads = max(1, round(hidden / head_dim / group))
        intermediate = _rounded(hidden * pick.uniform(*self.mlp), pick.choice(self.mlp_units))
        heads = Heads(heads=kv_heads * group, kv_heads=kv_heads, head_dim=head_dim)
        return Model(hidden=hidden, intermediate=intermediate, attention=heads)


SMALL = Space(
    hidden=(64, 128),
    hidden_units=(32, 64),
    head_dims=(16,),
    groups=(1, 4),
    mlp=(1.5, 2.0),
    mlp_units=(32,),
    rows=40,
    sequences=3,
    context=(17, 40),
    prompts=2,
    prompt=(17, 40),
    models=("tiny",),
    dtype="float16",
)
"""Sizes, and a dtype, for Triton's interpreter."""


@frozen(kw_only=True)
class LinearCase:
    """A linear layer and the norm before it."""

    kind: str
    shape: LinearShape
    rows: int
    model: Model | None = field(default=None, eq=False)
    """The model that the layer was drawn from."""

    @property
    def name(self) -> str:
        """Of a line of the table."""
        return f"{self.kind} {self.shape}, {self.rows} rows"

    @property
    def near_name(self) -> str:
        """As a neighbour, which has the same kind and rows."""
        return str(self.shape)

    @property
    def quantizes_input(self) -> bool:
        """Whether the product is of 8-bit activations."""
        return self.kind in ("fp8", "int8") and self.rows > MAX_UNQUANTIZED_ROWS

    def smallest(self) -> LinearCase:
        """A layer so small that its time is that of its launches, with as many rows."""
        return evolve(self, shape=LinearShape(outputs=256, inputs=256, gated=self.shape.gated))

    def floor(self, limits: Limits) -> float:
        """Seconds to move the norm's operands, plus the longer of multiplying and moving the product's operands."""
        outputs, inputs = self.shape.sizes
        element = 1 if self.quantizes_input else 2
        weight = {"bf16": 2.0, "fp8": 1.0, "int8": 1.0, "4bit": 0.5 + 2 / GROUP}[self.kind] * outputs * inputs
        scales = 4 * outputs if self.kind in ("fp8", "int8") else 0
        results = outputs // 2 if self.shape.gated and not self.quantizes_input else outputs
        moved = weight + scales + self.rows * (inputs * element + results * 2)
        rate = limits.flops_8bit if self.quantizes_input else limits.flops
        product = max(moved / limits.bandwidth, 2 * self.rows * outputs * inputs / rate)
        return self.rows * inputs * (2 + element) / limits.bandwidth + product


@frozen(kw_only=True)
class AttentionCase:
    """Attention of one layer, of sequences that all decode or all prefill."""

    kind: str
    shape: Heads
    lengths: tuple[int, ...]
    """Context lengths of the sequences; in prefill all of their tokens are new."""

    @property
    def name(self) -> str:
        """Of a line of the table."""
        return f"{self.kind} {self.near_name}"

    @property
    def near_name(self) -> str:
        """As a neighbour, which is of the same kind."""
        return f"{self.shape}, {len(self.lengths)} x up to {max(self.lengths)}"

    @property
    def itemsize(self) -> int:
        """Bytes per number in the cache."""
        return 1 if self.kind == "decode-float8" else 2

    @property
    def cache_bytes(self) -> int:
        """Bytes of the keys and values of all sequences."""
        return 2 * sum(self.lengths) * self.shape.kv_heads * self.shape.head_dim * self.itemsize

    def smallest(self) -> AttentionCase:
        """One short sequence."""
        return evolve(self, lengths=(16,))

    def floor(self, limits: Limits) -> float:
        """Seconds: the longer of multiplying, and reading keys, values and queries and writing the results."""
        tokens, pairs = len(self.lengths), sum(self.lengths)
        if self.kind == "prefill":
            tokens, pairs = sum(self.lengths), sum(length * (length + 1) // 2 for length in self.lengths)
        width = self.shape.heads * self.shape.head_dim
        moved = self.cache_bytes + 4 * tokens * width
        return max(moved / limits.bandwidth, 4 * width * pairs / limits.flops)


Case = LinearCase | AttentionCase
Shape = LinearShape | Heads


def draw(seed: int, count: int, space: Space) -> list[Case]:
    """Random cases: all kinds in turn, and of linear layers few and many rows in turn."""
    return [
        draw_case(random.Random(f"{seed} {number}"), kind, many=number // len(KINDS) % 2 == 1, space=space)
        for number, kind in enumerate(islice(cycle(KINDS), count))
    ]


def draw_case(pick: random.Random, kind: str, *, many: bool, space: Space) -> Case:
    """A random case. many: whether a quantized linear layer gets enough rows for activations in 8 bits."""
    model = space.draw_model(pick, attention=kind in ATTENTION_KINDS)
    if kind in ATTENTION_KINDS:
        return AttentionCase(kind=kind, shape=model.attention, lengths=draw_lengths(pick, kind, model, space))
    shapes = list(model.linears.values())
    if kind == "4bit":  # checkpoints have whole groups
        shapes = [one for one in shapes if one.inputs % GROUP == 0]
    if not shapes:
        return draw_case(pick, kind, many=many, space=space)
    if kind == "bf16":
        rows = _log_uniform(pick, 1, MAX_OWN_ROWS)
    elif many:
        rows = _log_uniform(pick, MAX_UNQUANTIZED_ROWS + 1, space.rows)
    else:
        rows = _log_uniform(pick, 1, MAX_UNQUANTIZED_ROWS)
    return LinearCase(kind=kind, shape=pick.choice(shapes), rows=round(rows), model=model)


def draw_lengths(pick: random.Random, kind: str, model: Model, space: Space) -> tuple[int, ...]:
    """Random lengths between half of a random length and all of it, as many as a layer's cache may hold."""
    if kind == "prefill":
        count, longest = pick.randint(1, space.prompts), _log_uniform(pick, *space.prompt)
    else:
        count, longest = round(_log_uniform(pick, 1, space.sequences)), _log_uniform(pick, *space.context)
    token_bytes = 4 * model.attention.kv_heads * model.attention.head_dim
    longest = max(min(longest, MAX_CACHE_BYTES / token_bytes / count), space.context[0])
    return tuple(round(pick.uniform(longest / 2, longest)) for _ in range(count))


def _log_uniform(pick: random.Random, least: float, most: float) -> float:
    """A number whose logarithm is distributed evenly."""
    return math.exp(pick.uniform(math.log(least), math.log(most)))


def _rounded(value: float, unit: int) -> int:
    """The nearest multiple of a unit."""
    return round(value / unit) * unit
