from __future__ import annotations

import builtins
import io
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from engine.cli.chat import converse, offline, piped_lines, prompted_lines
from engine.cli.chat_client import CONTENT, ChatClient, Piece
from engine.core.errors import InvalidRequestError
from engine.core.types import SamplingParams
from tests.cli.scripted_server import Answer, ScriptedServer, scripted_server

ENGINE = (sys.executable, "-P", "-c", "from engine.cli.main import main; main()")


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
    converse(offline(engine, SamplingParams()), iter(["one two\n", "\n", "three\n"]), "be brief")
    assert capsys.readouterr().out == "<one><two>\n<three>\n"
    assert engine.sent[1] == said(
        ("system", "be brief"), ("user", "one two"), ("assistant", "<one><two>"), ("user", "three")
    )


def test_reset_forgets_all_but_the_system_message() -> None:
    engine = Parrot()
    converse(offline(engine, SamplingParams()), iter(["one", "/reset", "two"]), "be brief")
    assert engine.sent[1] == said(("system", "be brief"), ("user", "two"))


def test_exit_ends_the_conversation() -> None:
    engine = Parrot()
    converse(offline(engine, SamplingParams()), iter(["/exit", "one"]))
    assert engine.sent == []


def test_an_unknown_command_is_not_sent(capsys: pytest.CaptureFixture[str]) -> None:
    engine = Parrot()
    converse(offline(engine, SamplingParams()), iter(["/rest now"]))
    assert engine.sent == []
    assert "/rest is no command" in capsys.readouterr().err


def test_a_message_that_fails_is_dropped_when_forgiving(capsys: pytest.CaptureFixture[str]) -> None:
    engine = Parrot(fail_on="long")
    converse(offline(engine, SamplingParams()), iter(["long", "short"]), forgiving=True)
    assert engine.sent[1] == said(("user", "short"))
    assert capsys.readouterr().err == "error: too long (/reset starts a new conversation)\n"


def test_a_message_that_fails_ends_a_piped_conversation() -> None:
    with pytest.raises(InvalidRequestError):
        converse(offline(Parrot(fail_on="long"), SamplingParams()), iter(["long", "short"]))


def test_an_interrupted_answer_is_kept_as_far_as_it_came(capsys: pytest.CaptureFixture[str]) -> None:
    engine = Parrot(interrupt=True)
    converse(offline(engine, SamplingParams()), iter(["one two", "three"]))
    assert engine.sent[1][1] == {"role": "assistant", "content": "<one>"}
    assert "(stopped)" in capsys.readouterr().out


@pytest.mark.parametrize("terminal", [True, False])
def test_an_answer_commands_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], terminal: bool
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    text = "a\tb\r\n\x1b]0;title\x07\x9b2J"
    converse(lambda messages: (Piece(CONTENT, one) for one in [text]), iter(["hi"]))
    assert capsys.readouterr().out == ("a\tb\n␛]0;title␇\ufffd2J\n" if terminal else f"{text}\n")


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


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedServer]:
    for name in ("ENGINE_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    with scripted_server() as server:
        yield server


def test_a_server_is_talked_to_as_an_engine_is(run: Any, scripted: ScriptedServer) -> None:
    scripted.answers = [Answer({"content": "one"}, {"content": " two"}), Answer({"content": "three"})]
    options = ("--system", "be brief", "--max-tokens", "3", "--stop", "x", "--logit-bias", "5=1.5", "--top-k", "2")
    result = run("chat", "--url", scripted.url, *options, input="a\nb\n/reset\n/exit\nc\n")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "one two\nthree\n", "")
    given = {"max_tokens": 3, "stop": ["x"], "logit_bias": {"5": 1.5}, "top_k": 2}
    messages = said(("system", "be brief"), ("user", "a"), ("assistant", "one two"), ("user", "b"))
    assert scripted.asked[1] == {"model": "parrot", "messages": messages, "stream": True, **given}


