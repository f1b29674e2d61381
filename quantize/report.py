"""What a run of `engine quantize` did: errors by linear layer, perplexity, bytes, seconds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import asdict, frozen

from engine.core.quant import KVScales
from engine.quantize.perplexity import Perplexity

REPORT = "quantize_report.json"


@frozen(kw_only=True)
class LinearReport:
    """One linear layer."""

    name: str
    """In the checkpoint."""
    weight_error: float
    """|W' - W| / |W|."""
    output_error: float | None
    """|X W'^T - X W^T| / |X W^T| over the calibration text, X with all layers before quantized; None: without text.

    Under awq W is the weight with its scales multiplied in, and X is divided by them.
    """


@frozen(kw_only=True)
class LayerReport:
    """One decoder layer."""

    number: int
    seconds: float
    linears: tuple[LinearReport, ...]
    kv_scales: KVScales | None = None
    """Of its keys and values, where the KV cache is quantized."""

    def mean(self, field: str) -> float | None:
        """Of an error over the linear layers; None where it is not known, or nothing is quantized."""
        values = [getattr(one, field) for one in self.linears]
        return None if not values or None in values else sum(values) / len(values)

    @property
    def worst(self) -> LinearReport | None:
        """The linear layer of the largest error of outputs or else weights."""
        return max(self.linears, key=lambda one: one.output_error or one.weight_error, default=None)

    def to_json(self) -> str:
        """As `from_json` reads it."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> LayerReport:
        """What `to_json` wrote."""
        stored = json.loads(text)
        linears = tuple(LinearReport(**one) for one in stored.pop("linears"))
        scales = stored.pop("kv_scales")
        return cls(**stored, linears=linears, kv_scales=None if scales is None else KVScales(**scales))


@frozen(kw_only=True)
class Report:
    """A whole run."""

    model: str
    settings: Mapping[str, Any]
    calibration: Mapping[str, Any] | None
    layers: tuple[LayerReport, ...]
    bytes_before: int
    bytes_after: int
    """Of the safetensors files."""
    seconds: float
    """Of the layers, in all runs that it took, and of what this run did beside."""
    perplexity_before: Perplexity | None = None
    perplexity_after: Perplexity | None = None

    def write(self, directory: Path) -> None:
        """As JSON beside the checkpoint."""
        stored = asdict(self)
        for key, found in (("perplexity_before", self.perplexity_before), ("perplexity_after", self.perplexity_after)):
            if found is not None:
                stored[key] = {"perplexity": found.value, **asdict(found)}
        (directory / REPORT).write_text(json.dumps(stored, indent=2) + "\n", encoding="utf-8")
