"""What the kernel knows of a connection's other side, without reading from the connection."""

from __future__ import annotations

import contextlib
import select
import socket
from asyncio import BaseTransport
from typing import Any

KEEPALIVE_SECONDS = 1
"""Seconds between two keepalive probes of an idle connection."""


def has_hung_up(transport: BaseTransport) -> bool:
    """Whether the connection has ended in both directions: closed on both sides, or reset."""
    return _poll(transport, 0)  # errors and hang-ups are always reported


def has_shut_down(transport: BaseTransport) -> bool:
    """Whether the peer sends nothing further, although data may be unread. Linux only: elsewhere always False."""
    return hasattr(select, "POLLRDHUP") and _poll(transport, select.POLLRDHUP)


def enable_keepalive(transport: BaseTransport) -> None:
    """Send TCP keepalive probes from now on; a no-op for other kinds of sockets.

    The peer's kernel answers them with a reset once it has forgotten the connection: Linux forgets a closed one after a
    minute (net.ipv4.tcp_fin_timeout).
    """
    connection: Any = transport.get_extra_info("socket")
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        return
    with contextlib.suppress(OSError):  # some systems refuse options of a connection that has been reset
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_KEEPIDLE"):  # else the system's default, mostly two hours
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_SECONDS)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_SECONDS)


def _poll(transport: BaseTransport, events: int) -> bool:
    poll = select.poll()
    poll.register(transport.get_extra_info("socket").fileno(), events)
    return bool(poll.poll(0))
