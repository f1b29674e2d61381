"""Plot a few steps of a trace of `engine profile trace`: every row of every process, on one clock.

    engine profile trace --url http://localhost:8000 --steps 20
    python benchmarks/plot_trace.py TRACE.json.gz [--title "Qwen3-0.6B, 64 requests"] [--steps 3] [--out docs/img/trace]

Writes OUT.png. Needs matplotlib (the extra plot).
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch
from plot_timeline import HOST, KERNELS

REPOSITORY = Path(__file__).resolve().parents[1]
LABELLED = {"decode", "prefill", "mixed"}
"""First words of slices whose name is written into them."""
COLOURS = HOST | {"outputs": "#bcbd22", "submit (front end)": "#e377c2", "step": "#c7d7ec", "other": "#7f7f7f"}
ROWS = {"steps": "steps launched", "phases": "phases", "event loop": "event loop"}

Event = dict[str, Any]


def rows_of(events: list[Event]) -> dict[tuple[int, int], str]:
    """(pid, tid) -> label, of the rows to draw: steps, phases, event loops and streams, in the order of the file."""
    names: dict[tuple[int, int, str], Any] = {
        (one["pid"], one["tid"], one["name"]): one["args"] for one in events if one["ph"] == "M"
    }
    found = {}
    for pid, tid, what in sorted(names):
        if what == "thread_name":
            process = re.sub(r" \(process \d+\)", "", names[pid, 0, "process_name"]["name"])
            row = names[pid, tid, "thread_name"]["name"].strip()
            if row in ROWS or row.startswith("stream"):
                found[pid, tid] = f"{process}: {ROWS.get(row, row)}"
    return found


def colour_of(event: Event) -> str:
    """The colour of a slice, by what it does."""
    name, category = event["name"], event.get("cat", "")
    if category in ("kernel", "gpu_memcpy", "gpu_memset"):
        return next(colour for _, words, colour in KERNELS if any(word in name.lower() for word in words))
    if name.split()[0] in LABELLED:
        return COLOURS["step"]
    return COLOURS.get(name.split()[0], COLOURS["other"])


def draw(events: list[Event], count: int, title: str) -> Figure:
    """A figure of `count` steps from the middle of the trace."""
    rows = rows_of(events)
    slices = [one for one in events if one["ph"] == "X" and (one["pid"], one["tid"]) in rows]
    starts = sorted(one["ts"] for one in slices if one["name"].startswith("schedule"))
    first = max((len(starts) - count - 1) // 2, 0)
    zero, last = starts[first], starts[min(first + count, len(starts) - 1)]
    figure = Figure(figsize=(12, 0.6 + 0.5 * len(rows)), layout="constrained")
    axes = figure.subplots()
    places = {row: len(rows) - 1 - number for number, row in enumerate(rows)}
    for one in slices:
        begin, end = max(one["ts"], zero), min(one["ts"] + one["dur"], last)
        if begin >= end or one.get("cat") == "gpu_user_annotation":
            continue
        place = places[one["pid"], one["tid"]]
        axes.broken_barh([(begin - zero, end - begin)], (place + 0.1, 0.8), facecolors=colour_of(one))
        if one["name"].split()[0] in LABELLED and end - begin > (last - zero) / 12:
            axes.text(begin - zero, place + 0.5, f" {one['name']}", fontsize=6, va="center", clip_on=True)
    for start in starts:
        if zero <= start <= last:
            axes.axvline(start - zero, color="black", linewidth=0.5, linestyle=":")
    axes.set_xlim(0, last - zero)
    axes.set_yticks([place + 0.5 for place in places.values()], list(rows.values()), fontsize=7)
    axes.set_xlabel("microseconds", fontsize=8)
    axes.set_title(title, fontsize=9)
    named = HOST | {"tokens to text, written": COLOURS["outputs"]} | {label: colour for label, _, colour in KERNELS}
    handles = [Patch(color=colour, label=label) for label, colour in named.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=6, frameon=False)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--title", default="")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--out", type=Path, default=REPOSITORY / "docs" / "img" / "trace")
    arguments = parser.parse_args()
    content = arguments.trace.read_bytes()
    if arguments.trace.suffix == ".gz":
        content = gzip.decompress(content)
    figure = draw(json.loads(content)["traceEvents"], arguments.steps, arguments.title or arguments.trace.name)
    figure.savefig(arguments.out.with_suffix(".png"), dpi=120)


if __name__ == "__main__":
    main()
