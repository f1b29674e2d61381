"""The limit of open file descriptors (ulimit -n), which bounds the number of connections."""

from __future__ import annotations

import contextlib
import os
import resource

HIGHEST = 2**20
"""A higher limit than this is of no use here, and slows programs that close every possible descriptor."""


def raise_descriptor_limit() -> int:
    """Raise this process's soft limit of open files as far as its hard limit allows; return the new soft limit.

    Child processes inherit the limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = HIGHEST if hard == resource.RLIM_INFINITY else min(hard, HIGHEST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # macOS has a limit below the hard one (kern.maxfilesperproc)
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return descriptor_limit()


def descriptor_limit() -> int:
    """The soft limit of open files of this process."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return HIGHEST if soft == resource.RLIM_INFINITY else soft


def count_open_descriptors() -> int:
    """Number of file descriptors that this process has open."""
    return len(os.listdir("/dev/fd")) - 1  # without the one that lists the directory
