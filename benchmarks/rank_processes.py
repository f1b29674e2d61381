"""Starts a benchmark once per rank, each in a process of its own."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from attrs import asdict

from engine.cli.bench.report import Row


def add_rank_options(parser: argparse.ArgumentParser) -> None:
    """Options of a script that `run_ranks` runs as each of the ranks."""
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", type=int, nargs=2, metavar=("RANK", "RANKS"), help="be one of several ranks")
    parser.add_argument("--meet", default="", help="with --rank: a file where they meet")


def run_ranks(script: str, ranks: int, options: Sequence[str], directory: Path) -> list[Any]:
    """Run `script` as each of the ranks; returns what they write as JSON, by rank. Ends this process if one fails.

    The script takes those of `add_rank_options` besides `options`.
    """
    meet, results = directory / f"meet-{ranks}", [directory / f"result-{ranks}-{rank}" for rank in range(ranks)]
    command = [sys.executable, script, *options, "--meet", str(meet)]
    started = [
        subprocess.Popen([*command, "--rank", str(rank), str(ranks), "--json", str(result)])
        for rank, result in enumerate(results)
    ]
    codes = [process.wait() for process in started]
    if any(codes):
        sys.exit(f"error: {ranks} ranks ended with exit codes {codes}; their errors are above")
    return [json.loads(result.read_text()) for result in results]


def is_rank(arguments: argparse.Namespace, measure_rank: Callable[[argparse.Namespace], Sequence[Row]]) -> bool:
    """Whether this process is to be one rank. Then it measures, and writes the rows for `rows_of_first_rank`."""
    if arguments.rank is None:
        return False
    arguments.json.write_text(json.dumps(list(map(asdict, measure_rank(arguments)))))
    return True


def rows_of_first_rank(script: str, ranks: int, options: Sequence[str]) -> list[Row]:
    """Run the ranks of a script, each of which ends with `is_rank`, and return what rank 0 measured."""
    with tempfile.TemporaryDirectory() as directory:
        found = run_ranks(script, ranks, options, Path(directory))
    return [Row(**row) for row in found[0]]
