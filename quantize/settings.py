"""Settings of a quantized checkpoint: method, format and their parameters, validated before anything is read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from attrs import asdict, frozen

from engine.core.errors import ConfigError, near_misses

COMPRESSED, GPTQ, AWQ = "compressed-tensors", "gptq", "awq"
"""Formats."""
NONE = "none"
"""The method that leaves weights unquantized."""
FP8 = "fp8"
"""KV cache: e4m3, with a scale for a layer's keys and one for its values."""
STATIC = "static"
"""Activations: one stored scale per linear layer."""

DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "fp8": {"format": COMPRESSED, "bits": 8, "granularity": "channel", "activations": "dynamic"},
    "int8": {"format": COMPRESSED, "bits": 8, "granularity": "channel", "activations": "dynamic"},
    "rtn": {"format": COMPRESSED, "bits": 4, "group_size": 128, "symmetric": True},
    "gptq": {"format": GPTQ, "bits": 4, "group_size": 128, "symmetric": True, "act_order": "weight", "damp": 0.01},
    "awq": {"format": AWQ, "bits": 4, "group_size": 128, "symmetric": False},
    NONE: {"format": COMPRESSED},
}
"""Method -> the settings that it has, with their defaults."""

CHOICES: Mapping[str, Mapping[str, tuple[object, ...]]] = {
    "fp8": {
        "format": (COMPRESSED,),
        "bits": (8,),
        "granularity": ("tensor", "channel", "block"),
        "activations": ("dynamic", STATIC),
    },
    "int8": {"format": (COMPRESSED,), "bits": (8,), "granularity": ("channel",), "activations": ("dynamic", STATIC)},
    "rtn": {"format": (COMPRESSED, GPTQ, AWQ), "bits": (4, 8)},
    "gptq": {"format": (GPTQ, COMPRESSED, AWQ), "bits": (4, 8), "act_order": ("none", "weight", "group")},
    "awq": {"format": (AWQ, COMPRESSED), "bits": (4,)},
    NONE: {"format": (COMPRESSED,)},
}


@frozen(kw_only=True)
class Settings:
    """How the linear layers of a model are quantized. `choose` fills in a method's defaults."""

    method: str
    """fp8, int8, rtn (round to nearest), gptq, awq, or none (weights stay unquantized)."""
    format: str
    """Format of the checkpoint: compressed-tensors, gptq or awq."""
    bits: int = 16
    """Bits per weight; 16: unquantized."""
    granularity: str = ""
    """Eight bits: the weights that share a scale: tensor, channel (an output) or block (128 x 128)."""
    activations: str = ""
    """Eight bits: dynamic (a scale per token, computed at run time) or static (one scale, from calibration)."""
    group_size: int = -1
    """Weights only: number of inputs that share a scale; -1: all."""
    symmetric: bool = True
    """Weights only: whether zero points are fixed at the middle."""
    act_order: str = "none"
    """gptq: order in which inputs are rounded: none (as stored), weight (largest activations first, groups of adjacent
    inputs) or group (largest first, groups in that order; the checkpoint then stores each input's group)."""
    damp: float = 0.01
    """gptq: added to the Hessian's diagonal, as a fraction of its mean."""
    ignore: tuple[str, ...] = ()
    """Modules that stay unquantized: names, or patterns that begin with "re:". The LM head always is one."""
    kv_cache: str | None = None
    """fp8: the checkpoint asks for a float8 KV cache and has its scales. None: it leaves the cache's dtype open."""

    @classmethod
    def choose(
        cls, method: str, *, ignore: tuple[str, ...] = (), kv_cache: str | None = None, **given: object
    ) -> Settings:
        """Settings of a method. given: values from the command line; None: not given.

        Raises ConfigError for a setting that the method does not have, or a value that the setting does not have.
        """
        if method not in DEFAULTS:
            raise ConfigError(f"--method {method!r} is unknown; {near_misses(method, DEFAULTS)}")
        wanted = {name: value for name, value in given.items() if value is not None}
        values = {**DEFAULTS[method], **wanted}
        for name, value in wanted.items():
            if name not in DEFAULTS[method]:
                others = [other for other, known in DEFAULTS.items() if name in known]
                raise ConfigError(f"{flag(name)} means nothing to {method}; it is for {' and '.join(others)}")
            allowed = CHOICES[method].get(name, (value,))
            if value not in allowed:
                raise ConfigError(f"{flag(name)} {value} is not for {method}; use {' or '.join(map(str, allowed))}")
        found = cls(method=method, ignore=ignore, kv_cache=kv_cache, **values)
        found._check()
        return found

    def _check(self) -> None:
        """Raises ConfigError for settings that contradict each other."""
        size = self.group_size
        if size != -1 and (size < 16 or size & (size - 1)):
            raise ConfigError(
                f"--group-size {size} has no kernels; use a power of two from 16 on, or -1 for all inputs"
            )
        if not 0 < self.damp < 1:
            raise ConfigError(f"--damp is a share of the Hessian's mean diagonal, between 0 and 1, not {self.damp}")
        if self.format == AWQ and self.bits != 4:
            raise ConfigError(f"the format awq has 4 bits; use --format {COMPRESSED} for {self.bits}")
        if self.act_order == "group" and self.format != GPTQ:
            # compressed-tensors once had weight_g_idx for this order, and no longer supports it.
            raise ConfigError(
                f"the format {self.format} has no groups in an order of their own; use --act-order weight, or"
                " --format gptq"
            )
        if self.activations == STATIC and self.granularity == "block":
            raise ConfigError(
                "--granularity block computes activation scales as tokens come; use --activations dynamic"
            )
        self._check_kv_cache()
        for entry in self.ignore:
            try:
                re.compile(entry.removeprefix("re:"))
            except re.error as error:
                raise ConfigError(f"--ignore {entry!r} is no regular expression: {error}") from error

    def _check_kv_cache(self) -> None:
        """Raises ConfigError if the format cannot describe the cache, or nothing would be quantized."""
        if self.kv_cache not in (None, FP8):
            raise ConfigError(f"--kv-cache {self.kv_cache} has no format of scales; use {FP8}")
        if self.kv_cache and self.format != COMPRESSED:
            raise ConfigError(
                f"the format {self.format} has no place for the scales of a KV cache; use --format {COMPRESSED}, or"
                " leave out --kv-cache"
            )
        if self.method == NONE and not self.kv_cache:
            others = " or ".join(name for name in DEFAULTS if name != NONE)
            raise ConfigError(
                f"--method {NONE} leaves weights as they are, so that nothing would be quantized; give --kv-cache"
                f" {FP8}, or --method {others}"
            )
        if self.method == NONE and self.ignore:
            raise ConfigError(f"--ignore means nothing to {NONE}, which leaves all weights as they are; leave it out")

    @property
    def is_calibrated(self) -> bool:
        """Whether quantized weights or scales of activations depend on text."""
        return self.method in ("gptq", "awq") or self.activations == STATIC

    @property
    def needs_calibration(self) -> bool:
        """Whether text must run through the model."""
        return self.is_calibrated or self.kv_cache is not None

    @property
    def is_eight_bit(self) -> bool:
        """Whether values are stored as bytes (fp8, int8), not packed into words."""
        return bool(self.granularity)

    def as_dict(self) -> dict[str, Any]:
        """The method's settings as plain data, for files."""
        named = asdict(self)
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in named.items()
            if name in ("method", "ignore", *DEFAULTS[self.method]) or (name == "kv_cache" and value)
        }


def flag(name: str) -> str:
    """A setting's option on the command line."""
    return "--" + name.replace("_", "-")
