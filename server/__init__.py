"""The HTTP server with the protocols of OpenAI and Anthropic: `run` serves a configuration.

Three kinds of process, each with a package and a main.py:

    supervisor/      the main process: starts and watches the others, passes connections to the front ends
    front_end/       answers HTTP with the routes of http/, and is a client of the engine processes
    engine_process/  steps the engine

http/ holds the HTTP API, page/ the files of the page at /, shared/ what the processes have in common: messages,
heartbeat, metrics table.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING

if __name__ != "engine.server":
    raise ImportError(
        "import this package as engine.server (after pip install -e .); a second copy would duplicate every class"
    )

if TYPE_CHECKING:
    from engine.core.config import EngineConfig
    from engine.server.supervisor.main import Commands

REQUIRED_PACKAGES = ("fastapi", "httptools", "uvicorn", "zmq")


def run(
    config: EngineConfig, *, announce: Callable[[str], None] | None = None, commands: Commands | None = None
) -> int:
    """Serve `config` over HTTP until SIGTERM or SIGINT; the process's exit code. Call from the main thread.

    announce: called with the summary when the server is ready; None: print the summary. commands: command lines of the
    child processes; None: the usual ones. Raises ConfigError when packages for serving are missing, and EngineError
    when the server cannot start.
    """
    from engine.core.errors import ConfigError
    from engine.core.extras import install_command

    missing = [name for name in REQUIRED_PACKAGES if find_spec(name) is None]
    if missing:
        raise ConfigError(f"serving needs {', '.join(missing)}; install with `{install_command('server')}`")
    if config.server.otlp_endpoint and not _is_installed("opentelemetry.proto"):
        raise ConfigError(
            "tracing (server.otlp_endpoint, --otlp-endpoint, OTEL_EXPORTER_OTLP_ENDPOINT) needs opentelemetry-proto; "
            f"install it with `{install_command('otel')}`, or leave the endpoint out"
        )
    from engine.server.supervisor import main

    return main.serve(config, announce=announce or _print, commands=commands or main.Commands())


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of its parent
        return False


def _print(text: str) -> None:
    print(text, flush=True)
