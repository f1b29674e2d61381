"""One rank's answer to a profile by layer, plain data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec


class LayerRow(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One module in an average step."""

    name: str
    """Name in the tree of modules, one for merged modules; in parentheses for what belongs to no module."""
    kind: str
    """As ModuleCost.kind; empty where nothing is counted."""
    calls: float
    kernels: float
    """Kernels and copies; without a GPU, operators."""
    cpu_us: float
    """Host time, without that of modules called within."""
    device_us: float
    """Time in which the device ran what the module launched; without a GPU, time in operators and collectives."""
    collective_us: float
    """The part of `device_us` in which ranks wait for each other."""
    flops: float
    flops8: float
    """The part of `flops` with 8-bit weights."""
    bytes: float
    """Weights, KV cache and activations."""


class RankLayers(msgspec.Struct, frozen=True, kw_only=True):
    """An average step of one rank, by module."""

    rank: int
    device: str
    """cuda or cpu."""
    steps: int
    step_us: float
    """From the start of a step on the device to that of the next."""
    idle_us: float
    """Time in which nothing ran: `step_us` less the device times of all rows."""
    decodes: tuple[int, ...]
    """Distinct numbers of decoding sequences per step, ascending."""
    prefill_tokens: tuple[int, ...]
    """Distinct numbers of tokens in prefill chunks per step, ascending."""
    graphs: tuple[tuple[str, int], ...]
    """(name of CUDA graphs, number of steps that replayed them); the name is empty for steps without graphs."""
    flops: float
    flops8: float
    bytes: float
    """Bytes of weights and KV cache: those of all modules less activations."""
    uncounted: tuple[str, ...]
    """Modules whose FLOPs are unknown, at most 10."""
    num_rows: int
    rows: list[LayerRow]
    """The first of the `num_rows` rows; `read_layers` returns the others."""


def stop_layers(call: Callable[[str, Mapping[str, Any]], list[Any]]) -> list[RankLayers]:
    """End a profile by layer; return all ranks' answers with all of their rows.

    call: runs a control operation on all ranks, as `Engine.call`. Raises what it raises.
    """
    ranks = [msgspec.convert(answer, RankLayers) for answer in call("stop_layers", {})]
    while len(ranks[0].rows) < ranks[0].num_rows:
        more = call("read_layers", {"start": len(ranks[0].rows)})
        for rank, rows in zip(ranks, more, strict=True):
            rank.rows.extend(msgspec.convert(rows, list[LayerRow]))
    return ranks
