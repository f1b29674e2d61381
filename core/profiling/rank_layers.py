"""One rank's answer to a profile by layer, plain data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec


class LayerRow(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One module in an average step."""

    name: str
    """In the tree of modules, merged modules as one; in parentheses what is none."""
    kind: str
    """As ModuleCost.kind; empty where nothing is counted."""
    calls: float
    kernels: float
    """Kernels and copies; without a GPU, operators."""
    cpu_us: float
    """Host time, without that of modules called within."""
    device_us: float
    """In which the device ran what the module launched; without a GPU, of operators and collectives."""
    collective_us: float
    """Of these, in which ranks wait for each other."""
    flops: float
    flops8: float
    """Those of `flops` with 8-bit weights."""
    bytes: float
    """Weights, KV cache and activations."""


class RankLayers(msgspec.Struct, frozen=True, kw_only=True):
    """An average step of one rank, by module."""

    rank: int
    device: str
    """cuda or cpu."""
    steps: int
    step_us: float
    """From the begin of a step on the device to that of the next."""
    idle_us: float
    """Of these, in which nothing ran: `step_us` less the device times of all rows."""
    decodes: tuple[int, ...]
    """The numbers of decoding sequences that the steps had, each once."""
    prefill_tokens: tuple[int, ...]
    """The numbers of tokens in prefill chunks that the steps had, each once."""
    graphs: tuple[tuple[str, int], ...]
    """(CUDA graphs, number of steps that replayed them); empty: none."""
    flops: float
    flops8: float
    bytes: float
    """Of weights and KV cache: those of all modules less activations."""
    uncounted: tuple[str, ...]
    """The first modules whose FLOPs are unknown."""
    num_rows: int
    rows: list[LayerRow]
    """The first of `num_rows`."""


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
