"""The page at /: how it is served, and what its files contain. tests/server/browser opens it in a browser."""

from __future__ import annotations

import asyncio
import re
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from engine.core.config.server import ServerConfig
from engine.core.plugin_host import load_plugins
from engine.server.http.app import make_app
from engine.server.http.page import FOLDER, INDEX, MEDIA_TYPES

FILES = sorted(FOLDER.iterdir())
SCRIPTS = {file.name: file.read_text() for file in FILES if file.suffix == ".js"}
HTML = (FOLDER / INDEX).read_text()
DOCS = Path(__file__).resolve().parents[3] / "docs"


class _Service(SimpleNamespace):
    """Stands for a service of which routes only keep the parts, and whose metrics may be written."""

    def __getattr__(self, name: str) -> Any:
        return _Service()

    def __call__(self, *arguments: Any) -> None:
        """Take what is counted."""


def respond(method: str, path: str, *, keys: tuple[str, ...] = (), page: bool = True, **headers: str) -> httpx.Response:
    """The response of an application without an engine."""
    limits = ServerConfig(openapi=False, page=page)
    service: Any = _Service(limits=limits, draining=False, error_bodies={}, tracer=None)
    app = make_app(service, keys, None, load_plugins())

    async def with_state(scope: Any, receive: Any, send: Any) -> None:
        await app(scope | {"state": {}}, receive, send)

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(with_state)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.request(method, path, headers={k.replace("_", "-"): v for k, v in headers.items()})

    return asyncio.run(ask())


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_each_file_is_served_with_its_type_and_a_strict_policy(file: Path) -> None:
    response = respond("GET", "/" if file.name == INDEX else f"/page/{file.name}", keys=("k",))
    assert (response.status_code, response.content) == (200, file.read_bytes())
    assert response.headers["content-type"] == MEDIA_TYPES[file.suffix]
    policy = response.headers["content-security-policy"].split("; ")
    assert "default-src 'none'" in policy
    assert "script-src 'self'" in policy
    assert "frame-ancestors 'none'" in policy
    assert not re.search("unsafe|http|[*]|data:", response.headers["content-security-policy"])
    assert response.headers["x-content-type-options"] == "nosniff"


def test_a_browser_that_has_a_file_gets_it_only_once() -> None:
    tag = respond("GET", "/").headers["etag"]
    for known in (tag, f'"other", W/{tag}'):
        response = respond("GET", "/", if_none_match=known)
        assert (response.status_code, response.content, response.headers["etag"]) == (304, b"", tag)
    assert respond("GET", "/", if_none_match='"other"').status_code == 200


def test_only_the_page_needs_no_key() -> None:
    for path in ("/v1/models", "/tokenizer_info", "/page/", "/page/other.js", "/page/../v1/models"):
        assert respond("GET", path, keys=("k",)).status_code == 401, path
    for path in ("/page/", "/page/other.js", "/page/index.html", "/page/__init__.py"):
        assert respond("GET", path).status_code == 404, path


def test_the_page_can_be_left_out() -> None:
    for path in ("/", "/page/main.js"):
        assert respond("GET", path, page=False).status_code == 404
        assert respond("GET", path, page=False, keys=("k",)).status_code == 401


def test_the_page_is_only_read() -> None:
    response = respond("DELETE", "/")
    assert response.status_code == 405
    assert set(response.headers["allow"].split(", ")) == {"GET", "HEAD"}


def test_a_real_server_serves_the_page(server: Any) -> None:
    page, head = (httpx.request(method, f"{server.url}/", timeout=30) for method in ("GET", "HEAD"))
    assert (page.status_code, page.text) == (200, HTML)
    assert (head.status_code, head.content, head.headers["content-length"]) == (200, b"", str(len(HTML.encode())))
    rebound = httpx.get(f"{server.url}/", headers={"host": "rebound.example"}, timeout=30)
    assert rebound.json()["error"]["code"] == "host_not_allowed"


class Elements(HTMLParser):
    """The elements of a page, as (name, attributes), and the texts of its scripts and styles."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(HTML)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.found.append((tag, dict(attrs)))


ELEMENTS = Elements().found
IDS = [attributes["id"] for _, attributes in ELEMENTS if "id" in attributes]


def test_all_that_the_page_loads_is_its_own() -> None:
    loaded = {str(value) for _, attributes in ELEMENTS for key, value in attributes.items() if key in ("src", "href")}
    imported = {f"page/{name}" for text in SCRIPTS.values() for name in re.findall(r'from "\./([^"]+)"', text)}
    assert loaded | imported == {f"page/{file.name}" for file in FILES if file.name != INDEX}
    for file in FILES:
        text = file.read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?:|//[a-z]|@import|url\(", re.sub(r"(?m)^\s*//.*|\s// .*", "", text)), file.name


def test_nothing_is_inline() -> None:
    assert "<style" not in HTML
    assert not re.search(r"<script(?![^>]*\bsrc=)", HTML)
    assert not [name for _, attributes in ELEMENTS for name in attributes if name == "style" or name.startswith("on")]


@pytest.mark.parametrize("name", sorted(SCRIPTS))
def test_no_script_makes_markup_or_code_of_text(name: str) -> None:
    banned = (
        "innerHTML|outerHTML|insertAdjacentHTML|document.write|DOMParser|srcdoc|eval|Function\\(|setHTML|localStorage"
    )
    assert not re.search(banned, SCRIPTS[name])


def test_each_control_has_a_name_and_each_id_is_used_once() -> None:
    assert len(IDS) == len(set(IDS))
    labelled = {attributes.get("for") for tag, attributes in ELEMENTS if tag == "label"}
    for tag, attributes in ELEMENTS:
        if tag in ("input", "select", "textarea"):
            assert attributes.get("id") in labelled or attributes.get("aria-label"), attributes
    named = [a[key] for _, a in ELEMENTS for key in ("for", "aria-describedby", "aria-controls") if key in a]
    assert set(named) <= set(IDS)


@pytest.mark.parametrize("name", sorted(SCRIPTS))
def test_what_scripts_look_for_is_in_the_page(name: str) -> None:
    assert set(re.findall(r'(?:byId|field)\("([^"]+)"\)', SCRIPTS[name])) <= set(IDS)


def test_the_documentation_shows_the_page() -> None:
    images = re.findall(r"!\[[^]]+\]\((img/page-[^)]+)\)", (DOCS / "chat.md").read_text())
    assert len(images) == 3
    for image in images:
        assert (DOCS / image).stat().st_size < 150_000
