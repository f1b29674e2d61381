"""The page with the demo model: real answers, and a schema that is enforced."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

if "BROWSER_PACKAGES" not in os.environ:
    pytest.skip("`make browser-test` runs this in Chromium", allow_module_level=True)

DEMO = Path(__file__).resolve().parents[3] / "demo" / "engine-demo"
SERVE = [sys.executable, "-P", "-c", "from engine.cli.main import main; main()", "serve", "--model", str(DEMO)]
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "n": {"enum": [1, 2]}},
    "required": ["ok", "n"],
    "additionalProperties": False,
}


def test_a_model_answers_and_keeps_to_a_schema(
    new_talk: Callable[..., Any], start_server: Callable[[Sequence[str]], Any]
) -> None:
    server = start_server([*SERVE, "--port", "0", "--kv-memory", "16MiB", "--threads", "1"])
    assert server.url, server.errors
    talk = new_talk()
    talk.open(server.url)
    page = talk.page
    page.get_by_label("Max tokens").fill("24")
    page.get_by_label("Temperature").fill("0")
    talk.write("def read_lines(path):")
    assert talk.answers().locator(".prose").inner_text()
    page.get_by_label("Format").select_option("json_schema")
    page.get_by_label("JSON schema", exact=True).fill(json.dumps(SCHEMA))
    talk.write("Is it?")
    shown = talk.answers(2).locator("pre.json").inner_text()
    assert json.loads(shown).keys() == {"ok", "n"}
    page.get_by_label("JSON schema", exact=True).fill('{"type": "array", "uniqueItems": true}')
    talk.write("And this?")
    assert "uniqueItems" in talk.error()
    page.get_by_label("Format").select_option("text")
    page.get_by_role("button", name="Example").last.click()
    page.locator("#message").press("Enter")
    assert "cannot read tool calls of this model" in talk.error()
    assert server.stop() == 0
