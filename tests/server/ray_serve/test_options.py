from __future__ import annotations

from pathlib import Path

import pytest

from engine.core.config import demo_model
from engine.core.errors import ConfigError
from engine.server.ray_serve.options import OF_RAY, Options, read_arguments


def test_arguments_are_settings_and_options_by_their_keys() -> None:
    config, options = read_arguments(
        {"model": "org/name", "model.max_len": "512", "serve.max_replicas": "4", "serve.upscale_delay": 5}
    )
    assert (config.model.path, config.model.max_len) == ("org/name", 512)
    assert options == Options(max_replicas=4, upscale_delay=5.0)


def test_the_demo_model_is_served_without_arguments() -> None:
    config, options = read_arguments({})
    assert config.model.path == demo_model()
    assert options == Options()


def test_a_file_of_settings_is_read(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text("[scheduler]\nmax_running = 7\n")
    config, _ = read_arguments({"config": str(file), "cache.block_size": "32"})
    assert (config.scheduler.max_running, config.cache.block_size) == (7, 32)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"server.port": "9000"}, "server.port has no effect under Ray Serve: give http_options to Ray Serve"),
        ({"server.replicas": "2"}, r"use serve\.min_replicas and serve\.max_replicas"),
        (
            {"server.otlp_endpoint": "http://localhost:4318"},
            "otlp_endpoint has no effect under Ray Serve: requests are",
        ),
        ({"server.trace_sample": "0.5"}, "trace_sample has no effect under Ray Serve: requests are not traced"),
        ({"serve.max_replicas": "0"}, "max_replicas"),
        ({"serve.min_replicas": "3"}, "serve.max_replicas is 1, but serve.min_replicas is 3; raise the former"),
        ({"serve.replicas": "3"}, "replicas"),
        ({"serve.cpus": "many"}, "expected a number"),
        ({"serve.front_ends": "2", "server.rate_limit": "5"}, "counted by each front end on its own"),
        ({"modle": "x"}, "modle"),
    ],
)
def test_what_would_have_no_effect_is_refused(arguments: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        read_arguments(arguments)


def test_the_settings_without_meaning_exist() -> None:
    from engine.core.config import describe

    keys = {setting.key for setting in describe()}
    assert set(OF_RAY) <= keys
    assert {key for key in keys if key.startswith("server.otlp_")} <= set(OF_RAY)
