"""Checks the values of settings, alone and together."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from engine.core.config.server import ServerConfig
from engine.core.config.setting import changed_settings
from engine.core.config.tree import AUTO, EngineConfig
from engine.core.errors import ConfigError

BOUNDS: Mapping[str, tuple[float, float]] = {
    "model.max_len": (0, 2**31),
    "model.load_threads": (0, 256),
    "model.seed": (0, 2**63 - 1),
    "scheduler.max_batch_tokens": (0, 2**24),
    "scheduler.max_running": (0, 2**20),
    "executor.tensor_parallel": (1, 1024),
    "executor.threads": (0, 4096),
    "executor.max_graph_tokens": (0, 2**24),
    "cache.block_size": (1, 1024),
    "cache.memory_fraction": (0, 1),
    "cache.metrics_sample": (0, 1),
    "kv_events.rank": (0, 2**16),
    "kv_events.buffer_steps": (1, 2**20),
    "kv_events.buffer_bytes": (1, 2**40),
    "kv_events.max_queue": (1, 2**20),
    "kv_events.high_water_mark": (1, 2**20),
    "grammar.max_chars": (1, 2**24),
    "grammar.max_depth": (1, 1000),
    "grammar.compile_timeout": (1, 3600),
    "speculator.max_drafts": (1, 64),
    "roofline.bandwidth": (0, 10_000),
    "roofline.flops": (0, 1_000_000),
    "roofline.flops8": (0, 1_000_000),
    "server.port": (0, 65535),
    "server.api_workers": (0, 256),
    "server.replicas": (1, 256),
    "server.replica_restarts": (0, 1_000_000),
    "server.replica_restart_pause": (0, 60),
    "server.shutdown_timeout": (0, 86400),
    "server.health_timeout": (2, 86400),
    "server.engine_timeout": (0, 86400),
    "server.health_interval": (0, 86400),
    "server.front_end_timeout": (2, 86400),
    "server.max_connections": (1, 2**20),
    "server.keep_alive_timeout": (1, 86400),
    "server.header_timeout": (1, 86400),
    "server.body_timeout": (1, 86400),
    "server.write_timeout": (1, 86400),
    "server.request_timeout": (0, 604800),
    "server.stream_keep_alive": (0, 86400),
    "server.max_header_bytes": (1024, 2**24),
    "server.max_headers": (8, 2**16),
    "server.profile_max_steps": (1, 10_000),
    "server.profile_max_seconds": (1, 3600),
    "server.rate_limit": (0, 2**31),
    "server.concurrency_limit": (0, 2**31),
    "server.trace_sample": (0, 1),
    "server.max_body_bytes": (1, 2**40),
    "server.max_body_values": (1, 2**31),
    "server.max_salt_chars": (0, 2**20),
    "server.token_cache_bytes": (0, 2**40),
    "server.max_n": (1, 2**20),
    "server.max_prompts": (1, 2**20),
    "server.max_logprobs": (0, 1000),
    "server.max_stop": (0, 2**20),
    "server.max_stop_chars": (1, 2**20),
    "server.max_logit_bias": (0, 2**20),
    "server.max_waiting": (1, 2**31),
}
"""Minimum and maximum of each setting that is a number."""

NEEDED: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "cache": {"metrics": ("metrics_sample",)},
    "kv_events": {
        "endpoint": (
            "replay_endpoint",
            "connect",
            "topic",
            "encoding",
            "rank",
            "buffer_steps",
            "buffer_bytes",
            "max_queue",
            "high_water_mark",
        ),
        "replay_endpoint": ("buffer_steps", "buffer_bytes"),
    },
    "server": {
        "profile_dir": ("profile_max_seconds",),
        "allowed_origins": ("allowed_methods", "allowed_headers", "allow_credentials"),
    },
}
"""Section -> setting -> settings that have no effect without it."""

_UNITS: Mapping[str, int] = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}


def parse_bytes(text: str) -> int:
    """Convert a size such as "2GiB", "1.5GB", "500MB" or "4096" to bytes. Raises ConfigError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    factor = _UNITS.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise ConfigError(f"{text!r} is not a size; write it as 2GiB, 500MB or 4096")
    return int(float(match[1]) * factor)


