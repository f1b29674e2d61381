"""Plot a few decode steps of a trace: phases on the host above kernels on the device.

    engine bench latency --batch 32 --prefill none --profile --trace trace.json ...
    python benchmarks/plot_timeline.py trace.json [--title "decode, batch 32"] [--steps 3] [--out docs/img/timeline]

Writes OUT.png and OUT.svg. Needs matplotlib (the extra plot).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch

HOST = {"schedule": "#1f77b4", "submit": "#ff7f0e", "wait": "#d9d9d9", "commit": "#2ca02c"}
KERNELS = (
    ("attention", ("attention", "attn", "flash", "paged", "decode_kernel", "xqa"), "#9467bd"),
    ("linear", ("gemm", "gemv", "matmul", "linear", "nvjet", "cutlass", "cublas", "splitk"), "#d62728"),
    ("sampling", ("sampl", "argmax", "softmax", "topk", "sort"), "#17becf"),
    ("norm, rotary embedding, activation and the rest", ("",), "#8c564b"),
)
"""(label, words in a kernel's name, colour); the first that matches."""
OUT = Path(__file__).resolve().parents[1] / "docs" / "img" / "timeline"


def draw(profile: dict[str, Any], count: int, machine: str) -> Figure:
    """A figure of `count` steps from the middle of the trace."""
    first = max((len(profile["steps"]) - count) // 2, 0)
    steps = profile["steps"][first : first + count]
    zero, last = steps[0]["begin"], steps[-1]["end"]
    figure = Figure(figsize=(11, 2.8), layout="constrained")
    axes = figure.subplots()
    for step in steps:
        begin = step["begin"]
        for name, spent in step["phases"]:  # phases follow one another without a gap
            axes.broken_barh([(begin - zero, spent)], (1.1, 0.8), facecolors=HOST[name])
            begin += spent
        axes.axvline(step["begin"] - zero, color="black", linewidth=0.6, linestyle=":")
    spans: dict[str, list[tuple[float, float]]] = {label: [] for label, _, _ in KERNELS}
    for name, _, begin, end in profile["kernels"]:
        if end > zero and begin < last:
            label = next(label for label, words, _ in KERNELS if any(word in name.lower() for word in words))
            spans[label].append((begin - zero, end - begin))
    colours = {label: colour for label, _, colour in KERNELS}
    for label, ranges in spans.items():
        axes.broken_barh(ranges, (0.1, 0.8), facecolors=colours[label])
    axes.set_xlim(0, last - zero)
    axes.set_yticks([0.5, 1.5], ["device", "host"])
    axes.set_xlabel("microseconds")
    axes.set_title(
        f"{profile['title']}, {machine}: {profile['wall_us']:.0f} us per step, the device busy"
        f" for {profile['busy_us']:.0f} us",
        fontsize=10,
    )
    handles = [Patch(color=colour, label=name) for name, colour in (HOST | colours).items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=7, frameon=False)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--title", default="", help="of the profile in the trace; default: the first")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--out", type=Path, default=OUT, help="path without .png and .svg")
    arguments = parser.parse_args()
    trace = json.loads(arguments.trace.read_text(encoding="utf-8"))
    profiles = {profile["title"]: profile for profile in trace["profiles"]}
    if arguments.title and arguments.title not in profiles:
        parser.error(f"the trace has no {arguments.title!r}; it has {', '.join(profiles)}")
    figure = draw(profiles[arguments.title or next(iter(profiles))], arguments.steps, trace["machine"])
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    for kind in ("png", "svg"):
        figure.savefig(arguments.out.with_suffix(f".{kind}"), dpi=150)
        print(arguments.out.with_suffix(f".{kind}"))


if __name__ == "__main__":
    main()
