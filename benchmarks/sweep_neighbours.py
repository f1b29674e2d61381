"""Neighbours of the cases of shape_sweep.py among the shapes of known models, and the times predicted from them.

Nothing here needs a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import cycle, islice
from typing import Any

from attrs import evolve
from sweep_cases import AttentionCase, Case, Heads, Limits, LinearCase, Space

MAX_SCALE = 64.0
"""Contexts of a neighbour are at most this many times as long as the case's."""
HALVINGS = 40
"""Steps of the search for the scale of contexts."""


def find_neighbours(case: Case, space: Space, limits: Limits) -> tuple[Case, ...]:
    """The cases that a case's time is predicted from.

    Of a linear layer: the nearest shape whose floor is at most its own and the nearest with a larger floor, or one of
    them if there is no other; gated if it is, with the same weights and rows. Of attention: the nearest heads, of the
    same size if there are any, with about as many heads in all sequences together and contexts for the same floor.
    """
    if isinstance(case, AttentionCase):
        known = [model.attention for model in space.known() if space.is_neighbour(model.attention, case.shape)]
        alike = [heads for heads in known if heads.head_dim == case.shape.head_dim]
        return (with_as_much_work(case, nearest(case.shape, alike or known), limits),)
    shapes = [
        one
        for model in space.known()
        for one in model.linears.values()
        if one.gated == case.shape.gated and space.is_neighbour(one, case.shape)
    ]
    layers = [evolve(case, shape=shape) for shape in shapes]
    floor = case.floor(limits)
    smaller = [layer for layer in layers if layer.floor(limits) <= floor]
    larger = [layer for layer in layers if layer.floor(limits) > floor]
    return tuple(_nearest_layer(case, some) for some in (smaller, larger) if some)


def with_as_much_work(case: AttentionCase, heads: Heads, limits: Limits) -> AttentionCase:
    """The same attention of other heads: about as many KV heads (decode) or query heads (prefill), the same floor."""
    ours, theirs = (case.shape.heads, heads.heads) if case.kind == "prefill" else (case.shape.kv_heads, heads.kv_heads)
    count = max(1, round(len(case.lengths) * ours / theirs))
    lengths = tuple(islice(cycle(case.lengths), count))

    def scaled(scale: float) -> AttentionCase:
        return evolve(case, shape=heads, lengths=tuple(max(1, round(length * scale)) for length in lengths))

    low, high = 0.0, MAX_SCALE
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if scaled(middle).floor(limits) > case.floor(limits) else (middle, high)
    return scaled(low)


def nearest(shape: Any, shapes: Sequence[Any]) -> Any:
    """The shape with the least distance by logarithms of its sizes; the first of equals."""
    return min(shapes, key=lambda one: math.dist([*map(math.log, shape.sizes)], [*map(math.log, one.sizes)]))


def predicted(floor: float, neighbours: Sequence[tuple[float, float]], fixed: float) -> float:
    """Seconds that a case takes if it is as good as its neighbours.

    Between two neighbours, the time on the line between theirs. With one, a time is taken to be a fixed one, that of
    the launches, and a multiple of the floor; the multiple is the neighbour's, but at least 1. floor: the case's.
    neighbours: floor and seconds of each, of the one with the smaller floor first. fixed: seconds of a case with next
    to no work.
    """
    if len(neighbours) == 1:
        [(near_floor, seconds)] = neighbours
        return fixed + max((seconds - fixed) / near_floor, 1.0) * floor
    (low, low_seconds), (high, high_seconds) = neighbours
    return low_seconds + (floor - low) / (high - low) * (high_seconds - low_seconds)


def _nearest_layer(case: LinearCase, layers: Sequence[LinearCase]) -> LinearCase:
    return evolve(case, shape=nearest(case.shape, [layer.shape for layer in layers]))
