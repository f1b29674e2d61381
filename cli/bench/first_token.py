"""A process of `engine bench startup`: starts an engine, computes one token, and reports the time of each phase.

Standard input brings the configuration (msgpack); the argument is time.monotonic() at which the process was started.
"""

from __future__ import annotations

import json
import sys
import time

from engine.core.collector import paused

BEGUN = time.monotonic()


def main() -> None:
    """Print one JSON line: phases as [name, seconds], size of the weights, and device."""
    with paused(freeze=True):
        from engine.cli.bench.load import Load, run_load
        from engine.core.config import EngineConfig
        from engine.core.engine import Engine
        from engine.core.executors import MessageDecoder

    config = MessageDecoder[EngineConfig](EngineConfig).decode(sys.stdin.buffer.read())
    imported = time.monotonic()
    with Engine(config=config) as engine:
        ready = time.monotonic()
        inside = engine.cache_info.phases
        run_load(engine, Load(name="", lengths=((min(16, engine.max_len - 1), 1),)))
        done = time.monotonic()
        info = engine.cache_info
    rest = ready - imported - sum(seconds for _, seconds in inside)
    phases = [
        ("interpreter and command line", BEGUN - float(sys.argv[1])),
        ("imports", imported - BEGUN),
        *inside,
        ("rest of the engine's start" if inside else "engine's start", rest),
        ("first token", done - ready),
    ]
    print(json.dumps({"phases": phases, "weights_bytes": info.weights_bytes, "device": info.device}), flush=True)


if __name__ == "__main__":
    main()
