"""OpenAI-compatible HTTP in front of an engine process."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING

if __name__ != "engine.server":
    raise ImportError(
        "import this package as engine.server (pip install -e . maps it); a second copy would duplicate every class"
    )

if TYPE_CHECKING:
    from engine.core.config import EngineConfig
    from engine.server.supervisor.main import Commands

NEEDS = ("fastapi", "httptools", "prometheus_client", "uvicorn", "zmq")


def run(
    config: EngineConfig, *, announce: Callable[[str], None] | None = None, commands: Commands | None = None
) -> int:
    """Serve `config` over HTTP until SIGTERM or SIGINT; returns the process's exit code. Call it in the main thread.

    announce: given the summary when the server is ready; None: print it. commands: start other processes than the
    usual ones. Raises ConfigError when the packages for serving are not installed, and EngineError when the server
    cannot start.
    """
    from engine.core.errors import ConfigError
    from engine.core.extras import install_command

    missing = [name for name in NEEDS if find_spec(name) is None]
    if missing:
        raise ConfigError(f"serving needs {', '.join(missing)}; install with `{install_command('server')}`")
    from engine.server.supervisor import main

    return main.serve(config, announce=announce or _print, commands=commands or main.Commands())


def _print(text: str) -> None:
    print(text, flush=True)
