"""Pictures of the page for the documentation: `make browser-test SCREENSHOTS=docs/img` writes them there."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

if "BROWSER_PACKAGES" not in os.environ:
    pytest.skip("`make browser-test` runs this in Chromium", allow_module_level=True)

MAX_BYTES = 150_000
HALVES = """<think>
A recursion that halves the range, or a loop? A loop is easier to follow, and needs no limit of depth.
</think>

A loop that halves the range until it is empty:

```python
def find(values, wanted):
    low, high = 0, len(values)
    while low < high:
        middle = (low + high) // 2
        if values[middle] < wanted:
            low = middle + 1
        else:
            high = middle
    return low
```

It returns the first position at which the value can be inserted and the list stays sorted.
"""
CALL = """<think>The forecast is a matter for the tool.</think>Let me look that up.
<tool_call>
{"name": "weather", "arguments": {"city": "Rome", "days": 2, "units": "metric"}}
</tool_call>"""
FORECAST = '{"today": "sunny, 31 °C", "tomorrow": "thunderstorms"}'
ADVICE = "Today will be sunny with up to 31 °C. Take an umbrella tomorrow: thunderstorms are expected."
SCHEMA = """{
  "type": "object",
  "properties": {
    "name": {"type": "string"},
    "age": {"type": "integer"},
    "known_for": {
      "type": "array",
      "items": {"type": "string"}
    }
  },
  "required": ["name", "age", "known_for"]
}"""
PERSON = '{"name": "Ada Lovelace", "age": 36, "known_for": ["notes on the Analytical Engine", "the first program"]}'


@pytest.fixture
def take(tmp_path: Path) -> Callable[[Any, str], None]:
    """Takes a picture of a tab."""
    folder = Path(os.environ.get("SCREENSHOTS") or tmp_path)

    def picture(talk: Any, name: str) -> None:
        file = folder / name
        talk.page.mouse.move(0, 0)
        talk.page.screenshot(path=file, caret="hide")
        assert file.stat().st_size < MAX_BYTES

    return picture


def test_an_answer_with_reasoning_and_code(talk: Any, model: Any, take: Callable[[Any, str], None]) -> None:
    model.says(HALVES)
    talk.page.get_by_label("System message").fill("You are a patient teacher.")
    talk.page.get_by_label("Temperature").fill("0.7")
    talk.write("How do I find a value in a sorted list?")
    talk.answers().locator("summary").click()
    talk.page.locator("#message").focus()
    take(talk, "page-light.png")


def test_json_in_the_dark(new_talk: Callable[..., Any], model: Any, take: Callable[[Any, str], None]) -> None:
    talk = new_talk(color_scheme="dark")
    talk.open(model.url)
    model.says(PERSON)
    talk.page.get_by_label("Format").select_option("json_schema")
    talk.page.get_by_label("JSON schema", exact=True).fill(SCHEMA)
    talk.write("Who wrote the first program?")
    talk.answers()
    talk.page.locator("#settings").evaluate("(one) => one.scrollTo(0, one.scrollHeight)")
    take(talk, "page-dark.png")


def test_a_call_and_its_result(new_talk: Callable[..., Any], model: Any, take: Callable[[Any, str], None]) -> None:
    talk = new_talk(viewport={"width": 1280, "height": 860})
    talk.open(model.url)
    model.says(CALL, ADVICE)
    talk.page.get_by_role("button", name="Example").last.click()
    talk.write("What will the weather be in Rome?")
    talk.answers()
    talk.page.keyboard.insert_text(FORECAST)
    talk.page.keyboard.press("Enter")
    talk.answers(2)
    talk.page.locator("#settings").evaluate("(one) => one.scrollTo(0, one.scrollHeight)")
    take(talk, "page-tool.png")
