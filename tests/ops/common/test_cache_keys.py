"""The keys by which compiled kernels are found on disk."""

from __future__ import annotations

import json
import os
import subprocess
import sys

SCRIPT = """
import importlib, json, pkgutil, sys
import engine.ops
from triton.runtime.jit import JITCallable

functions = {}
for module in pkgutil.walk_packages(engine.ops.__path__, "engine.ops."):
    if module.name != "engine.ops.attention._paged":
        for value in vars(importlib.import_module(module.name)).values():
            if isinstance(value, JITCallable):
                functions[f"{value.__module__}.{value.__name__}"] = value
names = sorted(functions, reverse=sys.argv[1] == "reversed")
json.dump({name: functions[name].cache_key for name in names}, sys.stdout)
"""
"""Computes the keys of all kernels and device functions, in one order or the other."""


def find_keys(order: str) -> dict[str, str]:
    # Kernels are defined for the interpreter where this is set, and have no keys then.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, order], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout)
    return found


def test_keys_of_compiled_kernels_do_not_depend_on_the_order_of_their_first_use() -> None:
    keys, reversed_keys = find_keys("sorted"), find_keys("reversed")
    assert len(keys) > 100
    differing = [name for name, key in keys.items() if reversed_keys[name] != key]
    assert not differing
