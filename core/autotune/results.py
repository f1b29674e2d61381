"""Tuning results, and the names of the files that hold them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import isnan

from attrs import frozen


@frozen(kw_only=True)
class TuningResult:
    """The fastest candidate of one op at one row class."""

    op: str
    """AutotunedOp.key."""
    rows: int
    """The row class."""
    version: str
    """AutotunedOp.version."""
    candidate: str
    """AutotunedOp.name of the fastest."""
    seconds: float
    """nan for a result that came with the package, which has no default and no times."""
    default: str
    """AutotunedOp.name of the default, which the fastest had to beat."""
    default_seconds: float
    """inf: the default cannot run."""

    def __str__(self) -> str:
        if isnan(self.seconds):
            return f"{self.op}, {self.rows} rows: {self.candidate}"
        beaten = "" if self.candidate == self.default else f" ({self.default}: {self.default_seconds * 1e6:.1f})"
        return f"{self.op}, {self.rows} rows: {self.candidate}, {self.seconds * 1e6:.1f} us{beaten}"


TuningResults = Mapping[tuple[str, int], TuningResult]
"""Results by the key of the op and the row class."""


def device_name(machine: Mapping[str, str]) -> str:
    """The device of a machine (`describe_machine`) as a part of a file's name."""
    return re.sub(r"[^A-Za-z0-9]+", "-", machine["device"]).strip("-")


def file_name(machine: Mapping[str, str]) -> str:
    """The file of the results that come with the package."""
    return f"{device_name(machine)}.json"
