"""Command-line coding agents: each reads a file by one tool and writes another by a second, without an account."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from node_clients import command
from servers import KEY, Scripts, Server, call, thought

CLIENT, PACKAGE = "coding agents", ""

TASK = "Read notes.txt and write the number that it has, as a word, into answer.txt."


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """The directory in which an agent works."""
    made = tmp_path / "place"
    made.mkdir()
    (made / "notes.txt").write_text("the number is 42\n")
    return made


def run(arguments: list[Any], place: Path, **variables: str) -> list[Any]:
    """Run an agent in `place`, with a home of its own; the lines of JSON that it prints."""
    home = str(place.parent / "home")
    inherited = {name: value for name, value in os.environ.items() if name in ("PATH", "LANG", "TERM")}
    names = ("HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME")
    environment = inherited | dict.fromkeys(names, home) | variables
    Path(home).mkdir()
    done = subprocess.run(
        [str(one) for one in arguments],
        cwd=place,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.client("opencode", "npm:opencode-ai")
@pytest.mark.shows("streamed", "tools", "usage")
def test_opencode(scripted: Server, script: Scripts, place: Path) -> None:
    word = script(
        "I look.\n" + call("read", filePath=str(place / "notes.txt")),
        call("write", filePath=str(place / "answer.txt"), content="forty-two\n"),
        "It is written.",
    )
    settings = {
        "autoupdate": False,
        "share": "disabled",
        "provider": {
            "local": {
                "npm": "@ai-sdk/openai-compatible",
                "options": {"baseURL": scripted.v1, "apiKey": KEY},
                "models": {"scripted": {"tool_call": True, "limit": {"context": 131_072, "output": 4096}}},
            }
        },
        "model": "local/scripted",
        "small_model": "local/scripted",
    }
    (place / "opencode.json").write_text(json.dumps(settings))
    lines = run(
        [command("opencode"), "run", "--format", "json", f"{TASK} ({word})"],
        place,
        OPENCODE_DISABLE_AUTOUPDATE="1",
        OPENCODE_DISABLE_MODELS_FETCH="1",
        OPENCODE_DISABLE_DEFAULT_PLUGINS="1",
    )
    assert (place / "answer.txt").read_text() == "forty-two\n"
    assert [line["part"]["text"] for line in lines if line["type"] == "text"] == ["I look.", "It is written."]
    finished = [line["part"] for line in lines if line["type"] == "step_finish"]
    assert [part["reason"] for part in finished] == ["tool-calls", "tool-calls", "stop"]
    assert finished[-1]["tokens"]["cache"]["read"] > 0


@pytest.mark.client("qwen-code", "npm:@qwen-code/qwen-code")
@pytest.mark.shows("streamed", "tools", "usage")
def test_qwen_code(scripted: Server, script: Scripts, place: Path) -> None:
    word = script(
        "I look.\n" + call("read_file", file_path=str(place / "notes.txt")),
        call("write_file", file_path=str(place / "answer.txt"), content="forty-two\n"),
        "It is written.",
    )
    options = ["--auth-type", "openai", "--approval-mode", "yolo", "--output-format", "json", "--chat-recording=false"]
    (events,) = run(
        [command("qwen"), *options, f"{TASK} ({word})"],
        place,
        OPENAI_API_KEY=KEY,
        OPENAI_BASE_URL=scripted.v1,
        OPENAI_MODEL="scripted",
    )
    assert (place / "answer.txt").read_text() == "forty-two\n"
    last = events[-1]
    assert (last["subtype"], last["result"], last["num_turns"]) == ("success", "It is written.", 3)
    assert last["stats"]["tools"]["totalSuccess"] == 2
    assert last["usage"]["cache_read_input_tokens"] > 0


@pytest.mark.client("Codex", "npm:@openai/codex")
@pytest.mark.shows("responses", "streamed", "tools", "reasoning", "usage")
def test_codex(scripted: Server, script: Scripts, place: Path) -> None:
    word = script(
        thought("Let me look.") + "I look.\n" + call("exec_command", cmd="cat notes.txt"),
        call("get_goal"),
        call("exec_command", cmd="echo forty-two > answer.txt"),
        "It is written.",
    )
    provider = {"name": "local", "base_url": scripted.v1, "wire_api": "responses", "env_key": "LOCAL_KEY"}
    settings = ",".join(f"{key}={json.dumps(value)}" for key, value in provider.items())
    options = ["--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "--model", "scripted"]
    options += ["--config", "model_provider=local", "--config", f"model_providers.local={{{settings}}}"]
    lines = run([command("codex"), "exec", *options, f"{TASK} ({word})"], place, LOCAL_KEY=KEY)
    assert (place / "answer.txt").read_text() == "forty-two\n"
    items = [line["item"] for line in lines if line["type"] == "item.completed"]
    assert [item["text"] for item in items if item["type"] == "agent_message"] == ["I look.", "It is written."]
    assert [item["exit_code"] for item in items if item["type"] == "command_execution"] == [0, 0]
    assert lines[-1]["usage"]["cached_input_tokens"] > 0
