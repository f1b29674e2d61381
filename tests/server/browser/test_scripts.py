"""Parts of the page's scripts, run in a real browser: streams and texts however they are cut."""

from __future__ import annotations

import os
from typing import Any

import pytest

if "BROWSER_PACKAGES" not in os.environ:
    pytest.skip("`make browser-test` runs this in Chromium", allow_module_level=True)

TEXTS = [
    "One.\nTwo.\n\nThree.",
    "Look:\n```python\nfor x in y:\n\n    pass\n```\nDone.",
    "``not a fence``\n`code` here\n\n``` `` ```\n",
    "````\n```\ninner\n```\n````\nafter",
    "```\nnever closed\n  ",
    "    ```\nindented four\n",
    "\n\n  \nlate\n",
    "~~~\nplain\n~~~",
]


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_looks_the_same_however_it_is_cut(talk: Any, text: str) -> None:
    code = """async (text) => {
        const { Prose } = await import("/page/prose.js");
        const shown = (parts) => {
            const target = document.createElement("div");
            const prose = new Prose(target);
            for (const part of parts) prose.add(part);
            prose.end();
            return [...target.children].map((one) => one.querySelector("pre")
                ? ["code", one.querySelector(".bar span").textContent, one.querySelector("code").textContent]
                : ["text", "", one.textContent]);
        };
        const whole = shown([text]);
        const cuts = [shown([...text]), ...[...text].map((_, at) => shown([text.slice(0, at), text.slice(at)]))];
        return [whole, cuts.filter((one) => JSON.stringify(one) !== JSON.stringify(whole)).length];
    }"""
    blocks, different = talk.page.evaluate(code, text)
    assert different == 0
    assert blocks == EXPECTED[TEXTS.index(text)]


EXPECTED = [
    [["text", "", "One.\nTwo."], ["text", "", "Three."]],
    [["text", "", "Look:"], ["code", "python", "for x in y:\n\n    pass"], ["text", "", "Done."]],
    [["text", "", "``not a fence``\n`code` here"], ["text", "", "``` `` ```"]],
    [["code", "", "```\ninner\n```"], ["text", "", "after"]],
    [["code", "", "never closed\n  "]],
    [["text", "", "    ```\nindented four"]],
    [["text", "", "late"]],
    [["text", "", "~~~\nplain\n~~~"]],
]


def test_events_are_the_same_however_they_are_cut(talk: Any) -> None:
    stream = 'data: {"a": 1}\n\n: comment\n\nevent: x\ndata: b\ndata:c\n\ndata: é\r\n\r\n\n\ndata: [DONE]\n\n'
    code = """async (stream) => {
        const { EventReader } = await import("/page/api.js");
        const read = (parts) => {
            const reader = new EventReader();
            return parts.flatMap((part) => reader.feed(part));
        };
        return [read([...stream]), ...[...stream].map((_, at) => read([stream.slice(0, at), stream.slice(at)]))];
    }"""
    for found in talk.page.evaluate(code, stream):
        assert found == ['{"a": 1}', "b\nc", "é", "[DONE]"]


@pytest.mark.parametrize("text", ["", "{", '{"a": 1,}', "nul", '"a" "b"', "{'a': 1}"])
def test_what_is_not_json_stays_as_it_is(talk: Any, text: str) -> None:
    code = "async (text) => (await import('/page/json.js')).indented(text)"
    assert talk.page.evaluate(code, text) is None
