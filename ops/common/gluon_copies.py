"""Gluon's asynchronous copies, under one name for all versions of Triton: 3.9 renamed them."""

from __future__ import annotations

from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

RENAMED = hasattr(async_copy, "async_load")

load = async_copy.async_load if RENAMED else async_copy.async_copy_global_to_shared
"""(shared memory, pointers, mask): from an address per element to shared memory, in units of at least 4 bytes."""
tma_load = tma.async_load if RENAMED else tma.async_copy_global_to_shared
"""(tensor descriptor, coordinates, barrier, shared memory, pred): a tile to shared memory, by one thread."""
tma_store = tma.async_store if RENAMED else tma.async_copy_shared_to_global
"""(tensor descriptor, coordinates, shared memory): a tile from shared memory."""
