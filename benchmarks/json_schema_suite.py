"""Runs the JSON-Schema test suite through every grammar backend: by matchers alone, and by engines over each executor.

    python benchmarks/json_schema_suite.py [--backend NAME] [--executor NAME] [--model NAME] [--sample N] [--json FILE]

First each schema is compiled, and its instances are matched: no invalid one may be accepted. Then each schema that a
backend takes is generated from, by a model of random weights and by the demo model, at temperature 0 and 1, four
choices each, whole and streamed, and what ends by itself is validated with `jsonschema`. With --sample, the demo model
generates from N of the schemas, and the model of random weights from 4 N, with uniproc from 16 N. Exits with 1 if
anything that a backend takes is not enforced.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import jsonschema
import jsonschema.validators
from attrs import define, field

import engine.demo
from engine.cli.bench.report import Row, report, write
from engine.core.device import find_device
from engine.core.engine import Engine
from engine.core.errors import EngineError
from engine.core.grammars import Grammar
from engine.core.types import SamplingParams
from engine.plugins.grammars.llguidance import LLGuidance
from engine.plugins.grammars.options import JsonOptions
from engine.plugins.grammars.xgrammar import XGrammar
from engine.testing.checkpoints import make_checkpoint
from engine.testing.grammar_cases import vocabulary
from engine.testing.json_schema_suite import SuiteSchema, Verdict, by_keyword, judge, read_suite

SUITE = Path(__file__).parent / "json_schema_suite" / "schemas.json"
BACKENDS: dict[str, Any] = {"llguidance": LLGuidance, "xgrammar": XGrammar}
EXECUTORS: dict[str, dict[str, Any]] = {
    "uniproc": {"executor": "uniproc"},
    "multiproc": {"executor": "multiproc"},
    "tp 2": {"executor": "tp", "executor__tensor_parallel": 2},
    "ray": {"executor": "ray"},
}
MODELS = ("random", "demo")
CHOICES = 4
MAX_TOKENS = 64
TOGETHER = 32
"""Streams at a time."""
DRAFTS = {
    "draft4": jsonschema.Draft4Validator,
    "draft6": jsonschema.Draft6Validator,
    "draft7": jsonschema.Draft7Validator,
    "draft2019-09": jsonschema.Draft201909Validator,
    "draft2020-12": jsonschema.Draft202012Validator,
}


def multiple_of(validator: Any, divisor: float, instance: object, _: object) -> Iterator[jsonschema.ValidationError]:
    """multipleOf of decimal numbers, which floats only approximate: 0.7875 is a multiple of 0.0001."""
    if validator.is_type(instance, "number") and (Fraction(str(instance)) / Fraction(str(divisor))).denominator != 1:
        yield jsonschema.ValidationError(f"{instance} is not a multiple of {divisor}")


EXACT = {draft: jsonschema.validators.extend(one, {"multipleOf": multiple_of}) for draft, one in DRAFTS.items()}
VERDICTS = ("enforced", "partly refused", "refused", "ignored")


@define
class Tally:
    """Outputs of one engine."""

    ended: int = 0
    cut: int = 0
    """Outputs that max_tokens ended."""
    unchecked: int = 0
    """Outputs that ended, which `jsonschema` cannot validate."""
    wrong: list[str] = field(factory=list)
    """Outputs that do not validate, with their schemas."""

    def add(self, schema: SuiteSchema, text: str, finish_reason: str | None) -> None:
        """Count an output, and validate one that has ended."""
        if finish_reason != "stop":
            self.cut += 1
            return
        self.ended += 1
        validator = EXACT[schema.draft](schema.schema, format_checker=jsonschema.FormatChecker())
        try:
            problems = [error.message for error in validator.iter_errors(json.loads(text))]
        except re.error:  # a pattern of ECMA 262 that Python cannot read
            self.unchecked += 1
            return
        except ValueError as error:
            problems = [str(error)]
        if problems:
            self.wrong.append(f"{json.dumps(schema.schema)[:300]}: {text!r}: {problems[0][:200]}")


def params(schema: SuiteSchema, temperature: float) -> SamplingParams:
    return SamplingParams(
        grammar=Grammar.json_schema(schema.schema), max_tokens=MAX_TOKENS, temperature=temperature, seed=7
    )


def whole(made: Engine, schemas: Sequence[SuiteSchema], tally: Tally) -> None:
    for temperature in (0.0, 1.0):
        each = [params(schema, temperature) for schema in schemas]
        done = made.generate([(5, 6, 7)] * len(schemas), each, n=CHOICES)
        for at, completion in enumerate(done):
            tally.add(schemas[at // CHOICES], completion.text, completion.finish_reason)


async def streamed(made: Engine, schemas: Sequence[SuiteSchema], tally: Tally) -> None:
    room = asyncio.Semaphore(TOGETHER)

    async def one(schema: SuiteSchema, temperature: float) -> None:
        async with room:
            text, reason = "", None
            async for delta in made.astream((5, 6, 7), params(schema, temperature)):
                text += delta.text
                reason = delta.finish_reason or reason
            tally.add(schema, text, reason)

    await asyncio.gather(*(one(schema, temperature) for schema in schemas for temperature in (0.0, 1.0)))


def run(backend: str, executor: str, model: str, checkpoint: str, schemas: Sequence[SuiteSchema]) -> Iterator[Row]:
    """Generate from every schema with one engine."""
    case = f"{backend}, {executor}, {model}"
    options: dict[str, Any] = {"cache__memory": "64MiB", "executor__device": "cpu", "model__dtype": "float32"}
    begun = time.perf_counter()
    with Engine(
        checkpoint, grammar=backend, grammar__options={"max_whitespace": 1}, **options, **EXECUTORS[executor]
    ) as made:
        for way in ("whole", "streamed"):
            tally = Tally()
            if way == "whole":
                whole(made, schemas, tally)
            else:
                asyncio.run(streamed(made, schemas, tally))
            for one in tally.wrong:
                print(f"INVALID ({case}, {way}): {one}", flush=True)
            yield Row(metric="schemas generated from", value=len(schemas), unit="", case=f"{case}, {way}")
            yield Row(metric="outputs", value=tally.ended + tally.cut, unit="outputs", case=f"{case}, {way}")
            yield Row(metric="ended by themselves", value=tally.ended, unit="outputs", case=f"{case}, {way}")
            yield Row(metric="not validated", value=tally.unchecked, unit="outputs", case=f"{case}, {way}")
            yield Row(metric="invalid", value=len(tally.wrong), unit="outputs", case=f"{case}, {way}")
    print(f"{case}: {len(schemas)} schemas in {time.perf_counter() - begun:.0f} s", flush=True)


def sample(schemas: Sequence[SuiteSchema], count: int | None, executor: str, model: str) -> Sequence[SuiteSchema]:
    """The schemas that one engine generates from, evenly spaced."""
    if count is None:
        return schemas
    times = 1 if model == "demo" else 16 if executor == "uniproc" else 4
    return schemas[:: max(len(schemas) // (count * times), 1)]


def matched(backend: str, schemas: Sequence[SuiteSchema]) -> tuple[list[Verdict], list[Row], dict[str, str]]:
    """What a backend makes of all schemas, without a model."""
    verdicts = list(judge(BACKENDS[backend](vocabulary(), JsonOptions(max_whitespace=1)), schemas))
    for verdict in verdicts:
        for instance in verdict.wrong:
            print(f"ACCEPTED ({backend}): {json.dumps(verdict.schema.schema)[:300]}: {json.dumps(instance)[:100]}")
    taken = [verdict for verdict in verdicts if verdict.compiled is not None]
    valid = sum(is_valid for verdict in taken for _, is_valid in verdict.schema.instances)
    invalid = sum(not is_valid for verdict in taken for _, is_valid in verdict.schema.instances)
    keywords = by_keyword(verdicts)
    count = Counter(keywords.values())
    figures = {
        "schemas": len(schemas),
        "schemas taken": len(taken),
        "invalid instances": invalid,
        "invalid instances accepted": sum(len(verdict.wrong) for verdict in taken),
        "valid instances": valid,
        "valid instances not accepted": sum(len(verdict.missed) for verdict in taken),
        "keywords": len(keywords),
    }
    rows = [Row(metric=metric, value=value, unit="", case=backend) for metric, value in figures.items()]
    rows += [
        Row(metric=f"keywords {one}", value=count[one], unit="", case=backend, share=count[one] / len(keywords))
        for one in VERDICTS
    ]
    return verdicts, rows, keywords


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=BACKENDS, action="append")
    parser.add_argument("--executor", choices=EXECUTORS, action="append")
    parser.add_argument("--model", choices=MODELS, action="append")
    parser.add_argument("--sample", type=int, help="number of schemas for the demo model")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows: list[Row] = []
    notes: dict[str, Any] = {"keywords": {}, "not run": {}}
    schemas = read_suite(SUITE)
    with tempfile.TemporaryDirectory() as directory:
        random = str(make_checkpoint(Path(directory) / "checkpoint", tokenizer=True))
        checkpoints = {"random": random, "demo": str(engine.demo.path())}
        for backend in args.backend or BACKENDS:
            verdicts, found, notes["keywords"][backend] = matched(backend, schemas)
            rows += found
            for row in found:
                print(f"{backend}: {row.metric}: {row.value:g}" + (f" ({row.share:.0%})" if row.share else ""))
            taken = [verdict.schema for verdict in verdicts if verdict.compiled is not None]
            for executor in args.executor or EXECUTORS:
                for model in args.model or MODELS:
                    try:
                        some = sample(taken, args.sample, executor, model)
                        rows += run(backend, executor, model, checkpoints[model], some)
                    except EngineError as error:
                        notes["not run"][f"{backend}, {executor}, {model}"] = str(error)
                        print(f"{backend}, {executor}, {model}: not run: {error}", flush=True)
    bad = sum(row.value for row in rows if row.metric in ("invalid", "invalid instances accepted", "keywords ignored"))
    generated = sum(row.value for row in rows if row.metric == "outputs")
    print(f"{generated:g} outputs; not enforced: {bad:g}")
    if args.json is not None:
        cpu = find_device("cpu")
        settings = {"choices": CHOICES, "max_tokens": MAX_TOKENS, "sample": args.sample, **notes}
        write(args.json, report("json-schema-suite", cpu.name, rows, settings))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
