"""Memory of activations, with room for whole tiles of rows."""

from __future__ import annotations

from math import prod

import torch

MIN_ROWS = 17
"""From this many rows on there is room for whole tiles. Kernels for fewer load only rows that exist."""
TILE_ROWS = 256
"""Rows of the largest tile."""


def empty_with_room(like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Uninitialized memory of a dtype and device: [..., size], contiguous, followed by room for whole tiles of rows.

    GEMMs load whole tiles of rows by TMA (tile_order.loaded_shape), which is faster than having it fill rows that do
    not exist with zeros.
    """
    rows = prod(shape[:-1])
    if rows < MIN_ROWS or not like.is_cuda:
        return like.new_empty(shape)
    room = -(-rows // TILE_ROWS) * TILE_ROWS
    return like.new_empty((room, shape[-1]))[:rows].view(shape)
