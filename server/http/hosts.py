"""Which names of the server a request may use, and which web pages may send one.

A browser lets any page send requests to any address. Two checks keep a page elsewhere from using a server without an
API key on the user's machine: a page that has made its own name point to the server (DNS rebinding) gives itself away
by that name, and one that sends a form by its origin.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from engine.core.config import ServerConfig

ANY = "*"
_HOST = re.compile(r"(\[[0-9a-f:.%a-z]+\]|[^\[\]:/@\s]+)(?::\d{0,5})?")
SAME_SITE = ("same-origin", "none")
"""Values of Sec-Fetch-Site of a page of this server, and of the address bar."""


class AllowedHosts:
    """The names under which the server may be addressed."""

    def __init__(self, config: ServerConfig, *, has_keys: bool) -> None:
        """has_keys: whether clients need an API key."""
        self._names = {name.lower() for name in config.allowed_hosts}
        self._local = not self._names and not has_keys and not config.uds and _is_local(config.host)
        self._any = ANY in self._names or not (self._names or self._local)
        self._bound = config.host.lower()

    def allows(self, host: str) -> bool:
        """Whether a request with this Host header may be answered."""
        if self._any:
            return True
        match = _HOST.fullmatch(host.lower())
        if match is None:
            return False
        name = match[1].strip("[]").rstrip(".")
        if self._local:  # an address in numbers cannot be made to point elsewhere
            return name == self._bound or _is_local(name) or _address(name) is not None
        parents = (name[at:] for at, letter in enumerate(name) if letter == ".")
        return name in self._names or any(f"*{parent}" in self._names for parent in parents)


def is_cross_site(headers: Headers, allowed_origins: Sequence[str]) -> bool:
    """Whether a POST is one that a page of another site may send without asking the server first.

    That is one whose body is not declared as JSON: for JSON, browsers ask (CORS). Only browsers send an Origin.
    """
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "application/json" or kind.endswith("+json"):
        return False
    origin, site = headers.get("origin"), headers.get("sec-fetch-site", "").lower()
    if origin is None:
        return site not in ("", *SAME_SITE)
    if site in SAME_SITE or ANY in allowed_origins or origin.rstrip("/") in allowed_origins:
        return False
    return _authority(origin) != headers.get("host", "").lower()


def _authority(origin: str) -> str:
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""


def _is_local(name: str) -> bool:
    """Whether a name or an address always means this machine."""
    address = _address(name)
    return name == "localhost" or name.endswith(".localhost") or (address is not None and address.is_loopback)


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None
