"""What a start with default settings imports: nothing that only other settings, or later requests, need."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

DEMO = Path(__file__).parents[1] / "demo" / "engine-demo"
ENGINE = f"""
from engine.core.engine import Engine
from engine.core.types import Request
with Engine(model={str(DEMO)!r}, executor__device="cpu", cache__memory="16MiB") as engine:
    engine.add(Request(id="first", prompt=(1, 2, 3)))
    engine.step()
"""
WITHOUT_SERVER = ("engine.server", "engine.cli", "fastapi", "pydantic", "starlette", "uvicorn", "zmq", "typer")
LATER = (
    "engine.core.grammars.formats",  # structural tags
    "engine.core.hub.download",  # models of the hub
    "engine.core.kv_events.stream",
    "engine.core.timeline.recorder",  # traces
    "engine.core.runner.cuda_graphs",
    "engine.core.runner.drafter_start",  # speculators on the device
    "engine.core.runner.graph_capture",
    "engine.core.runner.piecewise_graphs",
    "engine.plugins.grammars.llguidance_formats",
    "engine.plugins.grammars.llguidance_schemas",
    "llguidance",
    "xgrammar",
    "transformers",  # the tokenizer's, for prompts that are texts
    "opentelemetry",
    "triton",
)


def imported(code: str) -> set[str]:
    """Modules in a fresh interpreter after `code`."""
    code += "\nimport sys\nprint('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def heads(modules: set[str]) -> set[str]:
    """The modules, and the packages they are in."""
    return {".".join(name.split(".")[: count + 1]) for name in modules for count in range(name.count(".") + 1)}


def test_an_engine_with_default_settings_imports_only_what_these_need() -> None:
    found = heads(imported(ENGINE))
    assert "torch" in found  # the engine did start
    assert sorted(found & {*LATER, *WITHOUT_SERVER}) == []


def test_a_front_end_imports_neither_torch_nor_numpy() -> None:
    found = heads(imported("import engine.server.front_end.main"))
    assert "fastapi" in found  # which imports opentelemetry where that is installed
    assert sorted(found & {"torch", "numpy", "transformers", "safetensors", *LATER} - {"opentelemetry"}) == []


def test_the_engine_process_imports_no_http_before_its_engine() -> None:
    found = heads(imported("import engine.server.engine_process.main"))
    assert "zmq" in found
    assert sorted(found & {"torch", "numpy", "asyncio", "fastapi", "pydantic", "uvicorn", "typer"}) == []


def test_the_process_that_measures_the_start_imports_no_commands() -> None:
    found = heads(imported("import engine.cli.bench.first_token"))
    assert sorted(found & {"typer", "numpy", "engine.cli.bench.commands"}) == []
