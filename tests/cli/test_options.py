from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from engine.cli.options import (
    DEMO_MODEL,
    OFFLINE,
    SECTIONS,
    configured,
    given_settings,
    purpose,
    refuse_settings,
    sampled,
)
from engine.core.config import Resolved, describe, flatten
from engine.core.errors import ConfigError, InvalidRequestError
from engine.core.types import SamplingParams


def resolve(*arguments: str, without: tuple[str, ...] = ()) -> Resolved:
    """What a command gets for these arguments; raises what it would raise."""
    found: list[Resolved] = []
    app = typer.Typer()

    @app.command()
    @configured(without=without)
    def command(resolved: Resolved) -> None:
        found.append(resolved)

    result = CliRunner().invoke(app, arguments)
    if result.exception is not None:
        raise result.exception
    return found[0]


def sample(*arguments: str) -> SamplingParams:
    found: list[SamplingParams] = []
    app = typer.Typer()

    @app.command()
    @sampled()
    def command(sampling: dict[str, object]) -> None:
        found.append(SamplingParams(**sampling))

    result = CliRunner().invoke(app, arguments)
    if result.exception is not None:
        raise result.exception
    return found[0]


def flags_of(command: object) -> set[str]:
    app = typer.Typer()
    app.command()(command)
    params = typer.main.get_command(app).params
    return {flag for param in params if param.param_type_name == "option" for flag in param.opts}


def test_each_setting_with_a_flag_is_an_option() -> None:
    @configured()
    def command(resolved: Resolved) -> None: ...

    assert flags_of(command) - {"--help", "--install-completion", "--show-completion"} == {
        "--config",
        "--set",
        *(flag for setting in describe() if setting.flag for flag in (setting.flag, *setting.alias_flags)),
    }


@pytest.mark.parametrize(("without", "gone"), [(OFFLINE, "--port"), (SECTIONS, "--model")])
def test_sections_can_be_left_out(without: Any, gone: str) -> None:
    @configured(without=without)
    def command(resolved: Resolved) -> None: ...

    assert gone not in flags_of(command)
    assert {"--config", "--set"} <= flags_of(command)


def test_only_what_was_given_overrides_and_its_origin_is_the_flag() -> None:
    plain = resolve()
    given = resolve("--max-running", "7", "--no-prefix-caching", "--memory-fraction", "0.5", "--dtype", "float16")
    assert given.config.scheduler.max_running == 7
    assert given.config.cache.prefix_caching is False
    assert given.config.cache.memory_fraction == 0.5
    assert given.config.model.dtype == "float16"
    changed = {key: origin for key, origin in given.origins.items() if plain.origins[key] != origin}
    assert changed == {
        "scheduler.max_running": "--max-running",
        "cache.prefix_caching": "--prefix-caching",
        "cache.memory_fraction": "--memory-fraction",
        "model.dtype": "--dtype",
    }


def test_the_model_is_the_demo_unless_named() -> None:
    assert resolve().origins["model.path"] == DEMO_MODEL
    named = resolve("--model", "somewhere")
    assert (named.config.model.path, named.origins["model.path"]) == (str(Path("somewhere").absolute()), "--model")


def test_model_is_the_first_argument_or_an_option_and_may_be_both() -> None:
    for arguments in (("org/name",), ("org/name", "--model", "org/name"), ("--set", "model.path=org/name", "org/name")):
        named = resolve(*arguments)
        assert (named.config.model.path, named.origins["model.path"]) == ("org/name", "MODEL")
    with pytest.raises(ConfigError, match=r"MODEL \(a\) and --model \(b\) name two models; give one of them"):
        resolve("a", "--model", "b")


@pytest.mark.parametrize(
    ("arguments", "origin"), [([""], "MODEL"), (["--model", ""], "--model"), (["--set", "model.path="], "--set")]
)
def test_an_empty_name_of_a_model_is_refused(arguments: Any, origin: str) -> None:
    with pytest.raises(
        ConfigError, match=f"{origin} is empty; give a directory or a name on the hub .*, or leave it out"
    ):
        resolve(*arguments)


