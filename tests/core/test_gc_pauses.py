"""Garbage collections, counted in this process."""

from __future__ import annotations

import gc
from array import array

from engine.core.gc_pauses import GENERATIONS, ROW, GcPauses


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
    assert [sum(row[:-1]) for row in counts] == [2, 1, 0]
    assert counts[0][-1] > 0
    assert pauses.collections == 3


def test_a_pause_is_in_the_bucket_of_its_length() -> None:
    cells = memoryview(array("d", [0.0] * GcPauses.SIZE))
    pauses = GcPauses(cells)
    pauses._on_collection("start", {"generation": 2})
    pauses._begin -= 0.02
    pauses._on_collection("stop", {"generation": 2})
    assert len(pauses.counts()) == GENERATIONS
    assert pauses.counts()[2][-2] == 0  # 0.02 s are not beyond the last bound
    assert cells[3 * ROW - 1] >= 0.02
