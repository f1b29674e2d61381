"""Rotary position embedding (arXiv:2104.09864) and its extensions to longer contexts.

The frequencies are computed in float32 in the order of operations of Hugging Face transformers, so that angles at far
positions agree to the last bits.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar, cast

import torch
from attrs import frozen

from engine.core.errors import CheckpointError
from engine.core.layers.base import torch_dtype
from engine.core.weights.checkpoint import read_key

Angles = tuple[torch.Tensor, ...]
"""Cosines and sines of a pass's positions, in the form that the attention layers of the same LayerFactory take; with
RotarySpec.query_growth also the factors of queries, [tokens, 1, 1]."""

DEFAULT_THETA = 10000.0

RopeType = Literal["default", "linear", "llama3", "yarn", "dynamic", "longrope"]

T = TypeVar("T", int, float, bool)


@frozen(kw_only=True)
class RotarySpec:
    """How a model rotates its queries and keys."""

    rotary_dim: int
    """Number of leading dimensions of each head that are rotated."""
    type: RopeType
    parameters: Mapping[str, Any]
    """config.json's rope_parameters (rope_scaling in older files), including rope_theta."""
    interleaved: bool = False
    """Whether dimensions 2 i and 2 i + 1 rotate together, and not i and i + rotary_dim / 2."""
    max_len: int | None = None
    """Longest context that is served, by which the types dynamic and longrope choose their frequencies. None: the
    model's. All contexts use the same frequencies: keys in the cache cannot be rotated again when a context grows."""
    query_growth: float = 0.0
    """Rotated queries are multiplied by 1 + query_growth * log(1 + floor(position / length)), where length is the
    parameter original_max_position_embeddings."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any], head_dim: int, *, interleaved: bool = False) -> RotarySpec:
        """Read either layout of config.json. Raises CheckpointError if the type is unknown or a key is missing."""
        refusal = refuses_rope(config)
        if refusal is not None:
            raise CheckpointError(refusal)
        parameters = _parameters(config)
        rotary_dim = int(head_dim * _read(parameters, "partial_rotary_factor", float, 1.0))
        if rotary_dim < 2 or rotary_dim % 2 or rotary_dim > head_dim:
            raise CheckpointError(
                f"config.json asks for a rotary embedding over {rotary_dim} of {head_dim} dimensions a head;"
                " it must be an even number of them"
            )
        kind = cast("RopeType", rope_type(parameters))
        spec = cls(rotary_dim=rotary_dim, type=kind, parameters=parameters, interleaved=interleaved)
        spec.frequencies()  # raises for a missing key here, before weights are read
        return spec

    def frequencies(self) -> tuple[torch.Tensor, float]:
        """Radians per token of each pair of dimensions, [rotary_dim / 2] float32, and the factor on cosine and sine."""
        theta = _read(self.parameters, "rope_theta", float, DEFAULT_THETA, least=2)
        powers = theta ** (torch.arange(0, self.rotary_dim, 2, dtype=torch.float32) / self.rotary_dim)
        parameters = self.parameters if self.max_len is None else {**self.parameters, "served_len": self.max_len}
        return ROPE_TYPES[self.type](powers, theta, parameters)

    def extended(self, max_position_embeddings: int) -> int:
        """Longest context to which --max-len may extend the model, tokens; dynamic: factor times the trained one."""
        if self.type != "dynamic":
            return max_position_embeddings
        return int(max_position_embeddings * _read(self.parameters, "factor", float, least=1))

    def longest(self, max_position_embeddings: int) -> int:
        """Longest context, tokens. With yarn, some files give the original context as max_position_embeddings."""
        if self.type != "yarn" or self.parameters.get("factor") is None:
            return max_position_embeddings
        original = _read(self.parameters, "original_max_position_embeddings", int, least=1)
        return max(max_position_embeddings, int(original * _read(self.parameters, "factor", float, least=1)))


def rope_type(parameters: Mapping[str, Any]) -> str:
    """The type named by rope parameters, under "type" in older files."""
    return str(parameters.get("rope_type") or parameters.get("type") or "default")


def refuses_rope(config: Mapping[str, Any]) -> str | None:
    """Return a refusal: why the rotary embedding of this config.json cannot be computed. None: it can."""
    stored = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(stored, Mapping):
        return f"rope parameters must be a table, not {stored!r}"
    if any(isinstance(value, Mapping) for value in stored.values()):
        return f"rope parameters given by kind of layer ({', '.join(stored)}) are not supported"
    if rope_type(stored) not in ROPE_TYPES:
        return f"rope type {rope_type(stored)!r} is not supported; known are {', '.join(ROPE_TYPES)}"
    return None


def _parameters(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The rope parameters of either layout. Older files have some keys next to the table instead of in it."""
    parameters = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    for key in ("rope_theta", "partial_rotary_factor"):
        if parameters.get(key) is None and config.get(key) is not None:
            parameters[key] = config[key]
    longest = config.get("max_position_embeddings")
    original = config.get("original_max_position_embeddings") or parameters.get("original_max_position_embeddings")
    return {**parameters, "original_max_position_embeddings": original or longest, "max_position_embeddings": longest}