def test_reasoning_and_calls_are_shown_apart(run: Any, scripted: ScriptedServer) -> None:
    call = {"tool_calls": [{"index": 0, "id": "c", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}]}
    scripted.answers = [Answer({"reasoning": "hm"}, {"content": "Let me see."}, call), Answer({"content": "ok"})]
    result = run("chat", "--url", scripted.url, input="a\nb\n")
    assert result.stdout == 'Let me see.\nweather {"city": "Rome"}\nok\n'
    assert result.stderr == "hm\n"
    assert scripted.asked[1]["messages"][1]["content"] == 'Let me see.\nweather {"city": "Rome"}'


def test_the_model_may_be_named(run: Any, scripted: ScriptedServer) -> None:
    for arguments in (("b/c",), ("--model", "b/c")):
        scripted.answers = [Answer({"content": "one"})]
        assert run("chat", *arguments, "--url", scripted.url, input="a\n").exit_code == 0
        assert scripted.asked[-1]["model"] == "b/c"
    scripted.models = ("a", "b/c")
    result = run("chat", "--url", scripted.url, input="a\n")
    assert (result.exit_code, result.stderr) == (2, "error: the server has the models a, b/c; name one as MODEL\n")


def test_the_key_comes_from_the_option_or_the_environment(
    run: Any, scripted: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sent(*options: str) -> str | None:
        assert run("chat", "--url", scripted.url, *options, input="").exit_code == 0
        return scripted.keys[-1]

    assert sent() is None
    monkeypatch.setenv("OPENAI_API_KEY", "other")
    assert sent() == "Bearer other"
    monkeypatch.setenv("ENGINE_API_KEY", "first, second")
    assert sent() == "Bearer first"
    assert sent("--api-key", "given") == "Bearer given"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--threads", "1"), "executor.threads (by --threads)"),
        (("--set", "cache.block_size=16"), "cache.block_size (by --set)"),
    ],
)
def test_settings_of_the_server_are_refused(
    run: Any, scripted: ScriptedServer, options: tuple[str, ...], named: str
) -> None:
    result = run("chat", "--url", scripted.url, *options, input="a\n")
    sentence = f"error: {named} is a setting of the server, which runs already; leave it out\n"
    assert (result.exit_code, result.stderr) == (2, sentence)


def test_a_key_without_a_server_is_refused(run: Any) -> None:
    result = run("chat", "--api-key", "k", input="a\n")
    assert result.exit_code == 2
    assert "give the server by --url" in result.stderr


def test_what_a_server_says_is_wrong_is_one_sentence(run: Any, scripted: ScriptedServer) -> None:
    for status, code in ((400, 2), (503, 1)):
        scripted.answers = [Answer(status=status, body=b'{"error": {"message": "top_k is unknown"}}')]
        result = run("chat", "--url", scripted.url, input="a\nb\n")
        assert (result.exit_code, result.stdout) == (code, "")
        assert result.stderr == f"error: the server answered {status}: top_k is unknown\n"


def test_a_failure_of_the_server_ends_no_conversation_when_forgiving(
    scripted: ScriptedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    client = ChatClient(scripted.url)
    scripted.answers = [Answer({"content": "be"}, finish=None), Answer({"content": "there"})]
    converse(lambda messages: client.stream("parrot", messages), iter(["a", "b"]), forgiving=True)
    printed = capsys.readouterr()
    assert printed.out == "be\nthere\n"
    assert "error: the connection ended before the answer was complete" in printed.err
    assert scripted.asked[1]["messages"] == said(("user", "b"))


def test_ctrl_c_stops_the_answer_of_a_server(scripted: ScriptedServer) -> None:
    scripted.answers = [Answer(finish=None, forever=True), Answer({"content": "there"})]
    command = [*ENGINE, "chat", "--url", scripted.url]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"a\n")
        process.stdin.flush()
        assert process.stdout.read(5) == b"more "
        process.send_signal(signal.SIGINT)
        process.stdin.write(b"b\n")
        process.stdin.close()
        last = process.stdout.read().splitlines()
    assert process.returncode == 0
    assert scripted.left.wait(30)
    assert last[0].endswith(b" (stopped)")
    assert last[1:] == [b"there"]
    kept = scripted.asked[1]["messages"][1]["content"]
    assert kept.startswith("more ")