def check_together(config: EngineConfig, complain: Callable[[str, str], None]) -> None:
    """Check the rules beyond types and bounds; call `complain(key, problem and remedy)` for each broken one."""
    if config.model.max_len == 1:
        complain(
            "model.max_len",
            "a context of 1 token has no room for a prompt and an output; give at least 2, or 0 for the model's",
        )
    size = config.cache.block_size
    if size & (size - 1):
        complain("cache.block_size", f"{size} is no power of two; use {1 << size.bit_length() - 1}")
    if config.cache.memory != AUTO:
        try:
            if parse_bytes(config.cache.memory) == 0:
                complain("cache.memory", "a KV cache of 0 bytes holds no token; give it more memory")
        except ConfigError as error:
            complain("cache.memory", str(error))
        if config.cache.memory_fraction:
            complain("cache.memory_fraction", f"cache.memory ({config.cache.memory}) is given too; leave out one")
    _check_needed(config, complain)
    _check_kv_events(config, complain)
    for section in ("model", "attention", "quant", "scheduler", "executor"):
        if not getattr(config, section).name:
            complain(f"{section}.name", f"the name is empty; use {AUTO!r} or leave it out")
    if config.model.seed and config.model.load_format != "dummy":
        complain("model.seed", "it is the seed of dummy weights; give model.load_format dummy too, or leave it out")
    device = config.executor.device
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
        complain("executor.device", f"device {device!r} is unknown; use auto, cpu, cuda or cuda:N")
    if config.executor.max_graph_tokens and config.executor.graphs in ("decode", "off"):
        complain(
            "executor.max_graph_tokens",
            f"steps with prefill have no graphs (executor.graphs is {config.executor.graphs}); leave out one of them",
        )
    if not config.server.host:
        complain("server.host", "the address is empty; use 127.0.0.1, or 0.0.0.0 for all interfaces")
    if config.server.uds and (config.server.host, config.server.port) != (ServerConfig().host, ServerConfig().port):
        complain("server.uds", "the server listens on either a path or host and port; leave out one of them")
    if (config.server.ssl_keyfile or config.server.ssl_keyfile_password) and not config.server.ssl_certfile:
        complain("server.ssl_certfile", "a private key without its certificate; give ssl_certfile too")
    for name, keys in (("api_key", config.server.api_key), ("admin_api_key", config.server.admin_api_key)):
        if any(not key or " " in key or not key.isprintable() for key in keys):
            complain(f"server.{name}", "a key is empty or has spaces or characters that a bearer token cannot have")
    if set(config.server.admin_api_key) & set(config.server.api_key):
        complain("server.admin_api_key", "a key is in server.api_key too, so that each client would be administrator")
    for origin in config.server.allowed_origins:
        if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/?#]+", origin):
            complain("server.allowed_origins", f"{origin!r} is no origin; write it as https://example.com or *")
    for host in config.server.allowed_hosts:
        if not re.fullmatch(r"\*|(\*\.)?[A-Za-z0-9_.-]+|[0-9A-Fa-f:.]+", host):
            complain(
                "server.allowed_hosts", f"{host!r} is no name; write a.example.com, *.example.com or *, without a port"
            )
    if config.server.log_format == "json" and config.server.access_log == "line":
        complain("server.access_log", "its lines would stand among the JSON lines of log_format; give json")
    endpoint = config.server.otlp_endpoint
    if endpoint and not re.fullmatch(r"https?://[^/?#\s@]+(/[^\s#]*)?", endpoint):
        complain("server.otlp_endpoint", f"{endpoint!r} is no address of a collector; write it as http://HOST:4318")
    for key, what, pairs in (
        ("server.otlp_headers", "a header", config.server.otlp_headers),
        ("server.otlp_resource", "an attribute", config.server.otlp_resource),
    ):
        if not all(re.fullmatch(r"[!-~]+?=[^\r\n]*", pair) for pair in pairs):
            complain(key, f"{what} is not of the form NAME=VALUE; write it as NAME=VALUE")
    for name in sorted(set(config.plugins.allow) & set(config.plugins.deny)):
        complain("plugins.deny", f"{name!r} is in allow and in deny; leave it in one")


def _check_needed(config: EngineConfig, complain: Callable[[str, str], None]) -> None:
    """Check that no setting is changed without the one that it needs; see NEEDED and check_together."""
    for name, needed in NEEDED.items():
        section = getattr(config, name)
        changed = set(changed_settings(section))
        for key, others in needed.items():
            for other in others if not getattr(section, key) else ():
                if other in changed:
                    remedy = "give that too, or leave it out"
                    complain(f"{name}.{other}", f"it has no effect without {name}.{key}; {remedy}")
                    changed.remove(other)


def _check_kv_events(config: EngineConfig, complain: Callable[[str, str], None]) -> None:
    """Check [kv_events]; see check_together."""
    events = config.kv_events
    if not events.endpoint:
        return
    ports: dict[str, int] = {}
    for name in ("endpoint", "replay_endpoint"):
        endpoint = getattr(events, name)
        tcp = re.fullmatch(r"tcp://[^/]+:(\d{1,5})", endpoint)
        if tcp is not None:
            ports[name] = int(tcp[1])
            last = int(tcp[1]) + (0 if events.connect and name == "endpoint" else _last_rank(config))
            if not 0 < int(tcp[1]) <= last < 65536:
                complain(f"kv_events.{name}", f"there is no port {last}; with the ranks added, use 1 to 65535")
        elif endpoint and not re.fullmatch(r"ipc://.+", endpoint):
            complain(
                f"kv_events.{name}", f"{endpoint!r} is no endpoint; write it as tcp://127.0.0.1:5557 or ipc:///PATH"
            )
    same = events.endpoint == events.replay_endpoint
    overlap = (
        len(ports) == 2
        and not events.connect
        and abs(ports["endpoint"] - ports["replay_endpoint"]) < (config.server.replicas)
    )
    if same or overlap:
        complain("kv_events.replay_endpoint", "its ports and those of endpoint overlap, one per replica; use others")
    if not config.cache.prefix_caching:
        complain("kv_events.endpoint", "cache.prefix_caching is off, so there are no events; leave out one")


def _last_rank(config: EngineConfig) -> int:
    return config.kv_events.rank + config.server.replicas - 1
