"""The two deployments, and how Ray Serve scales them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import ray
from ray import serve

from engine.core.config import AUTO, FEW_RUNNING, EngineConfig
from engine.core.errors import ConfigError
from engine.core.executors import encode
from engine.server.ray_serve.engine import EngineDeployment
from engine.server.ray_serve.front_end import FrontEnd, OpenTokenizer, dispatcher
from engine.server.ray_serve.options import Options
from engine.server.supervisor.replicas import finds_devices

FRONT_END = "front-end"
ENGINE = "engine"
"""Names of the deployments."""

ROUTER = "engine.server.ray_serve.prefix_router.PrefixRouter"
ROUTING_STATS_SECONDS = 10.0
"""Interval at which Ray Serve asks replicas for their number of blocks, which does not change while they live."""
HEALTH_SECONDS = 2.0
"""Interval of Ray Serve's health checks; it replaces a replica after three failures in a row."""
DRAIN_MARGIN = 5.0
"""Seconds that a replica may take to exit after server.shutdown_timeout."""


def make_application(
    config: EngineConfig,
    options: Options,
    *,
    engine_command: Sequence[str] | None = None,
    open_tokenizer: OpenTokenizer | None = None,
) -> serve.Application:
    """The application, for `serve.run`.

    engine_command: starts an engine process; None: the usual one. open_tokenizer: None: the model's.
    Raises ConfigError.
    """
    config, gpus = _devices(config, options)
    message = encode(config)
    # Requests above this number wait in the front ends, from where new replicas get them.
    max_ongoing = config.scheduler.max_running or FEW_RUNNING
    engines = serve.deployment(EngineDeployment, name=ENGINE).options(
        **_scale(options, max_ongoing),
        max_ongoing_requests=max_ongoing,
        ray_actor_options={"num_cpus": options.cpus, "num_gpus": gpus},
        health_check_period_s=HEALTH_SECONDS,
        health_check_timeout_s=config.server.health_timeout,
        graceful_shutdown_timeout_s=config.server.shutdown_timeout + DRAIN_MARGIN,
        logging_config={"enable_access_log": False},  # the front end has one
        request_router_config={
            "request_router_class": ROUTER,
            "request_router_kwargs": {
                "block_size": config.cache.block_size,
                "prefix_caching": config.cache.prefix_caching,
                "front_ends": options.front_ends,
            },
            "request_routing_stats_period_s": ROUTING_STATS_SECONDS,
        },
    )
    front_ends = serve.deployment(serve.ingress(dispatcher)(FrontEnd), name=FRONT_END).options(
        num_replicas=options.front_ends,
        max_ongoing_requests=config.server.max_waiting + 1000,  # the front end itself refuses what is too much
        ray_actor_options={"num_cpus": 1},
        graceful_shutdown_timeout_s=config.server.shutdown_timeout + DRAIN_MARGIN,
    )
    application: serve.Application = front_ends.bind(message, engines.bind(message, engine_command), open_tokenizer)
    return application


def _scale(options: Options, max_ongoing: int) -> dict[str, Any]:
    """How many engine replicas there are. max_ongoing: maximum requests that one of them has."""
    if options.min_replicas == options.max_replicas:
        return {"num_replicas": options.min_replicas}
    return {
        "autoscaling_config": {
            "min_replicas": options.min_replicas,
            "max_replicas": options.max_replicas,
            "target_ongoing_requests": options.target_requests or max(1, max_ongoing // 2),
            "upscale_delay_s": options.upscale_delay,
            "downscale_delay_s": options.downscale_delay,
            "look_back_period_s": options.load_window,
        }
    }


def _devices(config: EngineConfig, options: Options) -> tuple[EngineConfig, int]:
    """The configuration with a kind of device, and the GPUs that Ray reserves per replica. Raises ConfigError."""
    device, ranks = config.executor.device, config.executor.tensor_parallel
    if ":" in device:
        raise ConfigError(f"Ray chooses the GPUs, and {device} cannot be asked for; use executor.device=cuda")
    if finds_devices(config):
        if options.gpus:
            raise ConfigError(f"the executor {config.executor.name} reserves its GPUs itself; leave serve.gpus out")
        return config, 0
    gpus = options.gpus
    if gpus is None:
        gpus = ranks if device == "cuda" or (device == AUTO and _has_gpus()) else 0
    if gpus and device == "cpu":
        raise ConfigError(f"serve.gpus is {gpus}, but executor.device is cpu; leave one of them out")
    if gpus not in (0, ranks):
        raise ConfigError(f"serve.gpus is {gpus}, but the engine uses executor.tensor_parallel GPUs, {ranks}")
    executor = attrs.evolve(config.executor, device="cuda" if gpus else "cpu" if device == AUTO else device)
    if not gpus and not executor.threads:
        executor = attrs.evolve(executor, threads=max(1, int(options.cpus)))
    return attrs.evolve(config, executor=executor), gpus


def _has_gpus() -> bool:
    """Whether the cluster has GPUs. Raises ConfigError outside a cluster."""
    if not ray.is_initialized():
        raise ConfigError("no Ray cluster is connected, so its GPUs are not known; set serve.gpus or executor.device")
    return bool(ray.cluster_resources().get("GPU", 0) > 0)
