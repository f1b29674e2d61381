"""Runs long work on texts in a few threads, so that the event loop goes on with the streams."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

MAX_THREADS = 4
"""Further work waits in order of arrival; work whose client has left meanwhile is not begun."""
SWITCH_INTERVAL = 0.001
"""Seconds after which a thread in Python code lets the event loop go on (Python's default: 0.005)."""


class TextThreads:
    """The threads of a front end for tokenizing, rendering and decoding long texts."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="text")
        sys.setswitchinterval(SWITCH_INTERVAL)

    async def run(self, work: Callable[[], T]) -> T:
        """The result of `work`. When the caller is cancelled, work that waits for a thread is dropped."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)