def test_a_name_on_the_hub_in_a_file_of_settings_is_no_path(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('[model]\npath = "org/name"\ntokenizer = "other/name"\ndownload_dir = "models"\n')
    model = resolve("--config", str(file)).config.model
    assert (model.path, model.tokenizer) == ("org/name", "other/name")
    assert model.download_dir == str(tmp_path / "models")
    (tmp_path / "org/name").mkdir(parents=True)
    assert resolve("--config", str(file)).config.model.path == str(tmp_path / "org/name"), "a path that exists wins"


def test_options_beat_the_file_and_the_file_beats_defaults(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("[scheduler]\nmax_running = 3\nmax_batch_tokens = 64\n")
    resolved = resolve("--config", str(file), "--max-running", "4")
    assert (resolved.config.scheduler.max_running, resolved.config.scheduler.max_batch_tokens) == (4, 64)
    assert resolved.origins["scheduler.max_batch_tokens"] == "mine.toml"
    assert resolved.origins["scheduler.max_running"] == "--max-running"


def test_set_reaches_settings_without_an_option() -> None:
    resolved = resolve("--set", "server.max_n=3", "--set", "cache.prefix_caching=off")
    assert resolved.config.server.max_n == 3
    assert resolved.config.cache.prefix_caching is False
    assert resolved.origins["server.max_n"] == "--set"


@pytest.mark.parametrize(
    ("flag", "value", "key", "found"),
    [
        ("--max-model-len", "64", "model.max_len", 64),
        ("--max-num-seqs", "8", "scheduler.max_running", 8),
        ("--max-num-batched-tokens", "512", "scheduler.max_batch_tokens", 512),
        ("--tensor-parallel-size", "2", "executor.tensor_parallel", 2),
        ("--page-size", "32", "cache.block_size", 32),
        ("--gpu-memory-utilization", "0.8", "cache.memory_fraction", 0.8),
        ("--kv-cache-dtype", "fp8", "cache.dtype", "fp8"),
        ("--no-enable-prefix-caching", None, "cache.prefix_caching", False),
        ("--quantization", "awq", "quant.name", "awq"),
        ("--attention-backend", "torch", "attention.name", "torch"),
    ],
)
def test_options_of_other_engines_are_understood(flag: str, value: str | None, key: str, found: Any) -> None:
    resolved = resolve(flag, *([value] if value else []))
    assert flatten(resolved.config)[key] == found
    assert resolved.origins[key] == flag.replace("--no-", "--")


def test_set_takes_aliases_and_names_of_options() -> None:
    resolved = resolve("--set", "scheduler.max_num_seqs=3", "--set", "max_model_len=64", "--set", "dtype=float16")
    assert (resolved.config.scheduler.max_running, resolved.config.model.max_len) == (3, 64)
    assert resolved.config.model.dtype == "float16"


def test_one_file_is_read(tmp_path: Path) -> None:
    files = [tmp_path / "one.toml", tmp_path / "two.toml"]
    with pytest.raises(ConfigError, match=r"--config is given twice, as .*one.toml and as .*two.toml; .*one file"):
        resolve("--config", str(files[0]), "--config", str(files[1]))


def test_plugin_options_are_collected() -> None:
    resolved = resolve("--attention-option", "tile=64", "--attention-option", "name=a=b")
    assert resolved.config.attention.options == {"tile": 64, "name": "a=b"}
    listed = resolve("--attention-option", "sizes=[16, 32]", "--attention-option", "names=[a,b]")
    assert listed.config.attention.options == {"sizes": [16, 32], "names": ["a", "b"]}
    assert resolved.origins["attention.options.tile"] == "--attention-option"


@pytest.mark.parametrize(
    "arguments",
    [
        ("--max-running", "4", "--set", "scheduler.max_running=5"),
        ("--attention-option", "tile=1", "--attention-option", "tile=2"),
        ("--set", "server.max_n=1", "--set", "server.max_n=2"),
        ("--max-running", "4", "--max-num-seqs", "5"),
        ("--max-num-seqs", "4", "--set", "scheduler.max_running=5"),
        ("--max-running", "4", "--set", "scheduler.max_num_seqs=5"),
        ("--set", "max_num_seqs=4", "--set", "scheduler.max_running=5"),
    ],
)
def test_a_setting_given_twice_is_refused(arguments: Any) -> None:
    with pytest.raises(ConfigError, match="given twice"):
        resolve(*arguments)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--max-running", "many"), ("--max-running", "many")),
        (("--max-running", "-1"), ("--max-running", "-1")),
        (("--dtype", "float61"), ("--dtype", "float61", "float16")),
        (("--set", "scheduler.max_runing=4"), ("--set", "max_running")),
        (("--set", "scheduler"), ("--set", "KEY=VALUE")),
        (("--attention-option", "tile"), ("--attention-option", "KEY=VALUE")),
        (("--config", "nowhere.toml"), ("nowhere.toml",)),
    ],
)
def test_errors_name_the_option_and_what_would_work(arguments: Any, words: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(*arguments)
    for word in words:
        assert word in str(caught.value)


def test_every_section_says_what_it_is_for() -> None:
    assert all(purpose(section) for section in SECTIONS)


def test_each_sampling_field_is_an_option_with_help() -> None:
    @sampled(without=("seed",))
    def command(sampling: dict[str, object]) -> None: ...

    app = typer.Typer()
    app.command()(command)
    options = {param.name: param for param in typer.main.get_command(app).params}
    for name in SamplingParams.__attrs_attrs__:
        if name.name not in ("seed", "grammar"):
            assert options[name.name].help, name.name
    assert not {"seed", "grammar"} & set(options)


def test_the_option_grammar_is_that_of_the_setting() -> None:
    @configured()
    @sampled()
    def command(resolved: Resolved, sampling: dict[str, object]) -> None:
        typer.echo(f"{resolved.config.grammar.name} {sampling}")

    app = typer.Typer()
    app.command()(command)
    result = CliRunner().invoke(app, ["--grammar", "xgrammar"])
    assert result.stdout == "xgrammar {}\n"


def test_no_sampling_option_leaves_the_defaults_alone() -> None:
    assert sample() == SamplingParams()


def test_sampling_options_have_the_types_of_the_fields() -> None:
    params = sample(
        *("--max-tokens", "5", "--temperature", "0", "--top-p", "0.5", "--seed", "7", "--ignore-eos"),
        *("--no-skip-special-tokens", "--stop", "a", "--stop", "b", "--stop-token-ids", "3", "--logprobs", "0"),
        *("--logit-bias", "5=-1.5", "--logit-bias", "6=2"),
    )
    assert params == SamplingParams(
        max_tokens=5,
        temperature=0.0,
        top_p=0.5,
        seed=7,
        ignore_eos=True,
        skip_special_tokens=False,
        stop=("a", "b"),
        stop_token_ids=(3,),
        logprobs=0,
        logit_bias=((5, -1.5), (6, 2.0)),
    )


def test_a_sampling_value_out_of_range_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="temperature"):
        sample("--temperature", "-1")


def test_a_bias_that_is_no_number_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="--logit-bias 'a=b'"):
        sample("--logit-bias", "a=b")


def test_an_options_decorator_keeps_the_commands_own_parameters() -> None:
    app = typer.Typer()

    @app.command()
    @configured(without=SECTIONS)
    @sampled()
    def command(resolved: Resolved, sampling: dict[str, object], word: str, count: int = 1) -> None:
        """Say it."""
        typer.echo(json.dumps([word, count, sampling, resolved.config.server.max_n]))

    result = CliRunner().invoke(app, ["hello", "--count", "2", "--seed", "3", "--set", "server.max_n=9"])
    assert json.loads(result.stdout) == ["hello", 2, {"seed": 3}, 9]
    assert "Say it." in CliRunner().invoke(app, ["--help"]).stdout


def test_settings_from_variables_are_not_refused_where_a_server_runs_already(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINE_ADMIN_API_KEY", "secret")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "ours")
    refuse_settings(resolve())
    found = resolve("--threads", "1")
    assert given_settings(found) == {"executor.threads": "--threads"}
    with pytest.raises(ConfigError, match=r"executor\.threads \(by --threads\) is a setting of the server"):
        refuse_settings(found)
    refuse_settings(found, but=("executor.threads",))
