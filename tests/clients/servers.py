"""The servers that the clients call: `engine serve` in processes of its own, from the engine's own environment."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
DEMO = ROOT / "demo" / "engine-demo"
TEMPLATE = HERE / "chat_template.jinja"
PYTHON = os.environ.get("ENGINE_PYTHON", str(ROOT / ".venv" / "bin" / "python"))
"""The Python in which the engine is installed; the clients have an environment of their own."""
KEY = "no-secret"
"""The API key that clients send: most insist on one."""


class Server:
    """A running `engine serve`."""

    def __init__(self, model: str, directory: Path, *flags: str, plugins: Path | None = None) -> None:
        """model: served name; directory: for files of the server; plugins: directory of installed plugins."""
        self.model = model
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  (closed by `stop`)
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(directory)}
        if plugins is not None:
            environment["PYTHONPATH"] = str(plugins)
        command = [PYTHON, "-P", "-c", "from engine.cli.main import main; main()", "serve", "--port", "0"]
        command += ["--served-model-name", model, "--api-workers", "1", "--threads", "1", "--dtype", "float32"]
        command += ["--chat-template", str(TEMPLATE), "--parser", "hermes", *flags]
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=self._errors, text=True, env=environment
        )
        self.url = ""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("Listening on "):
                self.url = line.split()[-1]
                break
        else:
            self.stop()
            raise AssertionError(f"the server did not start:\n{self.errors}")

    @property
    def v1(self) -> str:
        """The base URL of the OpenAI protocol."""
        return f"{self.url}/v1"

    @property
    def errors(self) -> str:
        """Standard error so far."""
        file = self._errors.fileno()
        return os.pread(file, os.fstat(file).st_size, 0).decode()

    def stop(self) -> int:
        """Send SIGTERM and wait; the exit status."""
        self._process.terminate()
        return self._process.wait(30)


class Scripts:
    """The outputs of the scripted server; see scripted/engine_scripted.py."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._numbers = itertools.count(1)

    def __call__(self, *turns: str) -> str:
        """A word for the user's message: the conversation that contains it is answered with these texts in turn."""
        name = f"{os.getpid()}x{next(self._numbers)}"
        (self.directory / f"{name}.json").write_text(json.dumps(turns))
        return f"script-{name}"


def call(name: str, /, **arguments: Any) -> str:
    """A tool call as the scripted model writes it."""
    return f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def thought(text: str) -> str:
    """Reasoning as the scripted model writes it."""
    return f"<think>\n{text}\n</think>\n\n"


def start_scripted(directory: Path, flags: Sequence[str] = ()) -> tuple[Server, Scripts]:
    """A server whose outputs are scripts, with a context of 131,072 tokens."""
    scripts = Scripts(directory / "scripts")
    scripts.directory.mkdir()
    plugins = directory / "plugins"
    info = plugins / "engine_scripted-1.0.dist-info"
    info.mkdir(parents=True)
    shutil.copy(HERE / "scripted" / "engine_scripted.py", plugins)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: engine-scripted\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[engine]\nscripted = engine_scripted\n")
    checkpoint = directory / "scripted"
    checkpoint.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, checkpoint)
    config = {
        "architectures": ["ScriptedForCausalLM"],
        "model_type": "scripted",
        "vocab_size": 4096,
        "max_position_embeddings": 131_072,
        "eos_token_id": 2,
        "scripts": str(scripts.directory),
        "tokenizer": str(checkpoint),
    }
    (checkpoint / "config.json").write_text(json.dumps(config))
    memory = (
        "--model",
        str(checkpoint),
        "--architecture",
        "scripted",
        "--load-format",
        "dummy",
        "--kv-memory",
        "64MiB",
    )
    return Server("scripted", directory, *memory, *flags, plugins=plugins), scripts


def start_demo(directory: Path, flags: Sequence[str] = ()) -> Server:
    """A server of the demo model, which does not reason; white space in JSON is bounded, so that outputs end."""
    model = ("--model", str(DEMO), "--grammar-option", "max_whitespace=1", "--parser-option", "reasoning=false")
    return Server("demo", directory, *model, "--kv-memory", "64MiB", *flags)
