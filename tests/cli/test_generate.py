from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.cli.generate import read_prompt
from engine.core.errors import InvalidRequestError

SMALL = ("--kv-memory", "4MiB", "--dtype", "float32", "--temperature", "0", "--ignore-eos", "--max-tokens", "12")


@pytest.fixture
def generate(run: Any, engine_checkpoint: Any) -> Any:
    """generate(*arguments, input=None) with the tiny checkpoint, 12 greedy tokens."""

    def call(*arguments: str, input: str | None = None) -> Any:  # noqa: A002
        return run("generate", "--model", str(engine_checkpoint), *SMALL, *arguments, input=input)

    return call


def test_json_is_one_line_with_text_tokens_reason_and_usage(generate: Any) -> None:
    result = generate("def f(", "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.count("\n") == 1
    done = json.loads(result.stdout)
    assert set(done) == {"text", "token_ids", "finish_reason", "usage"}
    assert len(done["token_ids"]) == 12
    assert done["finish_reason"] == "length"
    usage = done["usage"]
    assert usage["completion_tokens"] == 12
    assert usage["prompt_tokens"] > 0
    assert usage["total_tokens"] == usage["prompt_tokens"] + 12


def test_the_printed_text_is_that_of_the_json(generate: Any) -> None:
    text = json.loads(generate("def f(", "--json").stdout)["text"]
    assert generate("def f(").stdout == text + "\n"


def test_a_prompt_comes_from_argument_file_or_standard_input(generate: Any, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("def f(")
    expected = generate("def f(", "--json").stdout
    assert generate("--prompt-file", str(file), "--json").stdout == expected
    assert generate("-", "--json", input="def f(").stdout == expected
    assert generate("--json", input="def f(").stdout == expected
    assert generate("--json", input="def f(\n").stdout != expected, "the prompt is taken as it is"


def test_two_arguments_are_the_model_and_the_prompt(run: Any, generate: Any, engine_checkpoint: Any) -> None:
    both = run("generate", str(engine_checkpoint), "def f(", "--json", *SMALL)
    assert both.stdout == generate("def f(", "--json").stdout
    alone = run("generate", "Some/model", *SMALL)
    assert (alone.exit_code, alone.stdout) == (2, "")
    assert "it looks like a model; give both, with - for standard input: Some/model -" in alone.stderr


def test_logprobs_are_printed_when_asked_for(generate: Any) -> None:
    done = json.loads(generate("def f(", "--json", "--logprobs", "2").stdout)
    assert [one["token"] for one in done["logprobs"]] == done["token_ids"]
    assert all(len(one["top"]) == 2 for one in done["logprobs"])


def test_the_same_seed_gives_the_same_text(generate: Any) -> None:
    def sampled(seed: str) -> str:
        return generate("def f(", "--temperature", "1", "--seed", seed, "--json").stdout

    assert sampled("1") == sampled("1")
    assert sampled("1") != sampled("2")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("x", "--logprobs", "1"), ("--logprobs", "--json")),
        (("x", "--prompt-file", "y"), ("--prompt-file",)),
        (("--prompt-file", "nowhere.txt"), ("nowhere.txt",)),
        (("x", "--temperature", "-1"), ("temperature",)),
        (("x", "--min-tokens", "13"), ("min_tokens", "max_tokens")),
        (("x", "--model", "nowhere"), ("nowhere",)),
        (("x", "--attention", "toch"), ("toch", "did you mean torch")),
        (("x", "--scheduler-option", "tile=1"), ("tile",)),
        (("x", "--max-len", "100000"), ("--max-len", "100000")),
        (("x", "--logit-bias", "100000=1"), ("logit_bias",)),
        (("x" * 5000,), ("prompt",)),
    ],
    ids=lambda value: " ".join(value)[:30],
)
def test_bad_input_is_one_sentence_and_status_2(generate: Any, arguments: Any, words: Any) -> None:
    result = generate(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ")
    assert "Traceback" not in result.stderr
    for word in words:
        assert word in result.stderr


def test_a_sampling_value_of_the_wrong_type_is_refused(generate: Any) -> None:
    result = generate("x", "--temperature", "warm")
    assert result.exit_code == 2
    assert "--temperature" in result.stderr


def test_without_a_prompt_on_a_terminal_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdin", terminal)
    with pytest.raises(InvalidRequestError, match="--prompt-file"):
        read_prompt(None, None)


def test_a_prompt_that_is_no_text_is_refused(tmp_path: Path) -> None:
    file = Path(tmp_path / "binary")
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidRequestError, match="UTF-8"):
        read_prompt(None, file)


def test_the_script_prints_json_alone(engine_checkpoint: Any) -> None:
    program = "import sys; from engine.cli.main import main; sys.argv = ['engine', *sys.argv[1:]]; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, "generate", "-", "--model", str(engine_checkpoint), *SMALL, "--json"],
        input=b"def f(",
        capture_output=True,
        check=True,
    )
    assert len(json.loads(done.stdout)["token_ids"]) == 12


@pytest.mark.usefixtures("tidal")
def test_a_plugin_that_fails_is_named_in_one_line(generate: Any, run: Any, engine_checkpoint: Any) -> None:
    result = generate("x", "--attention", "tidal")
    assert result.exit_code == 2
    told = "error: attention 'tidal' of engine-tidal 0.4 failed in its constructor: KeyError: 'tide' ("
    assert result.stderr.startswith(told)
    assert result.stderr.count("\n") == 1
    model = ("--model", str(engine_checkpoint), "--kv-memory", "4MiB")
    whole = run("--debug", "generate", "x", *model, "--attention", "tidal").stderr
    assert told in whole
    assert 'raise KeyError("tide")' in whole
