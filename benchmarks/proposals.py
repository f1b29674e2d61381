"""Measures how well speculators propose, on real texts and without a model: tokens per step, acceptance and time.

    python benchmarks/proposals.py [--drafts 5] [--json FILE]

Three loads, with the tokenizer of the demo model:

- edits: commits of this repository that change a Python file. Prompt: the file before; output: the file after.
  "prediction": the file before as a predicted output, without a speculator.
- calls: lists of tool calls with random arguments, as JSON. Prompt: random letters; output: the list.
- files: test files of this repository. Prompt: the first 60 tokens; output: the rest.

"tokens per step": tokens of the output per step, 1 without drafts and at most drafts + 1. "acceptance": the share of
the proposed tokens that are accepted. "us": the median time of a proposal.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from engine.cli.bench.report import Row, report, write
from engine.core.config import demo_model
from engine.core.device import find_device
from engine.core.speculators import PredictedOutput, SpeculatedSequence, Speculator, SpeculatorSpec
from engine.core.text import Tokenizer
from engine.core.tokens import Tokens
from engine.plugins.speculators.ngram import Ngram, NgramOptions
from engine.plugins.speculators.suffix import Suffix, SuffixOptions

ROOT = Path(__file__).parent.parent
COMMIT = "fce0ed9"
"""The texts are those of this commit, and of those before it."""
MAX_CHARS = 14_000
Request = tuple[list[int], list[int]]
"""Tokens of prompt and output."""


def git(*arguments: str) -> str:
    return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True).stdout


def edits(tokenizer: Tokenizer, count: int = 60) -> Iterator[Request]:
    """Files before and after a commit, of which there is one per commit."""
    pick = random.Random(1)
    for commit in git("log", "--no-merges", "--format=%H", COMMIT).split():
        if count == 0:
            return
        names = git("diff-tree", "-r", "--diff-filter=M", "--name-only", "--no-commit-id", commit).split()
        names = [name for name in names if name.endswith(".py")]
        if names:
            name = pick.choice(names)
            before, after = git("show", f"{commit}^:{name}"), git("show", f"{commit}:{name}")
            if before != after and 0 < len(before) <= MAX_CHARS and len(after) <= MAX_CHARS:
                count -= 1
                yield tokenizer.encode(before), tokenizer.encode(after)


def calls(tokenizer: Tokenizer, count: int = 150) -> Iterator[Request]:
    """Lists of tool calls."""
    pick = random.Random(4)
    for _ in range(count):
        found = [
            {
                "name": pick.choice(["read_file", "write_file", "run_tests", "search", "list_dir"]),
                "arguments": {
                    "path": f"src/{pick.choice(['core', 'server', 'tests'])}/{pick.choice(['base', 'engine'])}.py",
                    "start_line": pick.randint(1, 900),
                    "options": {"recursive": pick.random() < 0.5, "encoding": "utf-8"},
                },
            }
            for _ in range(pick.randint(2, 5))
        ]
        prompt = "".join(pick.choices("abcdefgh ", k=60))
        yield tokenizer.encode(prompt), tokenizer.encode(json.dumps(found, indent=1))


def files(tokenizer: Tokenizer, count: int = 70) -> Iterator[Request]:
    """Test files."""
    names = git("ls-tree", "-r", "--name-only", COMMIT, "tests/core", "tests/plugins").split()
    names = [name for name in names if name.endswith(".py")]
    for name in random.Random(4).sample(names, count):
        tokens = tokenizer.encode(git("show", f"{COMMIT}:{name}")[:8000])
        yield tokens[:60], tokens[60:]


def replay(speculator: Speculator[Any], requests: list[Request], drafts: int) -> tuple[float, float, float]:
    """(tokens per step, acceptance, median seconds of a proposal)."""
    steps = made = proposed = accepted = 0
    times = []
    for number, (prompt, output) in enumerate(requests):
        tokens, at = list(prompt), 0
        sequence = SpeculatedSequence(request_id=str(number), tokens=tokens, prompt_length=len(prompt))
        while at < len(output):
            begin = time.perf_counter()
            proposal = speculator.propose(sequence, drafts)
            times.append(time.perf_counter() - begin)
            right = 0
            while right < min(len(proposal), len(output) - at) and proposal[right] == output[at + right]:
                right += 1
            steps, proposed, accepted = steps + 1, proposed + len(proposal), accepted + right
            gained = output[at : at + right + 1]
            tokens += gained
            at, made = at + len(gained), made + len(gained)
        speculator.finished(str(number))
    return made / steps, accepted / max(proposed, 1), statistics.median(times)


class Predicting(Speculator[None]):
    """Proposes from the prompt as the predicted output."""

    api = "1"
    _number = ""

    def propose(self, sequence: SpeculatedSequence, limit: int) -> Sequence[int]:
        if sequence.request_id != self._number:
            self._number, self._output = sequence.request_id, list[int]()
            self._prediction = PredictedOutput(Tokens(sequence.tokens[: sequence.prompt_length]))
        self._output += sequence.tokens[sequence.prompt_length + len(self._output) :]
        return self._prediction.propose(self._output, limit)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafts", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    tokenizer = Tokenizer.open(demo_model())
    spec = SpeculatorSpec(vocab_size=10**6, max_len=10**6, max_drafts=args.drafts)
    results = []
    for load in (edits, calls, files):
        requests = list(load(tokenizer))
        speculators: dict[str, Speculator[Any]] = {
            "ngram": Ngram(spec, NgramOptions()),
            "suffix": Suffix(spec, SuffixOptions()),
        }
        if load is edits:
            speculators["prediction"] = Predicting(spec)
        for name, speculator in speculators.items():
            per_step, acceptance, seconds = replay(speculator, requests, args.drafts)
            case = f"{load.__name__}, {name}"
            print(
                f"{case}: {per_step:.2f} tokens per step, acceptance {acceptance:.2f}, {seconds * 1e6:.1f} us",
                flush=True,
            )
            results += [
                Row(metric="tokens per step", value=round(per_step, 2), unit="tokens", case=case),
                Row(metric="acceptance", value=round(acceptance, 2), unit="share", case=case),
                Row(metric="time of a proposal", value=round(seconds * 1e6, 1), unit="us", case=case),
            ]
    if args.json is not None:
        write(
            args.json, report("proposals", find_device("cpu").name, results, {"drafts": args.drafts, "texts": COMMIT})
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
