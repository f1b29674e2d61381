"""The report of `engine quantize`: errors per linear layer, perplexity, bytes, seconds."""

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
    """Errors of one linear layer."""

    name: str
    """Full name in the checkpoint."""
    weight_error: float
    """|W' - W| / |W|."""
    output_error: float | None
    """|X W'^T - X W^T| / |X W^T| over the calibration text, with X of the quantized layers before. None: no text.

    With awq, W is multiplied by the scales and X divided by them.
    """


@frozen(kw_only=True)
class LayerReport:
    """Errors of one decoder layer."""

    number: int
    seconds: float
    linears: tuple[LinearReport, ...]
    kv_scales: KVScales | None = None
    """KV scales, if the KV cache is quantized."""

    def mean(self, field: str) -> float | None:
        """Mean of an error over the linear layers. None: not measured, or nothing is quantized."""
        values = [getattr(one, field) for one in self.linears]
        return None if not values or None in values else sum(values) / len(values)

    @property
    def worst(self) -> LinearReport | None:
        """The linear layer with the largest error of its outputs, or of its weights if those are not measured."""

        def error(one: LinearReport) -> float:
            return one.weight_error if one.output_error is None else one.output_error

        return max(self.linears, key=error, default=None)

    def to_json(self) -> str:
        """Plain data that `from_json` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> LayerReport:
        """The report that `to_json` wrote."""
        stored = json.loads(text)
        linears = tuple(LinearReport(**one) for one in stored.pop("linears"))
        scales = stored.pop("kv_scales")
        return cls(**stored, linears=linears, kv_scales=None if scales is None else KVScales(**scales))


@frozen(kw_only=True)
class Report:
    """Report of a run."""

    model: str
    settings: Mapping[str, Any]
    calibration: Mapping[str, Any] | None
    layers: tuple[LayerReport, ...]
    unquantized: tuple[str, ...]
    """Full names of the modules in decoder layers that are not quantized: linear layers, routers, experts."""
    bytes_before: int
    bytes_after: int
    """Bytes of the safetensors files."""
    seconds: float
    """Seconds of all layers, over all resumed runs, and of this run's other work."""
    perplexity_before: Perplexity | None = None
    perplexity_after: Perplexity | None = None

    def write(self, directory: Path) -> None:
        """Write as JSON next to the checkpoint."""
        stored = asdict(self)
        for key, found in (("perplexity_before", self.perplexity_before), ("perplexity_after", self.perplexity_after)):
            if found is not None:
                stored[key] = {"perplexity": found.value, **asdict(found)}
        (directory / REPORT).write_text(json.dumps(stored, indent=2) + "\n", encoding="utf-8")
