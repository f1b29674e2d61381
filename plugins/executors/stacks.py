"""Summarizes the stack dumps that faulthandler writes of a worker's threads."""

from __future__ import annotations

import re
from collections.abc import Sequence

THREAD = re.compile(r"^(?:Current t|T)hread 0x([0-9a-f]+)", re.MULTILINE)
"""First line of a thread in a dump; the number is its threading.get_ident()."""
FRAME = re.compile(r'File "(?:.*/)?([^"/]+)", line (\d+) in (\S+)')
"""Line of a stack frame in a dump."""
MAX_FRAMES = 6
"""Frames in a summary."""


def busy_stack(dump: str, busy_threads: Sequence[int]) -> str:
    """Summarize the stack of the first of `busy_threads` in the dump, innermost frame first.

    If none of these threads is in the dump, the summary is of its first thread. Returns "" for a dump without frames.
    """
    _, *parts = THREAD.split(dump)
    stacks = {int(ident, 16): FRAME.findall(text) for ident, text in zip(parts[::2], parts[1::2], strict=True)}
    stacks = {ident: frames for ident, frames in stacks.items() if frames}
    chosen = [stacks[ident] for ident in busy_threads if ident in stacks] + list(stacks.values())
    if not chosen:
        return ""
    frames = [f"{name} ({file}:{line})" for file, line, name in chosen[0][:MAX_FRAMES]]
    return f"its stack is {' < '.join(frames)}"
