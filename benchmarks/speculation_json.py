"""Measures what drafts gain where outputs must match a JSON schema: tool calls of agents, similar and never the same.

    python benchmarks/speculation_json.py [--model DIR] [--batch 1,4,16] [--speculators forced,ngram,suffix]
        [--drafts 5] [--length fixed,auto] [--whitespace 0] [--temperature 0] [--repeat 5] [--together]
        [--set KEY=VALUE] [--json FILE]

Each output is a list of four calls of three tools, by a schema with names, enumerations, bounded numbers and short
texts, after a prompt with a task of its own. Weights may be random (--set model.load_format=dummy). `forced` proposes
nothing itself, so that only tokens that the grammar forces are drafts; with the other speculators they are, too.

`plain` is the same load without a speculator, `gain` the median, over the runs, of the rate divided by that of plain.
With --together the cases of a batch take turns, each in an engine of its own that stays: on a machine that does other
work too, and with a small model. `tokens per step` is how many tokens a request gains in a step, `accepted` the share
of the verified drafts. `equal` is the share of requests with the tokens of plain decoding: 1 in float32; in shorter
types logits may differ in the last bit with the number of rows. All cases have the same prompts, which differ from
run to run; a first run, which does not count, is what `suffix` first learns from.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from attrs import frozen

from engine.cli.bench.report import Row, engine_settings, report, write
from engine.core import Engine, SamplingParams
from engine.core.grammars import Grammar
from engine.core.speculators import SpeculatedSequence, Speculator

MAX_TOKENS = 600
CALLS = 4


class Forced(Speculator[None]):
    """Proposes nothing itself."""

    api = "1"

    def propose(self, sequence: SpeculatedSequence, limit: int) -> Sequence[int]:
        return ()


@frozen
class Run:
    """A run of some prompts."""

    rate: float
    """Output tokens per second."""
    per_step: float
    """Tokens that a request gains in a step."""
    accepted: float
    """Share of the verified drafts."""
    outputs: list[tuple[int, ...]]


def call(name: str, **arguments: Any) -> dict[str, Any]:
    """The schema of a call of one tool."""
    properties = {"name": {"const": name}, "arguments": closed(arguments)}
    return closed(properties)


def closed(properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def schema() -> Grammar:
    """Lists of calls."""
    line = {"type": "integer", "minimum": 1, "maximum": 900}
    encoding = {"enum": ["utf-8", "latin-1"]}
    path = {"type": "string", "maxLength": 12}
    tools = [
        call("read_file", path=path, start_line=line, end_line=line, encoding=encoding),
        call("run_tests", path=path, verbose={"type": "boolean"}, timeout_seconds=line),
        call("search", pattern=path, recursive={"type": "boolean"}, max_results=line, encoding=encoding),
    ]
    return Grammar.json_schema(
        {"type": "array", "items": {"anyOf": tools}, "minItems": CALLS, "maxItems": CALLS},
    )


def prompts_of(engine: Engine, count: int, seed: int) -> list[list[int]]:
    """The tools, some calls, and a task of random words."""
    pick = random.Random(seed)
    words = ("read", "search", "test", "engine", "lines", "server", "core", "base", "all", "files", "tests", "fix")
    found = []
    for _ in range(count):
        path = f"src/{pick.choice(words)}.py"
        example = [{"name": "read_file", "arguments": {"path": path, "start_line": pick.randint(1, 900)}}]
        task = " ".join(pick.choices(words, k=12))
        found.append(
            engine.tokenizer.encode(f"# Tools: read_file, run_tests, search\n{json.dumps(example)}\n# {task}\n")
        )
    return found


def run(engine: Engine, prompts: list[list[int]], temperature: float) -> Run:
    params = SamplingParams(temperature=temperature, max_tokens=MAX_TOKENS, grammar=schema(), seed=1)
    before = engine.stats().speculation
    begin = time.perf_counter()
    found = [tuple(one.token_ids) for one in engine.generate(prompts, params)]
    seconds = time.perf_counter() - begin
    after = engine.stats().speculation
    tokens = sum(map(len, found))
    verified = accepted = 0
    if before is not None and after is not None:
        verified = sum(after.verified) - sum(before.verified)
        accepted = sum(after.accepted) - sum(before.accepted)
    return Run(tokens / seconds, tokens / (tokens - accepted), accepted / max(verified, 1), found)


def cases_of(args: argparse.Namespace, batch: int, settings: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The settings of each case."""
    usual = {**settings, "scheduler__max_running": batch, "grammar__options": {"max_whitespace": args.whitespace}}
    found = {"plain": usual}
    for length in args.length.split(","):
        for name in args.speculators.split(","):
            chosen = {"speculator": Forced if name == "forced" else name, "speculator__length": length}
            found[f"{length}, {name}"] = {**usual, **chosen, "speculator__max_drafts": args.drafts}
    return found


