"""The arguments of the application: settings of the engine, and how many replicas Ray Serve runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
from attrs import field, frozen, validators

from engine.core.config import DEFAULT, EngineConfig, Resolved, demo_model, load_config, structure_options
from engine.core.errors import ConfigError
from engine.server.shared.limits_table import has_limits

PREFIX = "serve."
"""Prefix of the arguments that are fields of Options."""

TRACES = (
    "requests are not traced, since front ends and engines have no clock in common; trace them in front of Ray Serve"
)

OF_RAY: Mapping[str, str] = {
    "server.host": "give http_options to Ray Serve",
    "server.port": "give http_options to Ray Serve",
    "server.uds": "give http_options to Ray Serve",
    "server.ssl_certfile": "give http_options to Ray Serve",
    "server.ssl_keyfile": "give http_options to Ray Serve",
    "server.ssl_keyfile_password": "give http_options to Ray Serve",
    "server.keep_alive_timeout": "give http_options to Ray Serve",
    "server.max_connections": "Ray Serve's proxy accepts the connections",
    "server.header_timeout": "Ray Serve's proxy reads the requests",
    "server.body_timeout": "Ray Serve's proxy reads the requests",
    "server.write_timeout": "Ray Serve's proxy writes the answers",
    "server.max_header_bytes": "Ray Serve's proxy reads the requests",
    "server.max_headers": "Ray Serve's proxy reads the requests",
    "server.api_workers": "use serve.front_ends",
    "server.front_end_timeout": "Ray Serve watches the front ends",
    "server.replicas": "use serve.min_replicas and serve.max_replicas",
    "server.replica_restarts": "Ray Serve replaces a dead replica",
    "server.replica_restart_pause": "Ray Serve replaces a dead replica",
    "server.otlp_endpoint": TRACES,
    "server.otlp_headers": TRACES,
    "server.otlp_certificate": TRACES,
    "server.otlp_resource": TRACES,
    "server.trace_sample": TRACES,
}
"""Setting without meaning under Ray Serve -> what to do instead."""


@frozen(kw_only=True)
class Options:
    """How many replicas there are, and what each may use."""

    min_replicas: int = field(default=1, validator=validators.ge(1))
    """Engine replicas that always run."""
    max_replicas: int = field(default=1, validator=validators.ge(1))
    """Maximum engine replicas; above min_replicas Ray Serve starts and stops them as the load demands."""
    target_requests: int = field(default=0, validator=validators.ge(0))
    """Requests per engine replica, running and waiting, that Ray Serve scales for; 0: half of scheduler.max_running."""
    upscale_delay: float = field(default=30.0, validator=validators.ge(0))
    """Seconds of higher load before replicas are added."""
    downscale_delay: float = field(default=600.0, validator=validators.ge(0))
    """Seconds of lower load before replicas are removed."""
    load_window: float = field(default=30.0, validator=validators.gt(0))
    """Seconds over which the load is averaged."""
    front_ends: int = field(default=1, validator=validators.ge(1))
    """Front end replicas."""
    cpus: float = field(default=1.0, validator=validators.gt(0))
    """CPUs that Ray reserves for an engine replica."""
    gpus: int | None = field(default=None, validator=validators.optional(validators.ge(0)))
    """GPUs that Ray reserves for an engine replica; unset: one per tensor parallel rank, where the cluster has GPUs."""

    def __attrs_post_init__(self) -> None:
        if self.max_replicas < self.min_replicas:
            raise ConfigError(
                f"serve.max_replicas is {self.max_replicas}, but serve.min_replicas is {self.min_replicas}; "
                "raise the former"
            )


def read_arguments(arguments: Mapping[str, object]) -> tuple[EngineConfig, Options]:
    """The engine's configuration and the options. Raises ConfigError."""
    given = dict(arguments)
    file = given.pop("config", None)
    own = {key.removeprefix(PREFIX): given.pop(key) for key in list(given) if key.startswith(PREFIX)}
    options: Options = structure_options({key: _typed(value) for key, value in own.items()}, Options, PREFIX[:-1])
    if "model" in given:
        given["model.path"] = given.pop("model")
    resolved = load_config(
        None if file is None else Path(str(file)),
        {key: (value, f"the argument {key}") for key, value in given.items()},
        {"model.path": (demo_model(), DEFAULT)},
    )
    _refuse(resolved, options)
    return resolved.config, options


def _refuse(resolved: Resolved, options: Options) -> None:
    """Raise ConfigError for settings that would have no effect."""
    wrong = [
        f"{key} has no effect under Ray Serve: {advice}"
        for key, advice in OF_RAY.items()
        if resolved.origins[key] != DEFAULT
    ]
    if options.front_ends > 1 and has_limits(resolved.config.server):
        wrong.append(
            "server.rate_limit and server.concurrency_limit are counted by each front end on its own; "
            "use serve.front_ends=1, or limit requests in front of Ray Serve"
        )
    if wrong:
        raise ConfigError("\n".join(wrong))


def _typed(value: Any) -> Any:
    """An argument of `serve run` is a string: as a number if it is one."""
    if isinstance(value, str):
        for kind in (int, float):
            try:
                return kind(value)
            except ValueError:
                pass
    return value


def engine_config(config: EngineConfig) -> EngineConfig:
    """The configuration of the engine process of a replica, which Ray Serve replaces when the process has exited."""
    return attrs.evolve(config, server=attrs.evolve(config.server, replicas=1, replica_restarts=0))
