"""What faulthandler writes of a worker's threads, in a sentence."""

from __future__ import annotations

import re

FRAME = re.compile(r'File "(?:.*/)?([^"/]+)", line (\d+) in (\S+)')
"""A line of faulthandler's."""
FRAMES = 6
"""Of a stack, in a sentence."""


def busy_stack(text: str) -> str:
    """Where a worker is, its innermost frames first; empty if `text` has none.

    Of its threads the one that waits for a step's result, else the one that begins steps.
    """
    threads = [FRAME.findall(thread) for thread in re.split(r"(?:Current t|T)hread", text)]
    waits = [frames for frames in threads if any(name == "_answer" for _, _, name in frames)]
    begins = [frames for frames in threads if any(name == "work" for _, _, name in frames)]
    chosen = next(iter(waits + begins + [frames for frames in threads if frames]), [])
    frames = [f"{name} ({file}:{line})" for file, line, name in chosen[:FRAMES]]
    return f"its stack is {' < '.join(frames)}" if frames else ""
