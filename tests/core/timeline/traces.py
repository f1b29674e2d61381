"""Reads the traces that profiles write, and checks what any trace must be."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any


class Trace:
    """A Chrome trace."""

    def __init__(self, file: str | Path) -> None:
        self.whole = json.loads(gzip.decompress(Path(file).read_bytes()))
        self.events = self.whole["traceEvents"]
        self.processes = {event["pid"]: event["args"]["name"] for event in self._of("process_name")}
        self.rows = {(event["pid"], event["tid"]): event["args"]["name"] for event in self._of("thread_name")}

    def _of(self, name: str) -> list[Any]:
        return [event for event in self.events if event["ph"] == "M" and event["name"] == name]

    def slices(self, process: str, row: str) -> list[Any]:
        """The slices of a row, by begin; process: how its name begins."""
        return [
            event
            for event in self.events
            if event["ph"] == "X"
            and self.processes[event["pid"]].startswith(process)
            and self.rows[event["pid"], event["tid"]] == row
        ]

    def stages(self, kind: str) -> dict[str, list[tuple[str, float, float]]]:
        """The asynchronous slices of a kind, by id: (name, begin, end), outermost first."""
        found: dict[str, list[tuple[str, float, float]]] = defaultdict(list)
        begun: dict[tuple[str, str], float] = {}
        for event in self.events:
            if event.get("cat") == kind and event["ph"] == "b":
                begun[event["id"], event["name"]] = event["ts"]
            elif event.get("cat") == kind and event["ph"] == "e":
                found[event["id"]].append((event["name"], begun.pop((event["id"], event["name"])), event["ts"]))
        assert not begun, "a slice does not end"
        return {name: sorted(slices, key=lambda one: (one[1], -one[2])) for name, slices in found.items()}

    def check(self) -> None:
        """Slices of one row nest, every process and row has a name, and times ascend."""
        by_row: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
        times = [event["ts"] for event in self.events if event["ph"] != "M"]
        assert times == sorted(times)
        for event in self.events:
            assert event["pid"] in self.processes
            if event["ph"] == "X":
                assert (event["pid"], event["tid"]) in self.rows
                by_row[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
        for row, slices in by_row.items():
            around: list[float] = []
            for begin, end in sorted(slices, key=lambda one: (one[0], -one[1])):
                while around and around[-1] <= begin + 0.002:
                    around.pop()
                assert not around or end <= around[-1] + 0.002, f"slices overlap in {self.rows[row]}"
                around.append(end)
