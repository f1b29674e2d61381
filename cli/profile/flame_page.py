"""The page with the flame graphs of all processes: one HTML file that needs nothing else."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.resources import files

from engine.cli.profile.sampled import Sampled, module_of, waits_for

PAGE = "flame.html"
DATA = "/*DATA*/"
"""Place of the data in PAGE."""


def flame_page(title: str, processes: Mapping[str, Sampled]) -> str:
    """The page. processes: the stacks of each, by role."""
    names: dict[str, int] = {}
    data = {
        "title": title,
        "processes": [
            {
                "name": role,
                "stacks": [
                    [*(names.setdefault(frame, len(names)) for frame in stack), count]
                    for stack, count in sampled.counts.items()
                ],
            }
            for role, sampled in processes.items()
        ],
    }
    data["names"] = list(names)
    data["modules"] = [module_of(name) for name in names]
    data["waits"] = [waits_for(name) for name in names]
    text = json.dumps(data, separators=(",", ":")).replace("</", "<\\/")  # the text must not end the script element
    page = files(__package__).joinpath(PAGE).read_text(encoding="utf-8")
    return page.replace(DATA, text)
