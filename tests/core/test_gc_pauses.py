"""Garbage collections, counted in this process."""

from __future__ import annotations

import gc
from array import array

from engine.core.gc_pauses import GC_BOUNDS, GENERATIONS, GcPauses


def test_collections_are_counted_by_generation_while_listening() -> None:
    pauses = GcPauses()
    enabled = gc.isenabled()
    gc.disable()
    try:
        gc.collect(0)
        assert pauses.counts() == ()
        pauses.listen()
        gc.collect(0)
        gc.collect(0)
        gc.collect(1)
        pauses.close()
        gc.collect(1)
    finally:
        pauses.close()
        if enabled:
            gc.enable()
    counts = pauses.counts()
    assert [sum(one.counts) for one in counts] == [2, 1, 0]
    assert counts[0].sum > 0
    assert pauses.collections == 3


def test_a_pause_is_in_the_bucket_of_its_length() -> None:
    cells = memoryview(array("d", [0.0] * GcPauses.SIZE))
    pauses = GcPauses(cells)
    pauses._on_collection("start", {"generation": 2})
    pauses._begin -= 0.02
    pauses._on_collection("stop", {"generation": 2})
    assert len(pauses.counts()) == GENERATIONS
    assert sum(pauses.counts()[2].counts[GC_BOUNDS.index(0.03) :]) == 1
    assert pauses.counts()[2].counts[-1] == 0  # 0.02 s are not beyond the last bound
    assert cells[-1] >= 0.02
