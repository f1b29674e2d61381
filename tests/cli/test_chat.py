from __future__ import annotations

import builtins
import io
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from engine.cli.chat import converse, piped_lines, prompted_lines
from engine.core.errors import InvalidRequestError
from engine.core.types import SamplingParams


class Parrot:
    """An engine that answers with the last message, and notes what it was sent."""

    def __init__(self, fail_on: str | None = None, interrupt: bool = False) -> None:
        self.tokenizer = SimpleNamespace(chat=lambda messages: [dict(one) for one in messages])
        self.sent: list[list[dict[str, str]]] = []
        self.fail_on, self.interrupt = fail_on, interrupt

    def stream(self, messages: Any, params: SamplingParams) -> Iterator[Any]:
        self.sent.append(messages)
        text = messages[-1]["content"]
        if text == self.fail_on:
            raise InvalidRequestError("too long")
        for word in text.split():
            yield SimpleNamespace(text=f"<{word}>")
            if self.interrupt:
                raise KeyboardInterrupt


def said(*pairs: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in pairs]


def test_the_conversation_is_remembered(capsys: pytest.CaptureFixture[str]) -> None:
    engine = Parrot()
    converse(engine, SamplingParams(), iter(["one two\n", "\n", "three\n"]), "be brief")
    assert capsys.readouterr().out == "<one><two>\n<three>\n"
    assert engine.sent[1] == said(
        ("system", "be brief"), ("user", "one two"), ("assistant", "<one><two>"), ("user", "three")
    )


def test_reset_forgets_all_but_the_system_message() -> None:
    engine = Parrot()
    converse(engine, SamplingParams(), iter(["one", "/reset", "two"]), "be brief")
    assert engine.sent[1] == said(("system", "be brief"), ("user", "two"))


def test_exit_ends_the_conversation() -> None:
    engine = Parrot()
    converse(engine, SamplingParams(), iter(["/exit", "one"]))
    assert engine.sent == []


def test_an_unknown_command_is_not_sent(capsys: pytest.CaptureFixture[str]) -> None:
    engine = Parrot()
    converse(engine, SamplingParams(), iter(["/rest now"]))
    assert engine.sent == []
    assert "/rest is no command" in capsys.readouterr().err


def test_a_message_that_fails_is_dropped_when_forgiving(capsys: pytest.CaptureFixture[str]) -> None:
    engine = Parrot(fail_on="long")
    converse(engine, SamplingParams(), iter(["long", "short"]), forgiving=True)
    assert engine.sent[1] == said(("user", "short"))
    assert capsys.readouterr().err == "error: too long (/reset starts a new conversation)\n"


def test_a_message_that_fails_ends_a_piped_conversation() -> None:
    with pytest.raises(InvalidRequestError):
        converse(Parrot(fail_on="long"), SamplingParams(), iter(["long", "short"]))


def test_an_interrupted_answer_is_kept_as_far_as_it_came(capsys: pytest.CaptureFixture[str]) -> None:
    engine = Parrot(interrupt=True)
    converse(engine, SamplingParams(), iter(["one two", "three"]))
    assert engine.sent[1][1] == {"role": "assistant", "content": "<one>"}
    assert "(stopped)" in capsys.readouterr().out


def test_typed_lines_end_with_ctrl_d(monkeypatch: pytest.MonkeyPatch) -> None:
    typed = iter(["one", KeyboardInterrupt(), "two", EOFError()])

    def type_line(prompt: str) -> str:
        value = next(typed)
        if isinstance(value, BaseException):
            raise value
        return value

    monkeypatch.setattr(builtins, "input", type_line)
    assert list(prompted_lines()) == ["one", "two"]


def test_piped_lines_are_answered_one_by_one(run: Any, engine_checkpoint: Any) -> None:
    arguments = ("--kv-memory", "4MiB", "--max-tokens", "3", "--temperature", "0", "--system", "hi")
    result = run("chat", "--model", str(engine_checkpoint), *arguments, input="a\n/reset\na\n/exit\nb\n")
    assert (result.exit_code, result.stderr) == (0, "")
    half = result.stdout[: len(result.stdout) // 2]
    assert half
    assert result.stdout == half + half, "after /reset the same message has the same answer"


def test_what_chat_cannot_show_is_no_option(run: Any) -> None:
    assert run("chat", "--logprobs", "1").exit_code == 2


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_piped_lines_are_utf8_whatever_the_locale(monkeypatch: pytest.MonkeyPatch, errors: str) -> None:
    stdin = io.TextIOWrapper(io.BytesIO("é\n".encode() + b"\xff\n"), encoding="ascii", errors=errors)
    monkeypatch.setattr(sys, "stdin", stdin)
    lines = piped_lines()
    assert next(lines) == "é\n"
    with pytest.raises(InvalidRequestError, match="not UTF-8"):
        next(lines)
