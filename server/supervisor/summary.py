"""The text that `engine serve` prints when the server is ready."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

import msgspec

from engine.core.config import EngineConfig, served_name
from engine.core.runner import format_bytes
from engine.core.types import CacheInfo
from engine.server.shared.messages import Started

MIN_PHASE_SECONDS = 0.05
"""Shorter phases of the start are left out."""


def summary(started: Started, config: EngineConfig, url: str) -> str:
    """The model, the chosen plugins with reasons, the memory budget, the address, a curl command to paste, the page.

    started: the message of the replica that took longest to load.
    """
    cache = started.cache
    plugins = [
        (choice.extension_point, choice.name, f"{choice.provenance}: {choice.reason}") for choice in started.choices
    ]
    memory = [
        ("weights", format_bytes(cache.weights_bytes), ""),
        ("activations", format_bytes(cache.activation_bytes), ""),
        ("penalties", format_bytes(cache.penalty_bytes), "at most, for requests with penalties"),
        *([("kernels", format_bytes(cache.kernel_bytes), "oneDNN's, at most")] if cache.kernel_bytes else []),
        *_caches(cache, started.max_len),
        ("budget", format_bytes(cache.budget_bytes), ""),
    ]
    phases = phase_times(cache.phases)
    replicas = "" if config.server.replicas == 1 else f"{config.server.replicas} replicas, each on "
    commit = f" (commit {config.model.revision[:8]})" if config.model.revision else ""
    title = (
        f"{served_name(config)}{commit} on {replicas}{cache.device}, {cache.dtype}, context {started.max_len} tokens"
    )
    return "\n".join(
        (
            f"{title}, loaded in {started.seconds:.1f} s",
            *([f"  {phases}"] if phases else []),
            "",
            *_table(plugins),
            "",
            *_table(memory),
            "",
            f"Listening on {url}",
            "",
            curl(config, url),
            *([f"or talk to the model in a browser: {url}/"] if config.server.page and not is_socket(url) else []),
            "",
        )
    )


def _caches(cache: CacheInfo, max_len: int) -> list[tuple[str, str, str]]:
    """What the layers keep: the KV cache, what each of several kinds of layers takes of it, and states."""
    states = f"{cache.states} layers, a state per sequence for {cache.state_rows} sequences; so no prefix is reused"
    if not cache.kinds:
        return [("states", format_bytes(cache.state_bytes), states)]
    several = len(cache.kinds) > 1 or cache.states or cache.kinds[0].window is not None
    contexts = cache.num_blocks * cache.block_size / max_len
    if several and cache.blocks_per_context:
        contexts = cache.num_blocks / cache.blocks_per_context
    stored = "" if cache.kv_dtype in ("", cache.dtype) else f", in {cache.kv_dtype}"
    blocks = f"{cache.num_blocks} blocks of {cache.block_size} tokens, {contexts:.1f} contexts of full length{stored}"
    rows = [("KV cache", format_bytes(cache.kv_bytes), blocks)]
    for kind in cache.kinds if several else ():
        kept = "the whole context" if kind.window is None else f"the last {kind.window} tokens"
        each = "1 block" if kind.groups == 1 else f"{kind.groups} blocks"
        rows.append((f"  {kind.name}", f"{kind.layers} layers", f"keep {kept}, {each} per {cache.block_size} tokens"))
    if cache.states:
        rows.append(("  states", format_bytes(cache.state_bytes), states))
    return rows


def phase_times(phases: Sequence[tuple[str, float]]) -> str:
    """The longer phases of the start, longest first: "weights 3.1 s, import 1.2 s"."""
    longest = sorted(phases, key=lambda phase: -phase[1])
    return ", ".join(f"{name} {seconds:.1f} s" for name, seconds in longest if seconds >= MIN_PHASE_SECONDS)


def is_socket(url: str) -> bool:
    """Whether the server listens on a Unix domain socket, which no browser opens."""
    return url.startswith("unix:")


def curl(config: EngineConfig, url: str) -> str:
    """A curl command that requests a completion."""
    body = {"model": served_name(config), "prompt": "def read_lines(path):\n", "max_tokens": 48, "temperature": 0}
    key = ' -H "Authorization: Bearer $API_KEY"' if config.server.api_key or config.server.api_key_file else ""
    data = shlex.quote(msgspec.json.encode(body).decode())
    path = url.removeprefix("unix:")
    if path != url:
        url = f"--unix-socket {shlex.quote(path)} http://localhost"
    return f"curl {url}/v1/completions{key} -H 'Content-Type: application/json' -d {data}"


def _table(rows: Sequence[tuple[str, str, str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    return [f"  {name:{widths[0]}}  {value:{widths[1]}}  {note}".rstrip() for name, value, note in rows]
