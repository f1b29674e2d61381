"""The page at /, used in a real browser."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest

if "BROWSER_PACKAGES" not in os.environ:
    pytest.skip("`make browser-test` runs this in Chromium", allow_module_level=True)

WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 12345678901234567890}}\n</tool_call>'
TIME = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
LONG = "one two three four five six seven eight nine ten\n\n" * 60


def test_a_whole_conversation_from_the_keyboard_alone(talk: Any, model: Any) -> None:
    keyboard = talk.page.keyboard

    def go_to(name: str, key: str = "Tab") -> None:
        for _ in range(40):
            if talk.focused() == name:
                break
            keyboard.press(key)
        assert talk.focused() == name
        outline = "getComputedStyle(document.activeElement).outlineStyle"
        assert talk.page.evaluate(outline) != "none", f"the focus on {name} cannot be seen"

    assert talk.focused() == "Message", "one can write immediately"
    model.says("Hello.", f"<think>A tool knows.</think>{CALL}", "It is sunny.", "Goodbye.")
    keyboard.type("one")
    keyboard.press("Shift+Enter")
    keyboard.type("two")
    keyboard.press("Enter")
    assert "Hello." in talk.answers().inner_text()
    assert talk.asked[0]["messages"] == [{"role": "user", "content": "one\ntwo"}]

    go_to("system")
    keyboard.type("Be brief.")
    go_to("temperature")
    keyboard.type("0.5")
    go_to("tools")
    keyboard.insert_text(json.dumps([WEATHER]))
    go_to("Message", "Shift+Tab")
    keyboard.type("Weather?")
    keyboard.press("Enter")
    talk.answers(2)
    assert talk.focused() == "Result of weather"
    keyboard.type("sunny")
    keyboard.press("Enter")
    assert "It is sunny." in talk.answers(3).inner_text()
    assert talk.focused() == "Message"
    first, *_, calling, result = talk.asked[2]["messages"]
    assert first == {"role": "system", "content": "Be brief."}
    assert talk.asked[2]["temperature"] == 0.5
    assert calling["reasoning_content"] == "A tool knows."
    assert result == {"role": "tool", "tool_call_id": calling["tool_calls"][0]["id"], "content": "sunny"}

    go_to("Conversation", "Shift+Tab")
    keyboard.press("Home")
    go_to("new", "Shift+Tab")
    keyboard.press("Enter")
    assert talk.page.locator("article").count() == 0
    assert talk.focused() == "Message"
    keyboard.type("Bye")
    keyboard.press("Enter")
    talk.answers()
    assert [one["content"] for one in talk.asked[3]["messages"]] == ["Be brief.", "Bye"]


@pytest.mark.parametrize("way", ["Escape", "button"])
def test_an_answer_is_shown_while_it_comes_and_can_be_stopped(talk: Any, model: Any, way: str) -> None:
    model.says(LONG, "more")
    aborted = model.server.metrics()['engine_requests_finished_total{finish_reason="abort"}']
    talk.write("count")
    coming = talk.page.locator("article.model[aria-busy=true]")
    coming.get_by_text("one two three").first.wait_for()
    if way == "Escape":
        talk.page.keyboard.press("Escape")
    else:
        talk.page.keyboard.press("Tab")
        assert talk.focused() == "stop"
        talk.page.keyboard.press("Enter")
    answer = talk.answers()
    assert talk.focused() == "Message"
    assert "stopped" in answer.locator("footer").inner_text()
    kept = answer.locator(".prose").inner_text()
    assert LONG.startswith(kept[:200])
    assert len(kept) < len(LONG) - 100
    name = 'engine_requests_finished_total{finish_reason="abort"}'
    model.server.until(lambda: model.server.metrics()[name] == aborted + 1)
    talk.write("go on")
    talk.answers(2)
    assert LONG.startswith(talk.asked[1]["messages"][1]["content"])
    assert talk.page.get_by_role("alert").count() == 0


def test_a_conversation_that_is_left_while_an_answer_comes_is_gone(talk: Any, model: Any) -> None:
    model.says(LONG, "fresh")
    talk.write("count")
    talk.page.locator("article.model .prose").wait_for()
    talk.page.get_by_role("button", name="New conversation").click()
    talk.write("anew")
    assert "fresh" in talk.answers().inner_text()
    assert talk.asked[1]["messages"] == [{"role": "user", "content": "anew"}]


def test_the_parameters_are_sent(talk: Any, model: Any) -> None:
    model.says("yes", "no")
    talk.write("nothing given")
    talk.answers()
    assert talk.asked[0] == {
        "model": "tiny",
        "messages": [{"role": "user", "content": "nothing given"}],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    page = talk.page
    for label, value in (("Temperature", "0"), ("Top p", "0.25"), ("Max tokens", "2"), ("Seed", "7")):
        page.get_by_label(label, exact=True).fill(value)
    page.get_by_label("Effort").select_option("low")
    page.get_by_label("Functions, as JSON").fill(json.dumps([WEATHER]))
    page.get_by_label("Choice").select_option("none")
    talk.write("all given")
    answer = talk.answers(2)
    given = {key: value for key, value in talk.asked[1].items() if key not in talk.asked[0]}
    assert given == {
        "temperature": 0,
        "top_p": 0.25,
        "max_tokens": 2,
        "seed": 7,
        "reasoning_effort": "low",
        "tools": [WEATHER],
        "tool_choice": "none",
    }
    assert "cut short" in answer.locator("footer").inner_text()


def test_thinking_is_offered_where_the_template_has_a_place_for_it(new_talk: Callable[..., Any], model: Any) -> None:
    template = ""
    talk = new_talk()
    talk.page.route("**/tokenizer_info", lambda route: route.fulfill(json={"chat_template": template or None}))
    answer = CHUNK + "data: [DONE]\n\n"
    talk.page.route(
        "**/v1/chat/completions", lambda route: route.fulfill(body=answer, content_type="text/event-stream")
    )
    with talk.page.expect_response("**/tokenizer_info"):
        talk.open(model.url)
    assert not talk.page.locator("#reasoning").is_visible()
    template = "{% if enable_thinking %}<think>{% endif %}"
    talk.open(model.url)
    talk.page.get_by_label("Thinking").select_option("off")
    assert not talk.page.get_by_label("Effort").is_visible()
    talk.write("hello")
    talk.answers()
    assert talk.asked[0]["chat_template_kwargs"] == {"enable_thinking": False}
    assert "reasoning_effort" not in talk.asked[0]


def test_json_is_shown_readably(talk: Any, model: Any) -> None:
    said = '{"name":"A \\"b\\" <i>","n":[1.50,12345678901234567890],"e":{}, "l": []}'
    model.says(said, said[:20])
    talk.page.get_by_label("Format").select_option("json_schema")
    talk.page.get_by_role("button", name="Example").first.click()
    talk.write("a person")
    shown = talk.answers().locator("pre.json").inner_text()
    assert shown.splitlines() == [
        "{",
        '  "name": "A \\"b\\" <i>",',
        '  "n": [',
        "    1.50,",
        "    12345678901234567890",
        "  ],",
        '  "e": {},',
        '  "l": []',
        "}",
    ]
    sent = talk.asked[0]["response_format"]
    assert sent["type"] == "json_schema"
    assert sent["json_schema"]["schema"]["required"] == ["name", "age"]
    talk.write("half of one")
    assert talk.answers(2).locator("pre.json").inner_text() == said[:20]


def test_fields_with_mistakes_are_named_and_nothing_is_sent(talk: Any) -> None:
    page = talk.page
    page.get_by_label("Format").select_option("json_schema")
    for text, said in (
        ("{", "The JSON schema: It is not JSON"),
        ("[]", "must be an object"),
        ("", "must be an object"),
    ):
        page.get_by_label("JSON schema", exact=True).fill(text)
        talk.write("hello")
        page.get_by_role("alert").get_by_text(said).wait_for()
        assert talk.focused() == "schema"
        assert page.locator("#message").input_value() == "hello"
        page.locator("#message").fill("")
    page.get_by_label("Format").select_option("text")
    for label, text, said in (
        ("Functions, as JSON", "{}", "must be a list"),
        ("Seed", "1.5", "Seed must be a whole number"),
        ("Seed", "99999999999999999999", "Seed must be a whole number"),
    ):
        page.get_by_label(label).fill(text)
        talk.write("hello")
        page.get_by_role("alert").get_by_text(said).wait_for()
        page.get_by_label(label).fill("")
        page.locator("#message").fill("")
    assert talk.asked == []


def test_calls_are_shown_and_answered(talk: Any, model: Any) -> None:
    model.says(f"Let me see.\n{CALL}\n{TIME}", "Sunny at noon.")
    tools = [WEATHER, {"type": "function", "function": {"name": "time"}}]
    talk.page.get_by_label("Functions, as JSON").fill(json.dumps(tools))
    talk.write("Weather?")
    answer = talk.answers()
    assert answer.locator(".prose").inner_text() == "Let me see."
    first, second = (answer.locator(".call").nth(index) for index in (0, 1))
    assert first.locator("h2").inner_text() == "calls weather"
    lines = first.locator("pre").inner_text().splitlines()
    assert lines == ["{", '  "city": "Rome",', '  "days": 12345678901234567890', "}"]
    assert second.locator("pre").inner_text() == "{}"

    talk.write("never mind")
    assert "waits for the result" in talk.error()
    assert len(talk.asked) == 1
    talk.page.locator("#message").fill("")
    talk.page.get_by_label("Result of weather").fill('{"sky": "clear"}')
    talk.page.get_by_label("Result of weather").press("Enter")
    assert talk.focused() == "Result of time"
    talk.page.get_by_label("Result of time").fill("noon")
    talk.page.get_by_role("button", name="Send results").click()
    assert "Sunny at noon." in talk.answers(2).inner_text()
    _, calling, *results = talk.asked[1]["messages"]
    assert calling["content"].strip() == "Let me see."
    assert [call["function"]["name"] for call in calling["tool_calls"]] == ["weather", "time"]
    ids = [call["id"] for call in calling["tool_calls"]]
    assert results == [
        {"role": "tool", "tool_call_id": ids[0], "content": '{"sky": "clear"}'},
        {"role": "tool", "tool_call_id": ids[1], "content": "noon"},
    ]
    assert talk.page.get_by_role("button", name="Send results").count() == 0


def test_what_could_not_be_read_is_said(talk: Any, model: Any) -> None:
    model.says("<tool_call>weather</tool_call>")
    talk.page.get_by_label("Functions, as JSON").fill(json.dumps([WEATHER]))
    talk.write("Weather?")
    assert "could not read all of this answer" in talk.answers().inner_text()


def test_reasoning_can_be_unfolded(talk: Any, model: Any) -> None:
    model.says("<think>\nFirst this.\nThen that.\n</think>\n\nSo it is.")
    talk.write("why")
    answer = talk.answers()
    assert answer.locator(".prose").inner_text() == "So it is."
    reasoning = answer.get_by_text("First this.")
    assert not reasoning.is_visible()
    answer.locator("summary").focus()
    talk.page.keyboard.press("Enter")
    reasoning.wait_for()
    assert "reasoning)" in answer.locator("footer").inner_text()


def test_usage_and_speed_are_shown(talk: Any, model: Any) -> None:
    model.says("Ten letters")
    talk.write("hi")
    facts = talk.answers().locator("footer").inner_text()
    assert facts.startswith("19 tokens in (2 cached) · 12 out · ")
    assert "tokens/s" in facts
    assert "first after" in facts


def test_an_answer_can_be_had_again(talk: Any, model: Any) -> None:
    model.says("first", "second", "third")
    talk.write("say something")
    talk.answers()
    talk.page.get_by_role("button", name="Answer again").click()
    talk.page.locator("article.model[aria-busy=false]").get_by_text("second").wait_for()
    assert talk.asked[1]["messages"] == talk.asked[0]["messages"]
    assert talk.page.locator("article.model").count() == 1
    talk.write("and then")
    talk.answers(2)
    assert [one["content"] for one in talk.asked[2]["messages"]] == ["say something", "second", "and then"]
    assert talk.page.get_by_role("button", name="Answer again").count() == 1


def test_what_the_server_refuses_is_shown_and_can_be_mended(talk: Any, model: Any) -> None:
    model.says("fine")
    talk.page.get_by_label("Temperature").fill("200")
    talk.write("hello <b>you</b>")
    assert talk.error() == "temperature must be in [0, 100], not 200.0"
    assert talk.page.locator("article").count() == 0
    assert talk.page.locator("#message").input_value() == "hello <b>you</b>"
    talk.page.get_by_label("Temperature").fill("1")
    talk.page.locator("#message").press("Enter")
    talk.answers()
    assert talk.page.get_by_role("alert").count() == 0
    assert [one["content"] for one in talk.asked[1]["messages"]] == ["hello <b>you</b>"]


CHUNK = 'data: {"choices": [{"index": 0, "delta": {"content": "half "}}]}\n\n'


@pytest.mark.parametrize(
    ("after", "said"),
    [
        ('data: {"error": {"message": "the engine <b>failed</b>"}}\n\n', "the engine <b>failed</b>"),
        ("", "The connection ended before the answer was complete. Try again."),
    ],
)
def test_an_answer_that_fails_half_way_is_kept_as_far_as_it_came(talk: Any, model: Any, after: str, said: str) -> None:
    def fail(route: Any) -> None:
        route.fulfill(body=CHUNK + after, headers={"content-type": "text/event-stream"})

    talk.page.route("**/v1/chat/completions", fail)
    talk.write("hello")
    assert talk.answers().locator(".prose").inner_text().strip() == "half"
    assert talk.error() == said
    talk.page.unroute("**/v1/chat/completions")
    model.says("whole")
    talk.write("go on")
    assert "whole" in talk.answers(2).inner_text()
    assert talk.asked[1]["messages"][1] == {"role": "assistant", "content": "half "}


def test_a_server_that_is_gone_is_an_error(talk: Any, model: Any) -> None:
    talk.page.route("**/v1/chat/completions", lambda route: route.abort())
    talk.write("hello")
    assert talk.error() == "The connection to the server failed. Is it running?"
    talk.problems = [one for one in talk.problems if "ERR_FAILED" not in one]


EVIL = (
    "<script>document.title = 'evil'</script><img src=x onerror=\"document.title='evil'\"><b>bold</b> "
    "[a](javascript:document.title='evil')\n\n```<img src=x>\n<script>document.title = 'evil'</script>\n```\n"
)


def test_nothing_that_a_model_writes_becomes_markup(talk: Any, model: Any) -> None:
    name = "weather"
    call = f'<tool_call>\n{{"name": "{name}", "arguments": {{"<img src=x onerror=1>": "<b>x</b>"}}}}\n</tool_call>'
    model.says(f"<think>{EVIL}</think>{EVIL}{call}", json.dumps({"a": EVIL}))
    talk.page.get_by_label("Functions, as JSON").fill(json.dumps([WEATHER]))
    talk.write(EVIL)
    answer = talk.answers()
    answer.locator("summary").click()
    assert "<script>document.title = 'evil'</script><img src=x" in answer.locator(".prose").inner_text()
    assert '"<b>x</b>"' in answer.locator(".call pre").inner_text()
    talk.page.get_by_role("button", name="New conversation").click()
    talk.page.get_by_label("Functions, as JSON").fill("")
    talk.page.get_by_label("Format").select_option("json_object")
    talk.write(EVIL)
    assert "<script>" in talk.answers().locator("pre.json").inner_text()
    log = talk.page.locator("#log")
    for tag in ("script", "img", "b", "a", "iframe", "object"):
        assert log.locator(tag).count() == 0, tag
    assert talk.page.title() == "tiny"


def test_the_key_is_asked_for_and_forgotten_with_the_tab(
    new_talk: Callable[..., Any], serve_fake: Callable[..., AbstractContextManager[Any]]
) -> None:
    with serve_fake(api_key=("secret",)) as server:
        talk = new_talk()
        talk.page.goto(server.url)
        assert "the API key is missing or wrong" in talk.error()
        assert talk.focused() == "key"
        talk.page.keyboard.type("wröng→")
        talk.page.keyboard.press("Tab")
        talk.page.get_by_text("characters that no header can have").wait_for()
        talk.page.get_by_label("API key").focus()
        talk.page.keyboard.press("Control+a")
        talk.page.keyboard.type("secret")
        talk.page.keyboard.press("Tab")
        talk.page.get_by_text("context of 256 tokens").wait_for()
        assert talk.page.get_by_role("alert").count() == 0
        talk.open(server.url)
        assert talk.page.get_by_label("API key").input_value() == "secret"
        talk.write("say yes")
        assert "yes" in talk.answers().inner_text()
        assert talk.page.evaluate("[localStorage.length, document.cookie]") == [0, ""]
        assert talk.page.evaluate("Object.keys(sessionStorage)") == ["engine.key"]
        other = talk.page.context.new_page()
        other.goto(server.url)
        assert other.get_by_label("API key").input_value() == ""


def test_a_narrow_window_shows_one_thing_at_a_time(new_talk: Callable[..., Any], model: Any) -> None:
    talk = new_talk(viewport={"width": 360, "height": 640})
    talk.open(model.url)
    model.says("word " * 60 + "\n```\n" + "x" * 300 + "\n```\n" + "y" * 300)
    talk.write("z" * 300)
    talk.answers()
    wide = "[document.scrollingElement, document.getElementById('log')].map((one) => one.scrollWidth - one.clientWidth)"
    assert talk.page.evaluate(wide) == [0, 0], "nothing is wider than the window"
    assert not talk.page.locator("#settings").is_visible()
    talk.page.get_by_role("button", name="Settings").click()
    assert talk.page.locator("#settings").is_visible()
    assert not talk.page.locator("#message").is_visible()
    talk.page.keyboard.press("Escape")
    assert talk.page.locator("#message").is_visible()
    assert talk.focused() == "settings-button"

    talk.page.get_by_role("button", name="Settings").click()
    talk.page.get_by_label("Seed").fill("1.5")
    talk.page.keyboard.press("Escape")
    talk.write("hello")
    assert "Seed must be a whole number" in talk.error()
    assert talk.focused() == "seed"


def test_the_page_is_light_or_dark_as_the_reader_prefers(new_talk: Callable[..., Any], model: Any) -> None:
    found = []
    for scheme in ("light", "dark"):
        talk = new_talk(color_scheme=scheme)
        talk.open(model.url)
        paper, ink = (
            talk.page.evaluate(f"getComputedStyle(document.body).{name}.match(/[0-9]+/g).reduce((a, b) => a + +b, 0)")
            for name in ("backgroundColor", "color")
        )
        found.append(paper > ink)
    assert found == [True, False]
