"""Measures what drafts gain by how often they are accepted: output tokens per second next to plain decoding.

    python benchmarks/speculation.py [--model DIR] [--batch 1,8,32,64] [--drafts 1,3,5,7] [--acceptance 0,0.5,0.7,0.9]
        [--length fixed,auto] [--tokens 128] [--repeat 3] [--speculator NAME] [--set KEY=VALUE] [--json FILE]

Without --speculator, a scripted speculator proposes what the model generated without drafts, each token right with the
given probability. Random weights (--set model.load_format=dummy) are changed to make the model predictable: token t + 1
follows token t, by far the most likely one, whatever the number of rows. Otherwise the last bit of the logits, which
depends on the number of rows, would decide about tokens, and right drafts would be rejected. All layers compute as they
did.

`ideal` is the mean number of accepted drafts + 1: the gain if a step with drafts took as long as one without. `step` is
the time of a step. `equal` is the share of requests with the tokens of plain decoding.

With --speculator ngram or suffix, the prompts are Python files, each followed by its own beginning, which a model that
completes code repeats; --acceptance then has no meaning. A first run, which does not count, fills the prefix cache and
lets --length auto adapt to the case; its rate is reported separately.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import sys
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from attrs import frozen
from predictable import make_predictable

from engine.cli.bench.report import Row, engine_settings, report, write
from engine.core import Engine, SamplingParams
from engine.core.speculators import SpeculatedSequence, Speculator

ROOT = Path(__file__).parent.parent
PROMPT_TOKENS = 128
NUMBERS = [random.Random(number).random() for number in range(1 << 14)]
"""Which drafts are right, by chance."""


class Scripted(Speculator[None]):
    """Proposes what the model will generate, each token with probability `acceptance`, and else another token."""

    api = "1"
    by_prompt: ClassVar[dict[tuple[int, ...], Sequence[int]]] = {}
    """Prompt -> output."""
    outputs: ClassVar[dict[str, Sequence[int]]] = {}
    """Request id -> output."""
    acceptance: ClassVar[float] = 0.0

    def propose(self, sequence: SpeculatedSequence, limit: int) -> Sequence[int]:
        at = len(sequence.tokens) - sequence.prompt_length
        if (output := self.outputs.get(sequence.request_id)) is None:
            prompt = tuple(sequence.tokens[: sequence.prompt_length])
            output = self.outputs[sequence.request_id] = self.by_prompt.get(prompt, ())
        proposal = list(output[at : at + limit])
        start = zlib.crc32(sequence.request_id.encode()) + at * self.spec.max_drafts
        for place in range(len(proposal)):
            if NUMBERS[(start + place) % len(NUMBERS)] >= self.acceptance:
                proposal[place] = (proposal[place] + 7) % self.spec.vocab_size
        return proposal


@frozen
class Run:
    """A run of some prompts."""

    rate: float
    """Output tokens per second."""
    step: float
    """Milliseconds."""
    outputs: list[tuple[int, ...]]


def run(engine: Engine, prompts: list[list[int]], tokens: int) -> Run:
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    before, begin = engine.stats().steps, time.perf_counter()
    found = [tuple(one.token_ids) for one in engine.generate(prompts, params)]
    seconds = time.perf_counter() - begin
    return Run(len(prompts) * tokens / seconds, 1e3 * seconds / (engine.stats().steps - before), found)


def prompts_of(engine: Engine, count: int, *, texts: bool) -> list[list[int]]:
    """Random tokens, or tokens of files."""
    if not texts:
        pick = random.Random(1)
        return [[pick.randrange(engine.vocab_size) for _ in range(PROMPT_TOKENS)] for _ in range(count)]
    found = []
    for file in sorted((ROOT / "core").rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        if len(text) > 2000 and len(found) < count:
            found.append(engine.tokenizer.encode(text[:1500] + "\n\n\n" + text[:150]))
    return found


def measure(engine: Engine, prompts: list[list[int]], args: argparse.Namespace, case: str, plain: Run) -> list[Row]:
    """Rows of one engine with drafts and one batch."""
    before = engine.stats().speculation
    first, *runs = [run(engine, prompts, args.tokens) for _ in range(1 + args.repeat)]
    after = engine.stats().speculation
    assert before is not None
    assert after is not None
    rate, step = (statistics.median(getattr(one, name) for one in runs) for name in ("rate", "step"))
    equal = statistics.mean(one == other for one, other in zip(runs[0].outputs, plain.outputs, strict=True))
    verified, accepted = (
        [new - old for new, old in zip(getattr(after, name), getattr(before, name), strict=True)]
        for name in ("verified", "accepted")
    )
    ideal = 1 + (sum(accepted) / verified[0] if verified[0] else 0.0)
    shares = [round(right / count, 2) for right, count in zip(accepted, verified, strict=True) if count]
    print(
        f"{case}: {rate:.0f} tokens/s, {rate / plain.rate:.3f} x, first run {first.rate / plain.rate:.3f} x, ideal"
        f" {ideal:.2f} x where there are drafts, step {step:.2f} ms, {step / plain.step:.3f} x, equal {equal:.2f},"
        f" accepted by position {shares}",
        flush=True,
    )
    return [
        Row(
            metric="output tokens per second",
            value=round(rate, 1),
            unit="tokens/s",
            baseline=round(plain.rate, 1),
            baseline_name="plain",
            case=case,
        ),
        Row(
            metric="step",
            value=round(step, 3),
            unit="ms",
            baseline=round(plain.step, 3),
            baseline_name="plain",
            case=case,
        ),
        Row(metric="of the first run", value=round(first.rate, 1), unit="tokens/s", case=case),
        Row(metric="ideal", value=round(ideal, 2), unit="x", case=case),
        Row(metric="equal", value=round(equal, 3), unit="share", case=case),
        *(
            Row(metric=f"accepted at position {place}", value=share, unit="share", case=case)
            for place, share in enumerate(shares, 1)
        ),
    ]


def numbers(text: str) -> list[float]:
    return [float(one) for one in text.split(",")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--batch", type=numbers, default="1,8,32,64")
    parser.add_argument("--drafts", type=numbers, default="1,3,5,7")
    parser.add_argument("--acceptance", type=numbers, default="0,0.5,0.7,0.9")
    parser.add_argument("--length", default="fixed,auto")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--speculator", help="a plugin's name, instead of the scripted one")
    parser.add_argument("--set", action="append", default=[], dest="settings")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    settings: dict[str, Any] = {
        key.replace(".", "__"): value for key, _, value in (one.partition("=") for one in args.settings)
    }
    batches = [int(one) for one in args.batch]

    if args.speculator is None and settings.get("model__load_format") == "dummy":
        make_predictable()
    plain: dict[int, Run] = {}
    without = {key: value for key, value in settings.items() if not key.startswith("speculator__")}
    with Engine(args.model, **without) as engine:
        described = engine_settings(engine)
        machine = engine.cache_info.device
        prompts = prompts_of(engine, max(batches), texts=args.speculator is not None)
        for batch in batches:
            runs = [run(engine, prompts[:batch], args.tokens) for _ in range(1 + args.repeat)][1:]
            rate, step = (statistics.median(getattr(one, name) for one in runs) for name in ("rate", "step"))
            plain[batch] = Run(rate, step, runs[0].outputs)
            print(f"batch {batch}: {rate:.0f} tokens/s without drafts, step {step:.2f} ms", flush=True)
    results = [
        Row(metric="output tokens per second", value=round(one.rate, 1), unit="tokens/s", case=f"batch {batch}, plain")
        for batch, one in plain.items()
    ]
    for length, drafts in itertools.product(args.length.split(","), map(int, args.drafts)):
        chosen = args.speculator or Scripted
        given = {"speculator": chosen, "speculator__length": length, "speculator__max_drafts": drafts}
        with Engine(args.model, **settings, **given) as engine:
            for batch in batches:
                some = prompts[:batch]
                Scripted.by_prompt = dict(zip(map(tuple, some), plain[batch].outputs, strict=True))
                Scripted.outputs.clear()
                for Scripted.acceptance in args.acceptance if args.speculator is None else [0.0]:
                    case = f"batch {batch}, {drafts} drafts, {length}, " + (
                        args.speculator or f"acceptance {Scripted.acceptance:g}"
                    )
                    results += measure(engine, some, args, case, plain[batch])
    if args.json is not None:
        write(args.json, report("speculation", machine, results, {**described, "tokens": args.tokens}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
