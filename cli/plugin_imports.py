"""Finds the plugins that import heavy packages as soon as they are loaded, and so slow every command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.core.plugin_host import Plugins

HEAVY = ("torch", "triton", "transformers", "flashinfer", "vllm", "tensorflow", "jax")
"""Packages that take a large part of a second or more to import."""
SECONDS = 60.0
"""Maximum time to load one plugin."""
LOAD = """
import json, sys
from importlib import import_module
from importlib.metadata import entry_points

name, distribution, *heavy = sys.argv[1:]
for point in entry_points(group="engine", name=name):
    if point.dist is not None and point.dist.name == distribution:
        found = point.load()
        for module in found if isinstance(found, tuple) else ():
            import_module(module)
print()
print(json.dumps([package for package in heavy if package in sys.modules]))
"""
"""Loads the entry point of a plugin; the last line printed names the heavy packages that are imported then."""


def heavy_imports(plugins: Plugins, home: str) -> list[str]:
    """A sentence for each plugin of a third party that imports a heavy package at the top of a module.

    Each is loaded in a process of its own, because a package is imported only once in a process. None is started if
    no heavy package is imported in this process, where all plugins have been loaded. home: the engine's distribution.
    """
    if not any(package in sys.modules for package in HEAVY):
        return []
    found = {(one.entry_point, one.distribution): one for one in plugins.loaded}
    sentences = []
    for (entry_point, distribution), plugin in found.items():
        packages = [] if distribution in (home, "object") else _imported(entry_point, distribution)
        if packages:
            sentences.append(
                f"plugin {entry_point!r} of {plugin.provenance} imports {' and '.join(packages)} as soon as it is"
                " loaded, which slows every command; import it where the class is, and register the class with"
                ' lazy("module:Class")'
            )
    return sentences


def _imported(name: str, distribution: str) -> Iterable[str]:
    """The heavy packages that an entry point imports; none where it cannot be loaded, which is reported elsewhere."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", LOAD, name, distribution, *HEAVY],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=True,
        )
        packages: list[str] = json.loads(done.stdout.splitlines()[-1])
    except (subprocess.SubprocessError, ValueError, IndexError):
        return []
    return packages
