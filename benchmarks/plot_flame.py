"""Draws one process of a page of `engine profile flame` as an SVG, for the documentation.

python benchmarks/plot_flame.py flame.html --process "worker 0" --output docs/img/flame-tp2.svg
"""

from __future__ import annotations

import argparse
import json
import re
import zlib
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

WIDTH, ROW, LEAST = 1200, 17, 1.5
"""Pixels: width of the picture, height of a row, least width of a frame."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path)
    parser.add_argument("--process", required=True)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    found = re.search(r'id="data">(.*?)</script>', options.page.read_text(encoding="utf-8"), re.DOTALL)
    if found is None:
        parser.error(f"{options.page} is not a page of `engine profile flame`")
    data = json.loads(found[1])
    stacks = {one["name"]: one["stacks"] for one in data["processes"]}
    if options.process not in stacks:
        parser.error(f"--process is one of {', '.join(stacks)}")
    options.output.write_text(svg(data, stacks[options.process]), encoding="utf-8")


def svg(data: Any, stacks: list[list[int]]) -> str:
    """The picture; stacks: numbers of frames and, last, the samples."""
    rows = list(frames(data, [(stack[:-1], stack[-1]) for stack in stacks], 0.0, float(WIDTH), 0))
    height = ROW * (1 + max((depth for depth, *_ in rows), default=0))
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="monospace">']
    for depth, left, width, name in rows:
        parts.append(
            f'<rect x="{left:.1f}" y="{depth * ROW}" width="{width - 0.5:.1f}" height="{ROW - 1}" '
            f'fill="{color(data, name)}"><title>{escape(data["names"][name])}</title></rect>'
        )
        if width > 30:
            text = escape(data["names"][name][: int((width - 6) / 6.7)])
            parts.append(f'<text x="{left + 3:.1f}" y="{depth * ROW + 12}" font-size="11">{text}</text>')
    return "\n".join([*parts, "</svg>\n"])


def frames(
    data: Any, stacks: list[tuple[list[int], int]], left: float, width: float, depth: int
) -> Iterator[tuple[int, float, float, int]]:
    """(depth, left, width, frame) of each frame that is wide enough."""
    total = sum(count for _, count in stacks)
    below: dict[int, list[tuple[list[int], int]]] = {}
    for stack, count in stacks:
        if stack:
            below.setdefault(stack[0], []).append((stack[1:], count))
    for name in sorted(below, key=lambda number: str(data["names"][number])):
        part = width * sum(count for _, count in below[name]) / total
        if part >= LEAST:
            yield depth, left, part, name
            yield from frames(data, below[name], left, part, depth + 1)
        left += part


def color(data: Any, name: int) -> str:
    """Grey for what waits, else a color of the module."""
    if data["waits"][name]:
        return "#c9c9d4"
    return f"hsl({zlib.crc32(data['modules'][name].encode()) % 360} 62% 72%)"


if __name__ == "__main__":
    main()
