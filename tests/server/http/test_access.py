"""Who may use a real server: host names, origins, and API keys."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.datastructures import Headers

from engine.core.config.server import ServerConfig
from engine.core.errors import ConfigError
from engine.server.http.hosts import AllowedHosts, is_cross_site
from engine.server.shared.api_keys import ApiKeys, read_api_keys

Serve = Callable[..., AbstractContextManager[Any]]

COMPLETION = {"model": "tiny", "prompt": "hello", "max_tokens": 4}
BODY = json.dumps(COMPLETION).encode()
FORM = "application/x-www-form-urlencoded"


def post(server: Any, **headers: str) -> httpx.Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.post(f"{server.url}/v1/completions", content=BODY, headers=named, timeout=30)


def test_a_page_whose_name_points_to_the_server_is_refused(server: Any) -> None:
    host = f"rebound.example:{server.url.rpartition(':')[2]}"
    for path in ("/v1/models", "/health", "/metrics", "/nowhere"):
        response = httpx.get(server.url + path, headers={"host": host}, timeout=30)
        assert response.status_code == 403
        assert response.json()["error"]["code"] == "host_not_allowed"
    assert post(server, host=host, origin=f"http://{host}", content_type="application/json").status_code == 403


def test_a_page_elsewhere_that_sends_a_form_is_refused(server: Any) -> None:
    for kind in ("text/plain", FORM, "multipart/form-data; boundary=x", "text/plain; x=application/json", ""):
        for origin in ("http://evil.example", "null", "http://127.0.0.1:1"):
            response = post(server, content_type=kind, origin=origin)
            assert response.status_code == 403, (kind, origin)
            assert response.json()["error"]["code"] == "cross_site"
        assert post(server, content_type=kind, sec_fetch_site="cross-site").status_code == 403


def test_usual_clients_are_answered(server: Any) -> None:
    import openai

    assert post(server, content_type=FORM, user_agent="curl/8.5.0", accept="*/*").status_code == 200  # curl -d
    assert post(server).status_code == 200  # without any type
    assert post(server, content_type="text/plain").status_code == 200
    assert post(server, content_type=FORM, origin=server.url).status_code == 200  # a page of the server's own
    proxied = {"origin": "https://chat.example.com", "sec_fetch_site": "same-origin"}  # the proxy has changed Host
    assert post(server, content_type=FORM, **proxied).status_code == 200
    assert post(server, content_type="application/json", origin="https://chat.example.com").status_code == 200
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        assert client.completions.create(model="tiny", prompt="hello", max_tokens=4).choices[0].text == "abcd"


def test_a_request_has_exactly_one_host(server: Any) -> None:
    host, _, port = server.url.removeprefix("http://").partition(":")
    one = b"Host: localhost\r\n"
    for version, hosts, status in ((1, b"", 400), (1, one, 200), (1, one + one, 400), (0, b"", 200), (0, one, 200)):
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall(b"GET /health HTTP/1.%d\r\nConnection: close\r\n%b\r\n" % (version, hosts))
            assert b"".join(iter(lambda: connection.recv(65536), b"")).startswith(b"HTTP/1.1 %d " % status)


@pytest.mark.parametrize(
    ("settings", "host", "allowed"),
    [
        ({}, "localhost:8000", True),
        ({}, "LOCALHOST", True),
        ({}, "app.localhost:1", True),
        ({}, "127.0.0.1:8000", True),
        ({}, "[::1]:8000", True),
        ({}, "192.168.1.5:8000", True),
        ({}, "evil.example", False),
        ({}, "localhost.evil.example", False),
        ({}, "localhost@evil.example", False),
        ({}, "", False),
        ({"host": "localhost"}, "evil.example", False),
        ({"host": "::1"}, "evil.example", False),
        ({"host": "0.0.0.0"}, "machine.example:8000", True),
        ({"host": "10.0.0.1"}, "machine.example", True),
        ({"has_keys": True}, "machine.example", True),
        ({"allowed_hosts": ("api.example.com",)}, "api.example.com:443", True),
        ({"allowed_hosts": ("api.example.com",)}, "API.example.com.", True),
        ({"allowed_hosts": ("api.example.com",)}, "other.example.com", False),
        ({"allowed_hosts": ("api.example.com",)}, "localhost", False),
        ({"allowed_hosts": ("*.example.com",)}, "a.b.example.com", True),
        ({"allowed_hosts": ("*.example.com",)}, "example.com", False),
        ({"allowed_hosts": ("*.example.com",)}, "evilexample.com", False),
        ({"allowed_hosts": ("::1",)}, "[::1]:8000", True),
        ({"allowed_hosts": ("*",)}, "anything", True),
        ({"allowed_hosts": ("a.example",), "has_keys": True}, "b.example", False),
    ],
)
def test_allowed_host_names(settings: dict[str, Any], host: str, allowed: bool) -> None:
    has_keys = settings.get("has_keys", False)
    config = ServerConfig(**{name: value for name, value in settings.items() if name != "has_keys"})
    assert AllowedHosts(config, has_keys=has_keys).allows(host) is allowed


def test_an_allowed_origin_may_send_anything() -> None:
    headers = Headers({"origin": "https://app.example", "host": "localhost:8000", "content-type": "text/plain"})
    assert is_cross_site(headers, ())
    assert not is_cross_site(headers, ("https://app.example",))
    assert not is_cross_site(headers, ("*",))


def test_each_of_several_keys_is_accepted(serve_fake: Serve, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# of the team\nthird\n\n  fourth  \n")
    keys = {"api_key": ("first", "second"), "api_key_file": str(file)}
    with serve_fake(**keys, access_log="line") as server:
        for key in ("first", "second", "third", "fourth"):
            assert post(server, authorization=f"Bearer {key}").status_code == 200
        for wrong in (
            "Bearer # of the team",
            "Bearer",
            "Basic first",
            "bearer:first",
            "Bearer firs",
            "Bearer first,second",
        ):
            response = post(server, authorization=wrong)
            assert response.status_code == 401
            assert response.headers["www-authenticate"] == "Bearer"
        assert httpx.head(f"{server.url}/health", timeout=30).status_code == 200
        assert post(server).status_code == 401
        server.until(lambda: len(server.errors.splitlines()) == 12)
        numbers = [line.rpartition(" key ")[2] for line in server.errors.splitlines() if " key " in line]
        assert sorted(numbers) == ["1", "2", "3", "4"]
        assert not any(key in server.errors for key in ("first", "second", "third", "fourth"))


def test_a_byte_order_mark_of_a_key_file_is_no_part_of_the_first_key(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("first\nsecond\n", encoding="utf-8-sig")
    assert read_api_keys(ServerConfig(api_key_file=str(file))) == ("first", "second")


@pytest.mark.parametrize(
    ("content", "problem"),
    [(None, "No such file"), (b"# nothing\n", "contains no key"), (b"\xff", "UTF-8"), (b"a b", "key number 1")],
)
def test_a_key_file_that_cannot_be_used_is_refused(tmp_path: Path, content: bytes | None, problem: str) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=problem):
        read_api_keys(ServerConfig(api_key_file=str(file)))


def test_a_key_file_that_cannot_be_used_stops_the_start(serve_fake: Serve, tmp_path: Path) -> None:
    with serve_fake(api_key_file=str(tmp_path / "missing")) as server:
        assert server.process.returncode == 1
        assert "No such file" in server.errors
        assert "Traceback" not in server.errors


def test_keys_are_numbered_in_order() -> None:
    keys = ApiKeys(("a", "bb", "a"))
    assert [keys.number(key) for key in (b"a", b"bb", b"b", b"")] == [1, 2, None, None]
    assert ApiKeys(()).number(b"") is None


def test_pages_of_allowed_origins_may_read_answers(serve_fake: Serve) -> None:
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    with serve_fake(api_key=("k",), allowed_origins=("https://app.example",)) as server:
        for origin, allowed in (("https://app.example", True), ("https://evil.example", False)):
            preflight = httpx.options(f"{server.url}/v1/completions", headers=asked | {"origin": origin}, timeout=30)
            assert (preflight.status_code == 200) is allowed
            for status, key in ((200, "Bearer k"), (401, "Bearer x")):
                response = post(server, origin=origin, authorization=key, content_type="application/json")
                assert response.status_code == status
                assert ("access-control-allow-origin" in response.headers) is allowed
                exposed = response.headers["access-control-expose-headers"].split(", ")
                assert {"request-id", "x-skipped-tools", "x-parameters-without-effect"} <= set(exposed)


def test_no_page_may_read_answers_by_default(server: Any) -> None:
    response = post(server, origin="https://app.example", content_type="application/json")
    assert "access-control-allow-origin" not in response.headers