def measure(args: argparse.Namespace, batch: int, cases: dict[str, dict[str, Any]]) -> dict[str, list[Run]]:
    """All runs of each case but the first."""
    found: dict[str, list[Run]] = {case: [] for case in cases}
    seeds = range(1 + args.repeat)
    with ExitStack() as stack:
        engines: dict[str, Engine] = {}
        for seed in seeds if args.together else (0,):
            for case, settings in cases.items():
                if case not in engines:
                    if not args.together:
                        stack.close()
                    engines[case] = stack.enter_context(Engine(args.model, **settings))
                for one in (seed,) if args.together else seeds:
                    prompts = prompts_of(engines[case], max(6, 2 * batch), one)
                    found[case].append(run(engines[case], prompts, args.temperature))
    return {case: runs[1:] for case, runs in found.items()}


def rows_of(case: str, runs: list[Run], plain: list[Run]) -> list[Row]:
    rate, base = (statistics.median(one.rate for one in some) for some in (runs, plain))
    gain = statistics.median(one.rate / other.rate for one, other in zip(runs, plain, strict=True))
    per_step, accepted = (statistics.mean(getattr(one, name) for one in runs) for name in ("per_step", "accepted"))
    pairs = [
        pair for one, other in zip(runs, plain, strict=True) for pair in zip(one.outputs, other.outputs, strict=True)
    ]
    equal = statistics.mean(one == other for one, other in pairs)
    print(
        f"{case}: {rate:.0f} tokens/s, {gain:.2f} x, {per_step:.2f} tokens per step, accepted {accepted:.2f}, "
        f"equal {equal:.3f}",
        flush=True,
    )
    return [
        Row(
            metric="output tokens per second",
            value=round(rate, 1),
            unit="tokens/s",
            baseline=round(base, 1),
            baseline_name="plain",
            case=case,
        ),
        Row(metric="gain", value=round(gain, 3), unit="x", case=case),
        Row(metric="tokens per step", value=round(per_step, 2), unit="tokens", case=case),
        Row(metric="accepted", value=round(accepted, 3), unit="share", case=case),
        Row(metric="equal", value=round(equal, 3), unit="share", case=case),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--batch", default="1,4,16")
    parser.add_argument("--speculators", default="forced,ngram,suffix")
    parser.add_argument("--drafts", type=int, default=5)
    parser.add_argument("--length", default="fixed,auto")
    parser.add_argument("--whitespace", type=int, default=0)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--together", action="store_true")
    parser.add_argument("--set", action="append", default=[], dest="settings")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    settings: dict[str, Any] = {
        key.replace(".", "__"): value for key, _, value in (one.partition("=") for one in args.settings)
    }
    results: list[Row] = []
    for batch in map(int, args.batch.split(",")):
        runs = measure(args, batch, cases_of(args, batch, settings))
        for case, found in runs.items():
            results += rows_of(f"batch {batch}, {case}", found, runs["plain"])
    if args.json is not None:
        tokens = statistics.mean(len(output) for one in runs["plain"] for output in one.outputs)
        with Engine(args.model, **settings) as engine:
            described = {**engine_settings(engine), "drafts": args.drafts, "tokens per output": round(tokens, 1)}
        described |= {"set": ", ".join(args.settings), "together": args.together}
        described |= {"whitespace": args.whitespace, "temperature": args.temperature}
        write(args.json, report("speculation_json", engine.cache_info.device, results, described))
    return 0


if __name__ == "__main__":
    sys.exit(main())
