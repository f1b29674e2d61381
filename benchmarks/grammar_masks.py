"""Measures the time to make the masks of a step, one after the other and in parallel, for rows with a JSON schema.

    python benchmarks/grammar_masks.py [--vocab 128000] [--rows 64,256] [--json FILE]

Needs no model: the vocabulary is made up of words. `wall` is the time that a step waits, `cpu` the time of all threads
of the process, both the median of several steps, each after one more token of every row. "as a batch" is the batch
method of a backend, which may make the masks one after the other where that is quicker.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from engine.cli.bench.report import Row, report, write
from engine.core.device import find_device
from engine.core.grammars import Grammar, GrammarMatcher, GrammarVocabulary
from engine.core.host import Host
from engine.plugins.grammars.llguidance import LLGuidance
from engine.plugins.grammars.options import JsonOptions
from engine.plugins.grammars.xgrammar import XGrammar

STEPS = 24
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "size": {"type": "number"},
    },
    "required": ["name", "tags", "size"],
    "additionalProperties": False,
}


def vocabulary(size: int) -> GrammarVocabulary:
    """All bytes, words with and without a space before them, and an end-of-sequence token."""
    pick = random.Random(1)
    tokens = {bytes([byte]): None for byte in range(256)}
    while len(tokens) < size - 1:
        word = "".join(pick.choices("etaoinshrdlucmfwypvbgkjqxz", k=pick.randint(2, 9)))
        tokens[(" " * pick.randint(0, 1) + word + pick.choice(["", "", '"', ",", '",'])).encode()] = None
    eos = frozenset({size - 1})
    return GrammarVocabulary(
        tokens=(*tokens, b"<eos>"), special_tokens=eos, eos_tokens=eos, encode=lambda text: list(text.encode())
    )


def one_by_one(matchers: Sequence[GrammarMatcher], masks: npt.NDArray[np.int32]) -> None:
    for matcher, mask in zip(matchers, masks, strict=True):
        matcher.fill_mask(mask)


def in_batches(matchers: Sequence[GrammarMatcher], masks: npt.NDArray[np.int32]) -> None:
    assert not any(type(matchers[0]).fill_batch(matchers, masks))


def measure(
    fill: Callable[..., None], matchers: Sequence[GrammarMatcher], masks: npt.NDArray[np.int32]
) -> tuple[float, float]:
    """Milliseconds (wall, cpu) of the median step."""
    pick = random.Random(2)
    walls, cpus = [], []
    for _ in range(STEPS):
        wall, cpu = time.perf_counter(), time.process_time()
        fill(matchers, masks)
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
        for matcher, mask in zip(matchers, masks, strict=True):
            may = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            assert matcher.accept(int(pick.choice(may)))
    return statistics.median(walls) * 1e3, statistics.median(cpus) * 1e3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=128_000)
    parser.add_argument("--rows", default="64,256")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    made = vocabulary(args.vocab)
    results = []
    for name, backend in (("llguidance", LLGuidance), ("xgrammar", XGrammar)):
        compiled = backend(made, JsonOptions()).compile(Grammar.json_schema(SCHEMA))
        for rows in map(int, args.rows.split(",")):
            masks = np.zeros((rows, -(-args.vocab // 32)), np.int32)
            for way, fill in (("one by one", one_by_one), ("as a batch", in_batches)):
                wall, cpu = measure(fill, [compiled.matcher() for _ in range(rows)], masks)
                case = f"{name}, {rows} rows, {way}"
                print(f"{case}: wall {wall:.2f} ms, cpu {cpu:.2f} ms", flush=True)
                results += [
                    Row(metric=metric, value=round(value, 3), unit="ms", case=case)
                    for metric, value in (("wall", wall), ("cpu", cpu))
                ]
    if args.json is not None:
        settings = {"vocab": args.vocab, "steps": STEPS, "cores": Host().cores()}
        write(args.json, report("grammar-masks", find_device("cpu").name, results, settings))
    return 0


if __name__ == "__main__":
    sys.exit(main())
