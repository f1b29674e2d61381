"""Ends a process of the server whose exit is held up by a hook, an exit handler or a thread of a plugin."""

from __future__ import annotations

import logging
import os
import sys
import sysconfig
import threading
import time
from contextlib import suppress
from types import FrameType

WARN_SECONDS = 4.0
"""Time after which the log names what holds up the exit: before the supervisor kills the process, after 5 s."""
EXIT_SECONDS = 5.0
"""Time in which a process that has nothing left to close must exit."""
WRITE_SECONDS = 1.0
"""Time that the last output may take beyond that: a full pipe that no one reads blocks each write."""
STDLIB = os.path.join(sysconfig.get_path("stdlib"), "")
PACKAGES = ("site-packages", "dist-packages")
"""Directories of other packages, which may be within STDLIB."""

log = logging.getLogger(__name__)


def limit_exit(code: int, seconds: float = EXIT_SECONDS) -> None:
    """End this process with this exit code after `seconds`, unless it has exited by then. Returns immediately.

    A process whose output blocks is ended WRITE_SECONDS later. After WARN_SECONDS (or `seconds`, if less), the log
    names the function that holds up the exit. A process whose code never releases the GIL is not ended.
    """
    written = threading.Event()
    # Now, since no thread can be started while Python exits; two, since writes may block.
    for work, arguments in ((_report, (seconds, written)), (_limit, (code, seconds, written))):
        threading.Thread(target=work, args=arguments, name="exit-limit", daemon=True).start()


def _report(seconds: float, written: threading.Event) -> None:
    """Log what holds up the exit, and write what is still to be written."""
    time.sleep(min(WARN_SECONDS, seconds))
    log.warning(
        "the exit of this process is held up by %s; the process is ended %g s after its exit began",
        _awaited(),
        seconds,
    )
    time.sleep(max(0.0, seconds - WARN_SECONDS))
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with suppress(Exception):  # no one reads the output any more, or a plugin has replaced the stream
                stream.flush()
    written.set()


def _limit(code: int, seconds: float, written: threading.Event) -> None:
    written.wait(seconds + WRITE_SECONDS)
    os._exit(code)


def _awaited() -> str:
    """What the exit waits for: threads that Python awaits before it exits, else the main thread."""
    main, own = threading.main_thread(), threading.current_thread()
    others = [each for each in threading.enumerate() if each not in (main, own) and not each.daemon]
    frames = sys._current_frames()
    named = [f"the thread {each.name!r} in {_place(frames.get(each.ident or 0))}" for each in others]
    return " and ".join(named) or _place(frames.get(main.ident or 0))


def _place(frame: FrameType | None) -> str:
    """The innermost function of a stack that is not of the standard library; else the innermost one."""
    inner = frame
    while frame is not None and _is_stdlib(frame):
        frame = frame.f_back
    found = frame or inner
    if found is None:
        return "code without a stack"
    code = found.f_code
    return f"{code.co_qualname}() ({code.co_filename}, line {found.f_lineno})"


def _is_stdlib(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return file.startswith(("<", STDLIB)) and not any(name in file for name in PACKAGES)
