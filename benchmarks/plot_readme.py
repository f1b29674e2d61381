"""Draws the chart of README.md from benchmarks/results: `python benchmarks/plot_readme.py` (extra `plot`).

Output tokens per second of 1000 requests, 512 tokens in and 256 out, next to vLLM and SGLang (references.json).
"""

from __future__ import annotations

import json
from pathlib import Path

HERE = Path(__file__).resolve().parent
OUT = HERE.parent / "docs" / "img" / "throughput.svg"
METRIC, CASE = "output tokens a second", "1000 requests, 512 in / 256 out"
COLOURS = {"engine": "#1f6feb", "vllm": "#9aa4af", "sglang": "#d0d7de"}


def bars() -> tuple[list[tuple[str, dict[str, float]]], set[str]]:
    """(model, output tokens per second by engine) for each model measured by all, and the commits measured."""
    references = json.loads((HERE / "references.json").read_text(encoding="utf-8"))
    found, commits = [], set()
    for key, model in references["models"].items():
        file = HERE / "results" / f"h200-{key.replace(':', '-')}.json"
        if not file.is_file():
            continue
        report = json.loads(file.read_text(encoding="utf-8"))
        ours = {(row["metric"], row["case"]): row["value"] for row in report["rows"]}
        peers = next(row for row in model["rows"] if (row["metric"], row["case"]) == (METRIC, CASE))
        values = {"engine": ours[METRIC, CASE]}
        values |= {peer: peers[peer] for peer in ("vllm", "sglang") if peers[peer] is not None}
        found.append((model["title"], values))
        commits.add(report["commit"][:7])
    return found, commits


def main() -> None:
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "engine"  # the same file from the same figures
    mpl.rcParams["svg.fonttype"] = "none"
    mpl.rcParams["font.family"] = "sans-serif"
    from matplotlib import pyplot

    models, commits = bars()
    versions = json.loads((HERE / "references.json").read_text(encoding="utf-8"))["versions"]
    figure, axes = pyplot.subplots(figsize=(8, 4.2))
    height = 0.26
    for place, (_, values) in enumerate(models):
        for offset, (engine, value) in enumerate(values.items()):
            y = place + (offset - 1) * height
            label = {"engine": "engine", **versions}[engine] if place == 0 else None
            axes.barh(y, value, height=height * 0.92, color=COLOURS[engine], label=label)
            axes.text(value + 300, y, f"{value:,.0f}", va="center", fontsize=8, color="#57606a")
    axes.set_yticks(range(len(models)), [title.replace(", ", ",\n", 1) for title, _ in models], fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(0, max(max(values.values()) for _, values in models) * 1.12)
    axes.set_xticks([])
    for side in ("top", "right", "bottom"):
        axes.spines[side].set_visible(False)
    axes.set_title(
        f"Output tokens per second, {CASE}\none NVIDIA H200, commit {', '.join(sorted(commits))}",
        fontsize=10,
        loc="left",
    )
    axes.legend(frameon=False, fontsize=9, loc="lower right")
    figure.tight_layout()
    figure.savefig(OUT, metadata={"Date": None})


if __name__ == "__main__":
    main()