def _default(powers: torch.Tensor, theta: float, parameters: Mapping[str, Any]) -> tuple[torch.Tensor, float]:
    return 1.0 / powers, 1.0


def _linear(powers: torch.Tensor, theta: float, parameters: Mapping[str, Any]) -> tuple[torch.Tensor, float]:
    """Positions divided by a factor (arXiv:2306.15595)."""
    return 1.0 / powers / _read(parameters, "factor", float, least=1), 1.0


def _llama3(powers: torch.Tensor, theta: float, parameters: Mapping[str, Any]) -> tuple[torch.Tensor, float]:
    """Llama 3.1: low frequencies divided by a factor, high ones unchanged, linear interpolation in between."""
    factor = _read(parameters, "factor", float, least=1)
    low = _read(parameters, "low_freq_factor", float)
    high = _read(parameters, "high_freq_factor", float)
    original = _read(parameters, "original_max_position_embeddings", int, least=1)
    if high <= low:
        raise CheckpointError(f"config.json: high_freq_factor ({high}) must be above low_freq_factor ({low})")
    inverse = 1.0 / powers
    turns = original / (2 * math.pi / inverse)  # in the original context
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * inverse / factor + kept * inverse, 1.0


def _yarn(powers: torch.Tensor, theta: float, parameters: Mapping[str, Any]) -> tuple[torch.Tensor, float]:
    """YaRN (arXiv:2309.00071): the same interpolation with its bounds in dimensions, and sharper attention."""
    original = _read(parameters, "original_max_position_embeddings", int, least=1)
    longest = _read(parameters, "max_position_embeddings", int, original)
    factor = _read(parameters, "factor", float, longest / original if "factor" in parameters else None, least=1)
    size = 2 * len(powers)

    def dimension(turns: float) -> float:
        """The dimension that makes that number of turns in the original context."""
        return size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = dimension(_read(parameters, "beta_fast", float, 32.0, least=0.001))
    high = dimension(_read(parameters, "beta_slow", float, 1.0, least=0.001))
    if _read(parameters, "truncate", bool, True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    high += 0.001 if low == high else 0
    divided = ((torch.arange(size // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - divided
    frequencies = 1.0 / (factor * powers) * (1 - kept) + 1.0 / powers * kept  # in this order, equal to transformers'
    return frequencies, _yarn_attention_factor(factor, parameters)


def _yarn_attention_factor(factor: float, parameters: Mapping[str, Any]) -> float:
    scale, scale_all = parameters.get("mscale"), parameters.get("mscale_all_dim")
    default = _sharpness(factor, 1.0)
    if scale and scale_all:
        default = _sharpness(factor, scale) / _sharpness(factor, scale_all)
    return _read(parameters, "attention_factor", float, default)


def _sharpness(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def yarn_sharpness(spec: RotarySpec | None) -> float:
    """Factor of mscale_all_dim on queries and on keys, which DeepSeek applies to rotated and other parts alike."""
    scale = None if spec is None or spec.type != "yarn" else spec.parameters.get("mscale_all_dim")
    if spec is None or not scale:
        return 1.0
    return _sharpness(_read(spec.parameters, "factor", float, least=1), scale)


def _dynamic(powers: torch.Tensor, theta: float, parameters: Mapping[str, Any]) -> tuple[torch.Tensor, float]:
    """Dynamic NTK scaling: beyond the trained context, a larger theta, by the longest context that is served."""
    factor = _read(parameters, "factor", float, least=1)
    trained = _read(parameters, "max_position_embeddings", int, least=1)
    served = max(int(parameters.get("served_len") or 0), trained)
    size = 2 * len(powers)
    if size == 2:
        raise CheckpointError("config.json: the rope type dynamic needs more than 2 rotary dimensions")
    theta *= (factor * served / trained - (factor - 1)) ** (size / (size - 2))
    return 1.0 / theta ** (torch.arange(0, size, 2, dtype=torch.float32) / size), 1.0


def _longrope(powers: torch.Tensor, theta: float, parameters: Mapping[str, Any]) -> tuple[torch.Tensor, float]:
    """LongRoPE (arXiv:2402.13753): a factor per pair; other factors if longer contexts than the original are served."""
    original = _read(parameters, "original_max_position_embeddings", int, least=1)
    longest = _read(parameters, "max_position_embeddings", int, original)
    served = int(parameters.get("served_len") or longest)
    factor = _read(parameters, "factor", float, longest / original) if parameters.get("factor") else longest / original
    default = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    attention_factor = default
    if parameters.get("attention_factor") is not None:
        attention_factor = _read(parameters, "attention_factor", float)
    key = "long_factor" if served > original else "short_factor"
    factors = parameters.get(key)
    if not (isinstance(factors, list) and len(factors) == len(powers) and all(_is_positive(one) for one in factors)):
        raise CheckpointError(
            f"config.json's table of rope parameters needs {key}: a list of {len(powers)} positive numbers, one for"
            " each pair of rotary dimensions"
        )
    return 1.0 / (torch.tensor(factors, dtype=torch.float32) * powers), attention_factor


def _is_positive(number: object) -> bool:
    return isinstance(number, int | float) and not isinstance(number, bool) and number > 0


def _read(parameters: Mapping[str, Any], key: str, kind: type[T], default: T | None = None, *, least: float = 0) -> T:
    return read_key(parameters, key, kind, default, least=least, where="config.json's table of rope parameters")


ROPE_TYPES: Mapping[RopeType, Callable[[torch.Tensor, float, Mapping[str, Any]], tuple[torch.Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "dynamic": _dynamic,
    "longrope": _longrope,
}


class RotaryEmbedding(ABC):
    """Computes the angles of a forward pass once, for all attention layers."""

    @abstractmethod
    def angles(self, positions: torch.Tensor) -> Angles:
        """positions: [tokens] int64 -> the angles, in the form that attention layers of the same factory take."""


class Rotary(RotaryEmbedding):
    """Rotary embedding that computes angles from positions, without a table: no longest position, nothing to grow."""

    def __init__(self, spec: RotarySpec, dtype: str, device: str) -> None:
        inverse, self._factor = spec.frequencies()
        # `rotate` takes -sin for the first half of a head and sin for the second: sin of a negated frequency.
        self._signed = torch.cat((-inverse, inverse)).to(device)
        self._dtype = torch_dtype(dtype)

    def angles(self, positions: torch.Tensor) -> Angles:
        """positions: [tokens] int64 -> cosines and signed sines: [tokens, 1, rotary_dim] in the model's dtype."""
        angles = positions.view(-1, 1, 1) * self._signed
        cos, sin = angles.cos(), angles.sin()
        if self._factor != 1.0:
            cos, sin = cos * self._factor, sin * self._factor
        return cos.to(self._dtype), sin.to(self._dtype)


class GrowingRotary(RotaryEmbedding):
    """A rotary embedding, and the factors of queries by RotarySpec.query_growth."""

    def __init__(self, rotary: RotaryEmbedding, spec: RotarySpec, dtype: str) -> None:
        self._rotary = rotary
        self._growth = spec.query_growth
        self._length = _read(spec.parameters, "original_max_position_embeddings", int, least=1)
        self._dtype = torch_dtype(dtype)

    def angles(self, positions: torch.Tensor) -> Angles:
        """positions: [tokens] int64 -> the angles of the rotary embedding, and the factors: [tokens, 1, 1]."""
        lengths = positions.div(self._length, rounding_mode="floor").float()
        factors = 1 + self._growth * torch.log(1 + lengths)
        return (*self._rotary.angles(positions), factors.to(self._dtype).view(-1, 1, 1))


def rotate(x: torch.Tensor, angles: Angles) -> torch.Tensor:
    """Rotate x: [tokens, heads, head_dim]. Dimension i rotates with i + rotary_dim / 2.

    Adds the second half times -sin to the first, and the first half times sin to the second.
    """
    cos, sin = angles
    size = cos.shape[-1]
    if size == x.shape[-1]:
        return torch.addcmul(x * cos, x.roll(size // 2, -1), sin)
    rotary = x[..., :size]
    return torch.cat((torch.addcmul(rotary * cos, rotary.roll(size // 2, -1), sin), x[..., size:]), dim=-1)


def rotate_interleaved(x: torch.Tensor, angles: Angles) -> torch.Tensor:
    """Rotate x: [tokens, heads, head_dim]. Dimension 2 i rotates with 2 i + 1."""
    cos, sin = angles
    size = cos.shape[-1]
    cos, sin = cos[..., : size // 2], sin[..., size // 2 :]  # of each pair, the sine that is not negated
    first, second = x[..., :size:2], x[..., 1:size:2]
    turned = torch.stack((first * cos - second * sin, second * cos + first * sin), -1).flatten(-2)
    return turned if size == x.shape[-1] else torch.cat((turned, x[..., size:]), -1)


def rotate_pairs(x: torch.Tensor, angles: Angles) -> torch.Tensor:
    """Rotate x: [tokens, heads, rotary_dim], for layers of a model's own. Dimension 2 i rotates with 2 i + 1.

    angles: of any RotaryEmbedding. Their first rotary_dim / 2 cosines and last rotary_dim / 2 sines, which are not
    negated, are used.
    """
    half = x.shape[-1] // 2
    cos, sin = angles[0].flatten(1)[:, None, :half], angles[1].flatten(1)[:, None, -half:]
    first, second = x[..., ::2], x[..., 1::2]
    return torch.stack((first * cos - second * sin, second * cos + first * sin), -1).flatten(-2).to(x.dtype)
