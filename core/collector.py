"""Keeps garbage collections out of a process's start, whose objects live as long as the process.

Importing torch makes 260,000 such objects. Collections during imports scan them again and again and free nothing.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused(*, freeze: bool = False) -> Iterator[None]:
    """Collect no garbage during the `with` block, which imports modules.

    Afterwards all objects of the process are in the oldest generation, as if they had survived collections, without the
    time that these take. Where all modules were imported before, as for a second engine in a process, nothing is moved.

    freeze: exempt the objects from all later collections instead. That is for the main modules of the engine's own
    processes. Where objects are frozen already, later blocks freeze too, until `finish_start`.
    """
    if not gc.isenabled():
        yield
        return
    modules = len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if freeze or len(sys.modules) > modules:
            keep = freeze or gc.get_freeze_count() > 0  # Python walks over all of them to count them
            gc.freeze()
            if not keep:
                gc.unfreeze()
        gc.enable()


def finish_start(*, freeze: bool) -> None:
    """Collect the garbage of the start, and exempt what is left from later collections; or, without `freeze`, nothing.

    Only scans objects that are not frozen yet: those made after the imports.
    """
    if freeze:
        gc.collect()
        gc.freeze()
    else:
        gc.unfreeze()
