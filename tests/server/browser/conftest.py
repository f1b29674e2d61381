"""A real browser for the tests of this folder, which only `make browser-test` runs."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

PACKAGES = "BROWSER_PACKAGES"
"""Environment variable that names the folder with playwright; set by `make browser-test`."""
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
WAIT = 30_000
"""Milliseconds in which what a test waits for must happen; a busy machine needs many."""
FAILED_REQUEST = "Failed to load resource: the server responded with a status of"
"""Chromium's own line for any response with an error status."""


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Chromium, driven by playwright."""
    sys.path.append(os.environ[PACKAGES])
    from playwright.sync_api import sync_playwright

    program = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if program is None:
        pytest.fail(f"there is no browser ({', '.join(BROWSERS)}); on Debian: apt-get install chromium")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=program, args=["--no-sandbox"] if os.geteuid() == 0 else []
        )
        yield chromium
        chromium.close()


class Model:
    """A server whose model says what a test has written down."""

    def __init__(self, server: Any, file: Path) -> None:
        self.server, self.url, self._file = server, server.url, file

    def says(self, *answers: str) -> None:
        """Answer the next chats with these texts."""
        self._file.write_text(json.dumps(answers))


@pytest.fixture(scope="session")
def model(
    browser: Any,
    serve_fake: Callable[..., AbstractContextManager[Any]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Model]:
    """A server for all tests that need no settings of their own; its model writes calls as Hermes does."""
    file = tmp_path_factory.mktemp("answers") / "answers.json"
    file.write_text("[]")
    options = {"max_len": 16384, "answers": str(file), "delay": 0.002}
    with serve_fake(parser="hermes", options=options, request_timeout=60.0) as server:
        yield Model(server, file)
        assert server.stop() == 0
        assert "ERROR" not in server.errors


class Talk:
    """A tab with the page, as a person sees it."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.asked: list[dict[str, Any]] = []
        """Bodies of the chats that the page has sent."""
        self.problems: list[str] = []
        page.set_default_timeout(WAIT)
        page.on("request", self._note)
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("console", self._listen)

    def _note(self, request: Any) -> None:
        own = urlsplit(self.page.url).netloc
        if own and urlsplit(request.url).netloc != own:
            self.problems.append(f"a request to {request.url}")
        if request.url.endswith("/v1/chat/completions"):
            self.asked.append(json.loads(request.post_data))

    def _listen(self, message: Any) -> None:
        if message.type in ("error", "warning") and not message.text.startswith(FAILED_REQUEST):
            self.problems.append(message.text)

    def open(self, url: str) -> None:
        self.page.goto(url)
        self.page.get_by_text(re.compile("context of")).wait_for(state="attached")

    def write(self, text: str) -> None:
        """Write a message with the keyboard, and send it."""
        self.page.locator("#message").focus()
        lines = text.split("\n")
        for index, line in enumerate(lines):
            self.page.keyboard.insert_text(line)
            self.page.keyboard.press("Enter" if index == len(lines) - 1 else "Shift+Enter")

    def answers(self, count: int = 1) -> Any:
        """The last of `count` answers, when it is complete."""
        done = self.page.locator("article.model[aria-busy=false]")
        done.nth(count - 1).wait_for()
        assert self.page.locator("article.model").count() == count
        return done.nth(count - 1)

    def error(self) -> str:
        """The error that is shown."""
        shown = self.page.get_by_role("alert")
        shown.wait_for()
        return str(shown.inner_text())

    def focused(self) -> str:
        """What has the focus: its label or its id."""
        return str(self.page.evaluate("document.activeElement.ariaLabel || document.activeElement.id"))


@pytest.fixture
def new_talk(browser: Any) -> Iterator[Callable[..., Talk]]:
    """Opens a tab of a browser without any data; its arguments are those of playwright's new_context."""
    opened: list[Any] = []
    talks: list[Talk] = []

    def make(**settings: Any) -> Talk:
        context = browser.new_context(**({"viewport": {"width": 1280, "height": 800}} | settings))
        opened.append(context)
        talks.append(Talk(context.new_page()))
        return talks[-1]

    yield make
    for context in opened:
        context.close()
    assert [talk.problems for talk in talks] == [[]] * len(talks)


@pytest.fixture
def talk(new_talk: Callable[..., Talk], model: Model) -> Talk:
    """A tab with the page of `model`."""
    made = new_talk()
    made.open(model.url)
    return made
