"""Notifies systemd when the server is ready and when it stops, if systemd waits for that (Type=notify)."""

from __future__ import annotations

import logging
import os
import socket

ADDRESS = "NOTIFY_SOCKET"
"""Environment variable that systemd sets: the socket that receives notifications, sd_notify(3)."""

log = logging.getLogger(__name__)


def notify(state: str) -> None:
    """Report a state, as READY=1; a no-op unless systemd waits for it. A socket that does not answer is a warning."""
    address = os.environ.get(ADDRESS, "")
    if not address.startswith(("/", "@")):
        return
    name = "\0" + address[1:] if address.startswith("@") else address
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as connection:
            connection.connect(name)
            connection.send(state.encode())
    except OSError as error:
        log.warning("systemd could not be notified of %s: %s", state, error)
