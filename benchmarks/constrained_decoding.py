"""Measures decode steps of a model in which none, half and all of the rows must match a JSON schema.

    python benchmarks/constrained_decoding.py [--model llama-3.1-8b] [--batches 1,64,256] [--temperatures 0,1]
        [--quant fp8] [--json benchmarks/results/h200-constrained-decoding.json]

Random weights, and a vocabulary of random words, of which one in a hundred has a quotation mark, as in those of models.
Every second constrained row writes texts, the others numbers and words of a list; all for longer than is measured.
"idle" is the time of a step in which no kernel runs; "CPU" is the CPU time of the engine's process per step. "compile"
is the time until a grammar is ready: of the first one, which reads the tokenizer, of others, and of one that was
compiled before.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from models import MODELS, write_model, write_tokenizer

from engine.cli.bench.load import make_load, opened, random_tokens, run_load
from engine.cli.bench.profile import decoded, profile_requests
from engine.cli.bench.report import Row, engine_settings, report, write
from engine.core.config import load_config
from engine.core.engine import Engine
from engine.core.grammars import Grammar
from engine.core.types import Request, SamplingParams

INPUTS = 128
SHARES = {"none": 0.0, "half": 0.5, "all": 1.0}


def schema(name: str, *, texts: bool) -> Grammar:
    """A list of 2,000 objects: with a text each, or with values of other types."""
    values = {
        "kind": {"enum": ["new", "used", "sold", "returned"]},
        "count": {"type": "integer"},
        "present": {"type": "boolean"},
    }
    properties = {name: {"type": "string"}} if texts else {name: {"type": "number"}, **values}
    item = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return Grammar.json_schema({"type": "array", "items": item, "minItems": 2000})


def words(count: int) -> list[str]:
    """Different random words, half of them with a space before, one in a hundred with the end of a JSON string."""
    pick = random.Random(1)
    found: dict[str, None] = {}
    while len(found) < count:
        word = "".join(pick.choices("etaoinshrdlucmfwypvbgkjqxz", k=pick.randint(2, 9)))
        found[" " * pick.randint(0, 1) + word + (pick.choice(['"', '",']) if pick.random() < 0.01 else "")] = None
    return list(found)


def requests_of(engine: Engine, batch: int, share: float, temperature: float, outputs: int, name: str) -> list[Request]:
    """Requests of random prompts, of which a share has the grammar; the others never end either."""
    draw = random.Random(name)
    made = []
    for number in range(batch):
        constrained = number < share * batch
        params = SamplingParams(
            temperature=temperature,
            max_tokens=outputs,
            ignore_eos=not constrained,
            grammar=schema("name", texts=number % 2 == 0) if constrained else None,
        )
        prompt = random_tokens(draw, INPUTS, engine.vocab_size)
        made.append(Request(id=f"{name}-{number}", prompt=prompt, params=params, arrival=time.monotonic()))
    return made


def decode(engine: Engine, requests: Sequence[Request], steps: int) -> tuple[float, float]:
    """Seconds of a decode step, and CPU seconds of this process in it."""
    for request in requests:
        engine.add(request)
    made = dict.fromkeys((request.id for request in requests), 0)
    while min(made.values()) < 8:
        for output in engine.step():
            made[output.request] += len(output.tokens)
    wall, cpu, tokens = time.perf_counter(), time.process_time(), 0
    while tokens < steps * len(requests):
        tokens += sum(len(output.tokens) for output in engine.step())
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    for request in requests:
        engine.abort(request.id)
    while engine.has_work:
        engine.step()
    per_step = len(requests) / tokens
    return wall * per_step, cpu * per_step


def measure(
    engine: Engine, batches: Sequence[int], temperatures: Sequence[float], steps: int, rounds: int
) -> list[Row]:
    """All rows. Cases take turns; the median of the rounds counts."""
    rows = compile_times(engine)
    for temperature in temperatures:
        for batch in batches:
            shares = {name: share for name, share in SHARES.items() if batch > 1 or name != "half"}
            outputs = decoded(engine, batch, INPUTS, steps)
            found: dict[str, list[tuple[float, float]]] = {name: [] for name in shares}
            for number in range(rounds):
                for name, share in shares.items():
                    requests = requests_of(engine, batch, share, temperature, outputs, f"{batch} {name} {number}")
                    found[name].append(decode(engine, requests, steps))
            free = statistics.median(wall for wall, _ in found["none"])
            for name, share in shares.items():
                wall, cpu = (statistics.median(times) for times in zip(*found[name], strict=True))
                requests = requests_of(engine, batch, share, temperature, outputs, f"{batch} {name} profiled")
                profile = profile_requests(engine, f"batch {batch}, {name}", requests, steps)
                idle = wall * 1e6 - profile.busy
                case = f"temperature {temperature:g}, batch {batch}, {name} constrained"
                rows += [
                    Row(metric="decode step", case=case, value=wall * 1e3, unit="ms"),
                    Row(metric="more than free rows", case=case, value=100 * (wall / free - 1), unit="%"),
                    Row(metric="idle", case=case, value=idle, unit="us"),
                    Row(metric="CPU", case=case, value=cpu * 1e6, unit="us"),
                ]
                print(f"{case}: {wall * 1e3:.3f} ms, {100 * (wall / free - 1):+.1f} %, idle {idle:.0f} us", flush=True)
    return rows


def compile_times(engine: Engine) -> list[Row]:
    """Time until a grammar is ready."""

    def seconds(name: str) -> float:
        begin = time.perf_counter()
        engine.compile_grammar(SamplingParams(grammar=schema(name, texts=True)))
        return time.perf_counter() - begin

    times = {"first": seconds("first"), "others": statistics.median(seconds(f"name{number}") for number in range(20))}
    times["compiled before"] = statistics.median(seconds("first") for _ in range(20))
    for case, value in times.items():
        print(f"compile, {case}: {value * 1e3:.3f} ms", flush=True)
    return [Row(metric="compile", case=case, value=value * 1e3, unit="ms") for case, value in times.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3.1-8b", choices=MODELS)
    parser.add_argument("--batches", default="1,64,256")
    parser.add_argument("--temperatures", default="0,1")
    parser.add_argument("--steps", type=int, default=64, help="decode steps of a measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quant", default="none")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", dest="given")
    parser.add_argument("--json", type=Path, help="file to write the result to")
    arguments = parser.parse_args()
    batches = [int(text) for text in arguments.batches.split(",")]
    overrides: dict[str, Any] = {
        "model.load_format": "dummy",
        "model.max_len": 2048,
        "cache.prefix_caching": False,
        "scheduler.max_running": max(batches),
        "quant.name": arguments.quant,
    }
    overrides |= dict(text.split("=", 1) for text in arguments.given)
    with tempfile.TemporaryDirectory() as directory:
        path = write_model(Path(directory), arguments.model)
        vocab_size = MODELS[arguments.model]["vocab_size"]
        write_tokenizer(path, words(vocab_size - 256))
        (path / "generation_config.json").write_text(json.dumps({"eos_token_id": vocab_size - 1}))
        overrides["model.path"] = str(path)
        with opened(load_config(overrides=overrides).config) as engine:
            run_load(engine, make_load(max(batches), (INPUTS, INPUTS), (4, 4)), prefix="warm-up-")
            temperatures = [float(text) for text in arguments.temperatures.split(",")]
            rows = measure(engine, batches, temperatures, arguments.steps, arguments.rounds)
            settings = engine_settings(engine) | {"model": arguments.model, "quant": arguments.quant}
    settings |= {"inputs": INPUTS, "steps": arguments.steps, "rounds": arguments.rounds, "given": arguments.given}
    if arguments.json:
        write(arguments.json, report("constrained-decoding", engine.cache_info.device, rows, settings))


if __name__ == "__main__":
    main()
