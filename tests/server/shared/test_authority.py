from __future__ import annotations

import pytest

from engine.server.shared.authority import authority


@pytest.mark.parametrize(
    ("host", "written"), [("localhost", "localhost:80"), ("127.0.0.1", "127.0.0.1:80"), ("::1", "[::1]:80")]
)
def test_authority_has_brackets_when_the_host_is_an_ipv6_address(host: str, written: str) -> None:
    assert authority(host, 80) == written
