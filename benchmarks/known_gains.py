"""Measures what each gain that studies of LLM engines report is worth here: each on and off, in one run.

    python benchmarks/known_gains.py [--model llama-3.1-8b | demo] [--only NAME,...] [--set KEY=VALUE ...]
        [--repeat 3] [--json benchmarks/results/h200-known-gains.json]

"On" is the engine with its defaults, but without prefix cache, unless the name of the gain says otherwise; "off"
changes a setting, or replaces one function by a plain way of doing the same (`known_gains_off.py`). Each case has a
process of its own, and runs once per round, even if several gains share it; the median of the rounds counts. A case
that the engine refuses is listed under "refused", with the message.

Loads: decode (many requests of 128 tokens in and 128 out), text (the same from text to text, in one process), prefix
(requests that share a long prompt), arrivals (long prompts that arrive while others decode).
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import known_gains_off as off
from ablation import SeveralSteps
from attrs import Factory, frozen
from models import MODELS, write_model
from own_process import print_result, run_in_own_process

from engine.cli.bench.level import percentile
from engine.cli.bench.load import Load, make_load, opened, random_tokens, run_load
from engine.cli.bench.report import Row, engine_settings, report, write
from engine.core.config import load_config
from engine.core.engine import Engine
from engine.core.types import Request, SamplingParams

OVERLAPPING = {"scheduler.overlap": "on"}
SERIAL = {"scheduler.overlap": "off"}


@frozen(kw_only=True)
class Sizes:
    """How much work each load is."""

    requests: int
    shared: int
    """Requests of the load `prefix`."""
    prefix: int
    """Tokens of the prompt that they share."""
    arriving: int
    """Long prompts of the load `arrivals`."""
    long: int
    """Tokens of each."""
    max_len: int


FULL = Sizes(requests=512, shared=256, prefix=2048, arriving=8, long=16_384, max_len=20_480)
CPU = Sizes(requests=128, shared=64, prefix=512, arriving=4, long=1536, max_len=2048)
SMALL = Sizes(requests=4, shared=2, prefix=32, arriving=1, long=64, max_len=512)
SIZES = {"full": FULL, "cpu": CPU, "small": SMALL}


@frozen(kw_only=True)
class Case:
    """One way of running the engine: settings, decode steps per submission, and what is replaced."""

    load: str = "decode"
    settings: dict[str, Any] = Factory(dict)
    steps: int = 1
    replaced: Callable[[], Any] = nullcontext
    """A context manager in which the plain way is used."""
    texts: bool = True
    """For the load `text`: whether this process turns text into tokens and tokens into text."""


GAINS: dict[str, tuple[Case, Case]] = {
    "multi-step (8 at once), no overlap": (Case(settings=SERIAL, steps=8), Case(settings=SERIAL)),
    "multi-step (8 at once), overlap": (Case(settings=OVERLAPPING, steps=8), Case(settings=OVERLAPPING)),
    "overlap of planning and device": (Case(settings=OVERLAPPING), Case(settings=SERIAL)),
    "text outside the engine's process": (Case(load="text", texts=False), Case(load="text")),
    "object reuse: batch kept between steps": (Case(), Case(replaced=off.batch_built_anew)),
    "object reuse: outputs are msgspec Structs": (Case(), Case(replaced=off.outputs_as_attrs)),
    "chunked prefill": (
        Case(load="arrivals"),
        Case(load="arrivals", settings={"scheduler.max_batch_tokens": "whole prompts"}),
    ),
    "copies that do not block": (Case(), Case(replaced=off.blocking_copies)),
    "greedy sampling path": (Case(), Case(replaced=off.no_greedy_path)),
    "CUDA graphs": (Case(), Case(settings={"executor.graphs": "off"})),
    "fused kernels": (Case(), Case(settings={"executor.kernels": "plain"})),
    "prefix cache": (Case(load="prefix", settings={"cache.prefix_caching": True}), Case(load="prefix")),
    "gc.freeze": (Case(), Case(replaced=off.no_gc_freeze)),
}
"""Gain -> (on, off)."""


def measure(case: Case, model: str, given: dict[str, str], sizes: Sizes) -> dict[str, Any]:
    """Figures of one case, in this process: metric -> (value, unit); machine and settings."""
    policy = None
    if case.steps > 1:
        policy = SeveralSteps()
        policy.count = case.steps
    overrides: dict[str, Any] = {
        "model.load_format": "auto" if model == "demo" else "dummy",
        "model.max_len": sizes.max_len,
        "cache.prefix_caching": False,
        "scheduler.max_running": 256,
    }
    overrides |= given | case.settings
    if overrides.get("scheduler.max_batch_tokens") == "whole prompts":
        overrides["scheduler.max_batch_tokens"] = sizes.arriving * sizes.long
    with tempfile.TemporaryDirectory() as directory, case.replaced():
        if model != "demo":
            overrides["model.path"] = str(write_model(Path(directory), model, tokenizer=True))
        with opened(load_config(overrides=overrides).config, policy) as engine:
            figures = LOADS[case.load](engine, case, sizes)
    return {"figures": figures, "machine": engine.cache_info.device, "settings": engine_settings(engine)}


Figures = dict[str, tuple[float, str]]


def decode(engine: Engine, case: Case, sizes: Sizes) -> Figures:
    """Many short requests, added before the first step."""
    return _rate(engine, make_load(sizes.requests, (128, 128), (128, 128)))


def prefix(engine: Engine, case: Case, sizes: Sizes) -> Figures:
    """Requests whose prompts are alike but for their last 16 tokens."""
    load = make_load(sizes.shared, (sizes.prefix + 16,) * 2, (32, 32))
    prompts = load.prompts(engine.vocab_size)
    return _rate(engine, load, [prompts[0][: sizes.prefix] + prompt[sizes.prefix :] for prompt in prompts])


def _rate(engine: Engine, load: Load, prompts: list[tuple[int, ...]] | None = None) -> Figures:
    measured = run_load(engine, load, prefix="measured-", prompts=prompts)
    return {"output tokens a second": (measured.output_tokens / measured.seconds, "tokens/s")}


def text(engine: Engine, case: Case, sizes: Sizes) -> Figures:
    """From texts to texts in the process that steps the engine; without texts: what is left when others do that."""
    load = make_load(sizes.requests, (128, 128), (128, 128))
    prompts = load.prompts(engine.vocab_size)
    encode, decode = engine.tokenizer.encode, engine.tokenizer.decode
    texts = [decode(encode(decode(prompt))[:120]) for prompt in prompts]  # about 128 tokens, whatever the vocabulary
    prompts = [tuple(encode(one)) for one in texts]
    params = SamplingParams(temperature=0.0, max_tokens=128, ignore_eos=True)
    if not case.texts:
        return _rate(engine, load, prompts)
    begin = time.perf_counter()
    completions = engine.generate(texts, params)
    seconds = time.perf_counter() - begin
    return {"output tokens a second": (sum(len(one.token_ids) for one in completions) / seconds, "tokens/s")}


def arrivals(engine: Engine, case: Case, sizes: Sizes) -> Figures:
    """32 requests decode; long prompts arrive together: their TTFT, and the time between tokens of the others."""
    for prompt in (sizes.long // 2, 64):  # what the first long prompt would otherwise compile
        run_load(engine, make_load(1, (prompt, prompt), (2, 2)), prefix=f"first-{prompt}-")
    draw = make_load(32, (64, 64), (128, 128))
    for request in draw.requests(engine.vocab_size, "decoding-"):
        engine.add(request)
    tokens = random.Random(0)
    gaps: list[float] = []
    first: list[float] = []
    seen: dict[str, float] = {}
    added = 0.0
    steps = 0
    while engine.has_work:
        outputs = engine.step()
        now = time.perf_counter()
        steps += 1
        for output in outputs:
            if not output.tokens:
                continue
            if output.request.startswith("decoding-"):
                if output.request in seen:
                    gaps.append(now - seen[output.request])
                seen[output.request] = now
            elif output.request not in seen:
                first.append(now - added)
                seen[output.request] = now
        if steps == 40:
            added = time.perf_counter()
            for number in range(sizes.arriving):
                prompt = random_tokens(tokens, sizes.long, engine.vocab_size)
                params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
                engine.add(Request(id=f"long-{number}", prompt=prompt, params=params, arrival=time.monotonic()))
    return {
        "ITL p50 of the others": (percentile(sorted(gaps), 0.5) * 1e3, "ms"),
        "ITL maximum of the others": (max(gaps) * 1e3, "ms"),
        "TTFT p50 of long prompts": (percentile(sorted(first), 0.5) * 1e3, "ms"),
        "TTFT maximum of long prompts": (max(first) * 1e3, "ms"),
    }


LOADS: dict[str, Callable[[Engine, Case, Sizes], Figures]] = {
    "decode": decode,
    "prefix": prefix,
    "text": text,
    "arrivals": arrivals,
}


def run_case(arguments: argparse.Namespace, name: str, side: str) -> dict[str, Any]:
    """Measure one side of a gain in a process of its own: what `measure` returns, or {"refused": message}."""
    options = ["--here", "--only", name, "--side", side, "--model", arguments.model, "--size", arguments.size]
    return run_in_own_process(__file__, [*options, *(f"--set={text}" for text in arguments.given)])


@frozen
class Runs:
    """One way of running, and what it measured."""

    case: Case
    name: str
    """A gain of which it is a side; several may share it."""
    side: str
    results: list[dict[str, Any]] = Factory(list)

    @property
    def refused(self) -> str:
        """The message with which the engine refuses the case; "" if it runs."""
        sentence: str = self.results[-1].get("refused", "")
        return sentence


def run_all(arguments: argparse.Namespace, names: list[str]) -> dict[str, tuple[Runs, Runs]]:
    """Run both sides of all gains, in as many rounds as asked for. Gain -> (on, off)."""
    every: list[Runs] = []
    sides: dict[str, list[Runs]] = {name: [] for name in names}
    for name in names:
        for side, case in zip(("on", "off"), GAINS[name], strict=True):
            same = [runs for runs in every if runs.case == case]
            if not same:
                same = [Runs(case, name, side)]
                every += same
            sides[name] += same
    for number in range(arguments.repeat):
        for runs in every:
            if not (runs.results and runs.refused):
                runs.results.append(run_case(arguments, runs.name, runs.side))
                print(f"round {number + 1}: {runs.name}, {runs.side}: {runs.results[-1].get('figures')}", flush=True)
    return {name: (on, off) for name, (on, off) in sides.items()}


def rows_of(name: str, on: list[dict[str, Any]], without: list[dict[str, Any]]) -> list[Row]:
    """The medians of both sides, and by how much the first is better."""
    rows = []
    for metric, (_, unit) in on[0]["figures"].items():
        values = [median(run["figures"][metric][0] for run in runs) for runs in (on, without)]
        rows += [
            Row(metric=metric, case=f"{name}: {side}", value=value, unit=unit)
            for side, value in zip(("on", "off"), values, strict=True)
        ]
        more = values[0] / values[1] if unit == "tokens/s" else values[1] / values[0]
        rows.append(Row(metric=f"gain, {metric}", case=name, value=100 * (more - 1), unit="%"))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3.1-8b", choices=[*MODELS, "demo"])
    parser.add_argument("--size", default="full", choices=SIZES, help="how much work; cpu: for a few cores")
    parser.add_argument("--repeat", type=int, default=3, help="rounds")
    parser.add_argument("--only", default=";".join(GAINS), metavar="NAME;...", help="of " + "; ".join(GAINS))
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", dest="given")
    parser.add_argument("--json", type=Path, help="file to write the result to")
    parser.add_argument("--here", action="store_true", help="in this process: one side of one gain, printed as JSON")
    parser.add_argument("--side", choices=["on", "off"], default="on")
    arguments = parser.parse_args()
    names = arguments.only.split(";")
    unknown = [name for name in names if name not in GAINS]
    if unknown:
        parser.error(f"unknown gains {', '.join(unknown)}; known: {'; '.join(GAINS)}")
    if arguments.here:
        case = GAINS[names[0]][arguments.side == "off"]
        given = dict(text.split("=", 1) for text in arguments.given)
        print_result(lambda: measure(case, arguments.model, given, SIZES[arguments.size]))
        return

    rows: list[Row] = []
    refused: dict[str, str] = {}
    machine, settings = "", {}
    for name, (on, without) in run_all(arguments, names).items():
        if on.refused or without.refused:
            refused[name] = on.refused or without.refused
            print(f"{name}: {refused[name]}", flush=True)
            continue
        machine, settings = on.results[0]["machine"], settings or on.results[0]["settings"]
        measured = rows_of(name, on.results, without.results)
        for row in measured:
            print(f"{row.case or '':48} {row.metric:40} {row.value:12,.1f} {row.unit}", flush=True)
        rows += measured
    if not rows:
        sys.exit("error: no gain could be measured; the refusals are above")
    if arguments.json:
        settings |= {"model": arguments.model, "size": arguments.size, "repeat": arguments.repeat}
        settings |= {"given": arguments.given, "refused": refused}
        write(arguments.json, report("known-gains", machine, rows, settings))


if __name__ == "__main__":
    main()
