"""W8 formats of a checkpoint's modules: one for all of them, or one per config group of compressed-tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from attrs import evolve, frozen

from engine.core.errors import CheckpointError
from engine.plugins.quant.conversions import instead_of
from engine.plugins.quant.quantization_config import CompressedConfig, Scheme, is_listed, unquantized_modules
from engine.plugins.quant.rounding import BLOCK
from engine.plugins.quant.w8_kernel import NONE, STATIC, TOKEN, Activations, Granularity, W8Dtype, W8Format

GRANULARITIES: Mapping[str, Granularity] = {"tensor": "tensor", "channel": "channel", "block": "block"}
"""Name in compressed-tensors, and of the option -> granularity."""
STORED_FORMATS = {"float": ("float-quantized", "naive-quantized"), "int": ("int-quantized", "naive-quantized")}
"""Formats of compressed-tensors that store quantized values unpacked, by type."""
DTYPES: Mapping[str, W8Dtype] = {"float": "float8_e4m3fn", "int": "int8"}


class FormatSource(ABC):
    """Says how each module of a checkpoint is quantized."""

    @property
    def has_lm_head(self) -> bool:
        """Whether `format` covers the output layer too. False: the output layer is never quantized."""
        return False

    @abstractmethod
    def format(self, module: str) -> W8Format | None:
        """The module's format. None: it is not quantized."""


@frozen(kw_only=True)
class OneFormat(FormatSource):
    """One format for all modules except the unquantized ones."""

    form: W8Format
    unquantized: tuple[str, ...] = ()

    @classmethod
    def parse(cls, form: W8Format, config: Mapping[str, Any]) -> OneFormat:
        """Read the list of unquantized modules from a quantization_config."""
        return cls(form=form, unquantized=unquantized_modules(config))

    def format(self, module: str) -> W8Format | None:
        return None if is_listed(module, self.unquantized) else self.form


@frozen(kw_only=True)
class Overridden(FormatSource):
    """Another source, with activations overridden by an option."""

    source: FormatSource
    activations: Activations

    @property
    def has_lm_head(self) -> bool:
        return self.source.has_lm_head

    def format(self, module: str) -> W8Format | None:
        form = self.source.format(module)
        return None if form is None else evolve(form, activations=self.activations)


@frozen(kw_only=True)
class CompressedFormats(FormatSource):
    """One format per config group of compressed-tensors."""

    config: CompressedConfig
    formats: Mapping[str, W8Format]
    """Name of the group -> its format."""

    @classmethod
    def parse(cls, stored: Mapping[str, Any]) -> CompressedFormats:
        """Raises CheckpointError, naming the group, for one whose weights are not 8-bit and unpacked."""
        config = CompressedConfig.parse(stored)
        return cls(config=config, formats={scheme.name: format_of(scheme) for scheme in config.schemes})

    @property
    def has_lm_head(self) -> bool:
        return True

    def format(self, module: str) -> W8Format | None:
        scheme = self.config.scheme(module)
        return None if scheme is None else self.formats[scheme.name]

    @property
    def dtypes(self) -> frozenset[str]:
        """The dtypes of the weights of all groups."""
        return frozenset(form.dtype for form in self.formats.values())


def format_of(scheme: Scheme) -> W8Format:
    """The format of a config group. Raises CheckpointError unless the weights are 8-bit and unpacked."""
    weights, inputs = scheme.weights, scheme.inputs
    whys = {
        f"its weights have {weights.num_bits} bits, not 8": weights.num_bits != 8,
        f"its weights are of type {weights.type!r}": weights.type not in DTYPES,
        "its weights are asymmetric": not weights.symmetric,
        f"its format is {scheme.format!r}, not {' or '.join(STORED_FORMATS.get(weights.type, ()))}": (
            scheme.format not in STORED_FORMATS.get(weights.type, ())
        ),
        f"its weights have scales per {weights.strategy}, not per tensor, channel or block": (
            weights.strategy not in GRANULARITIES
        ),
        f"its blocks are {weights.block}, not {BLOCK} x {BLOCK}": (
            weights.strategy == "block" and weights.block != (BLOCK, BLOCK)
        ),
        "blocks are supported for float weights only": weights.strategy == "block" and weights.type == "int",
    }
    if inputs is not None:
        grouped = inputs.strategy == "group"
        whys |= {
            f"its activations are {inputs}, and its weights {weights}": (
                inputs.num_bits != 8 or inputs.type != weights.type
            ),
            "its activations are asymmetric": not inputs.symmetric,
            f"its activations have scales per {inputs.strategy}": inputs.strategy not in ("tensor", "token", "group"),
            f"its activations have scales per group of {inputs.group_size}, its weights per {weights.strategy}": (
                grouped and (weights.strategy != "block" or inputs.group_size != BLOCK)
            ),
            f"its activations have stored scales per {inputs.strategy}, not per tensor": (
                not inputs.dynamic and inputs.strategy != "tensor"
            ),
            "its weights have blocks and its activations one stored scale": (
                not inputs.dynamic and weights.strategy == "block"
            ),
        }
    for why, applies in whys.items():
        if applies:
            raise CheckpointError(
                f"config group {scheme} of quantization_config is not supported here: {why}; if no other method reads"
                f" the checkpoint, {instead_of('llm-compressor')}"
            )
    activations = NONE if inputs is None else TOKEN if inputs.dynamic else STATIC
    return W8Format(
        dtype=DTYPES[weights.type],
        granularity=GRANULARITIES[weights.strategy],
        activations=activations,
        scale_names=("weight_scale",),
        input_scale_names=("input_scale",) if activations == STATIC else (),
    )
