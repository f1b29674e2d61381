from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.cli.config import to_toml
from engine.core.config.load import flatten, load_config
from engine.core.config.tree import EngineConfig


def test_every_setting_is_shown_with_value_and_origin(run: Any) -> None:
    result = run("config", "show", "--max-running", "7")
    lines = [line.split() for line in result.stdout.splitlines()]
    assert ["scheduler.max_running", "7", "--max-running"] in lines
    assert ["cache.prefix_caching", "true", "default"] in lines
    assert {line[0] for line in lines if len(line) > 2} >= set(flatten(EngineConfig()))


def test_json_has_the_value_and_origin_of_every_setting(run: Any) -> None:
    shown = json.loads(run("config", "show", "--json", "--set", "server.max_n=3").stdout)
    assert shown["server.max_n"] == {"value": 3, "origin": "--set"}
    assert set(shown) == set(flatten(EngineConfig()))


def test_the_printed_toml_gives_the_same_settings(run: Any, tmp_path: Path) -> None:
    arguments = (
        *("--model", str(tmp_path / "a b"), "--attention-option", "tile=64", "--attention-option", "nested.on=true"),
        *(
            "--served-model-name",
            'a"b\\c',
            "--memory-fraction",
            "0.25",
            "--set",
            "plugins.deny=",
            "--no-prefix-caching",
        ),
    )
    file = tmp_path / "resolved.toml"
    file.write_text(run("config", "show", "--toml", *arguments).stdout)
    first = json.loads(run("config", "show", "--json", *arguments).stdout)
    second = json.loads(run("config", "show", "--json", "--config", str(file)).stdout)
    assert {key: one["value"] for key, one in second.items()} == {key: one["value"] for key, one in first.items()}
    assert {one["origin"] for one in second.values()} == {"resolved.toml"}


def test_two_backends_and_their_options_can_be_fed_back(run: Any, tmp_path: Path) -> None:
    arguments = ("--attention", "one,two", "--attention-option", "decode.tile=64", "--attention-option", "prefill.x=a")
    file = tmp_path / "resolved.toml"
    file.write_text(run("config", "show", "--toml", *arguments).stdout)
    shown = json.loads(run("config", "show", "--json", "--config", str(file)).stdout)
    assert shown["attention.name"]["value"] == "one,two"
    assert shown["attention.options.decode.tile"]["value"] == 64
    assert shown["attention.options.prefill.x"]["value"] == "a"


def test_toml_makes_paths_absolute(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    file = tmp_path / "elsewhere" / "resolved.toml"
    file.write_text(run("config", "show", "--toml", "--model", "mine").stdout)
    assert load_config(file).config.model.path == str(tmp_path / "mine")


def test_toml_names_the_directory_from_which_a_path_starts_above_each_option_of_a_plugin_that_is_text(
    run: Any, tmp_path: Path
) -> None:
    file = tmp_path / "engine.toml"
    file.write_text('[attention.options]\ncache = "a/b"\nfiles = ["c"]\ntile = 64\n')
    shown = run("config", "show", "--toml", "--config", str(file)).stdout
    lines = shown[shown.index("[attention]") :].split("\n\n")[0].splitlines()
    start = f'# a relative path in it starts from "{tmp_path}"'
    options = lines[lines.index(start) :]
    assert options == [start, 'options.cache = "a/b"', start, 'options.files = ["c"]', "options.tile = 64"]


@pytest.mark.parametrize("value", ["tab\there", "line\nbreak", "del\x7f", 'quote"back\\slash', "ü😀", ""])
def test_any_string_survives_toml(tmp_path: Path, value: str) -> None:
    file = tmp_path / "strings.toml"
    config = load_config(
        overrides={"attention.options": {"text": value, "list": [value], "table": {"a.b": 1.5}}}
    ).config
    file.write_text(to_toml(config), encoding="utf-8")
    assert load_config(file).config == config


@pytest.mark.parametrize("form", [(), ("--json",), ("--toml",)])
def test_a_key_is_not_shown(run: Any, form: Any) -> None:
    shown = run("config", "show", *form, "--api-key", "hush-hush").stdout
    assert "hush" not in shown
    assert "(set, not shown)" in shown
    assert "(set" not in run("config", "show", *form).stdout


def test_toml_with_a_key_left_out_is_a_file_that_can_be_read(run: Any, tmp_path: Path) -> None:
    file = tmp_path / "resolved.toml"
    file.write_text(run("config", "show", "--toml", "--api-key", "hush-hush").stdout)
    assert load_config(file).config.server.api_key == ()


def test_json_and_toml_exclude_each_other(run: Any) -> None:
    result = run("config", "show", "--json", "--toml")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[scheduler]\nmax_runing = 3\n", ("broken.toml", "max_running")),
        ("[schedulr]\nmax_running = 3\n", ("broken.toml", "schedulr", "scheduler")),
        ('[scheduler]\nmax_running = "three"\n', ("broken.toml", "max_running", "three")),
        ("[scheduler\n", ("broken.toml", "TOML")),
    ],
)
def test_errors_in_a_file_name_file_key_and_fix(run: Any, tmp_path: Path, text: str, words: Any) -> None:
    file = Path(tmp_path / "broken.toml")
    file.write_text(text)
    result = run("config", "show", "--config", str(file))
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ")
    assert "Traceback" not in result.stderr
    for word in words:
        assert word in result.stderr


def test_keys_come_from_the_environment_unless_an_option_gives_them(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINE_API_KEY", "hush-hush, hush")
    monkeypatch.setenv("ENGINE_ADMIN_API_KEY", "quiet")
    settings = json.loads(run("config", "show", "--json").stdout)
    assert settings["server.api_key"] == {"value": "(set, not shown)", "origin": "ENGINE_API_KEY"}
    assert settings["server.admin_api_key"] == {"value": "(set, not shown)", "origin": "ENGINE_ADMIN_API_KEY"}
    shown = json.loads(run("config", "show", "--json", "--api-key", "a").stdout)["server.api_key"]
    assert shown == {"value": "(set, not shown)", "origin": "--api-key"}


def test_a_key_of_the_wrong_type_is_not_shown(run: Any, tmp_path: Path) -> None:
    file = tmp_path / "engine.toml"
    file.write_text("[server]\napi_key = 123454321\n")
    result = run("config", "show", "--config", str(file))
    assert result.exit_code != 0
    assert "api_key" in result.output
    assert "123454321" not in result.output
