"""Garbage collections are kept out of imports, and Python's settings are as before afterwards.

Each test runs in an interpreter of its own: the garbage of other tests must be neither collected nor exempt here.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

PRELUDE = """
import gc, weakref
from engine.core.collector import finish_start, paused

class Node:
    # Can be part of a cycle.
    def __init__(self):
        self.myself = self

def collections():
    return sum(generation["collections"] for generation in gc.get_stats())

def is_in_generation(thing, generation):
    return any(each is thing for each in gc.get_objects(generation))
"""


def run(code: str) -> str:
    """Run code after PRELUDE in a fresh interpreter; returns what it prints."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", PRELUDE + textwrap.dedent(code)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_paused_collects_nothing_and_moves_what_it_made_to_the_oldest_generation() -> None:
    run("""
        before = collections()
        with paused():
            import fractions
            made = [Node() for _ in range(5000)]
            assert collections() == before
        assert gc.isenabled()
        assert is_in_generation(made[0], 2)
        assert gc.get_freeze_count() == 0
    """)


def test_paused_moves_nothing_when_all_modules_were_imported_before() -> None:
    run("""
        import fractions
        with paused():
            import fractions
            made = Node()
        assert gc.isenabled()
        assert is_in_generation(made, 0)
    """)


def test_garbage_made_while_paused_is_collected_later() -> None:
    run("""
        with paused():
            import fractions
            lost = weakref.ref(Node())
        assert lost() is not None
        gc.collect()
        assert lost() is None
    """)


def test_paused_exempts_objects_from_collections_where_some_are_exempt_already() -> None:
    run("""
        with paused(freeze=True):
            first = Node()
        with paused():
            import fractions
            second = Node()
        assert gc.get_freeze_count() > 0
        assert not any(is_in_generation(node, generation) for node in (first, second) for generation in range(3))
    """)


def test_paused_leaves_a_collector_that_is_off_as_it_is() -> None:
    run("""
        gc.disable()
        with paused(freeze=True):
            pass
        assert not gc.isenabled()
        assert gc.get_freeze_count() == 0
    """)


def test_paused_enables_the_collector_after_an_error() -> None:
    run("""
        try:
            with paused():
                raise ImportError
        except ImportError:
            pass
        assert gc.isenabled()
    """)


@pytest.mark.parametrize("freeze", [True, False])
def test_finish_start_collects_and_exempts_the_rest_only_when_asked(freeze: bool) -> None:
    run(f"""
        freeze = {freeze}
        with paused(freeze=True):
            pass
        lost, kept = weakref.ref(Node()), Node()
        finish_start(freeze=freeze)
        assert (lost() is None) == freeze
        assert (gc.get_freeze_count() > 0) == freeze
        assert is_in_generation(kept, 2) is False
        assert is_in_generation(kept, 0) != freeze
    """)


@pytest.mark.parametrize("process", ["engine.server.engine_process", "engine.server.front_end"])
def test_a_process_of_the_server_imports_its_modules_without_collections(process: str) -> None:
    """Except of the few modules before the collector's own."""
    code = (
        "import gc, runpy, sys\n"
        f"runpy.run_module({process!r} + '.__main__')\n"
        f"assert {process!r} + '.main' in sys.modules\n"
        "print(gc.get_stats()[1]['collections'], gc.get_stats()[2]['collections'], gc.get_freeze_count() > 20_000)"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    middle, oldest, frozen = done.stdout.split()
    assert int(middle) <= 3
    assert oldest == "0"
    assert frozen == "True"
