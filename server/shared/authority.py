"""The host and port of a server, as URLs and HTTP's header Host write them."""

from __future__ import annotations


def authority(host: str, port: int) -> str:
    """host:port; an IPv6 address stands in brackets (RFC 3986, 3.2.2)."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
