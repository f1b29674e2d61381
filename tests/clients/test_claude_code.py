"""Claude Code: reads a file by one tool and writes another by a second, over Anthropic's protocol."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from node_clients import command
from servers import KEY, Scripts, Server, call, thought

CLIENT, PACKAGE = "Claude Code", "npm:@anthropic-ai/claude-code"


@pytest.mark.shows("messages", "streamed", "tools", "reasoning", "usage")
def test_a_loop_of_two_tools(scripted: Server, script: Scripts, tmp_path: Path) -> None:
    place, home = tmp_path / "place", tmp_path / "home"
    place.mkdir()
    home.mkdir()
    (place / "notes.txt").write_text("the number is 42\n")
    word = script(
        thought("Let me look.") + "I look.\n" + call("Read", file_path=str(place / "notes.txt")),
        call("Write", file_path=str(place / "answer.txt"), content="forty-two\n"),
        "It is written.",
    )
    task = f"Read notes.txt and write the number that it has, as a word, into answer.txt. ({word})"
    options = ["--model", "scripted", "--output-format", "stream-json", "--verbose", "--allowedTools", "Read,Write"]
    variables = {
        "HOME": str(home),
        "ANTHROPIC_BASE_URL": scripted.url,
        "ANTHROPIC_API_KEY": KEY,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": "scripted",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
    }
    done = subprocess.run(
        [str(command("claude")), "-p", task, *options],
        cwd=place,
        env={name: value for name, value in os.environ.items() if name in ("PATH", "LANG", "TERM")} | variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-3000:]
    assert (place / "answer.txt").read_text() == "forty-two\n"
    lines: list[Any] = [json.loads(line) for line in done.stdout.splitlines()]
    blocks = [block for line in lines if line["type"] == "assistant" for block in line["message"]["content"]]
    assert [block["type"] for block in blocks] == ["thinking", "text", "tool_use", "tool_use", "text"]
    assert lines[-1]["result"] == "It is written."
    assert lines[-1]["num_turns"] == 3
    assert lines[-1]["usage"]["cache_read_input_tokens"] > 0
