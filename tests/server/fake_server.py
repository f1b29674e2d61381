"""A server with the engine and the front ends of other scripts.

Arguments: configuration file, the engine's script, the front end's script.
"""

from __future__ import annotations

import sys
from pathlib import Path

from engine import server
from engine.core.config.tree import EngineConfig
from engine.core.errors import EngineError
from engine.core.executors.wire import MessageDecoder
from engine.server.supervisor.main import Commands

if __name__ == "__main__":
    file, engine, front_end = sys.argv[1:]
    config = MessageDecoder[EngineConfig](EngineConfig).decode(Path(file).read_bytes())
    commands = Commands(engine=[sys.executable, "-P", engine], front_end=[sys.executable, "-P", front_end])
    try:
        sys.exit(server.run(config, commands=commands))
    except EngineError as error:
        sys.exit(f"error: {error}")
