"""Check every causal language model of the installed transformers on a tiny random checkpoint: who serves it, and how
exactly. Takes some minutes.

    python scripts/architectures/run.py [MODEL_TYPE ...]

Writes scripts/architectures/verdicts.json after each one. Architectures that the file has for this version of
transformers are not checked again, unless named. `make docs` makes docs/architectures.md from it.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from pathlib import Path
from typing import Any

import torch
from attrs import asdict
from check import Verdict, check

from engine.plugins.models.fallback.library import causal_lms, version

VERDICTS = Path(__file__).resolve().parent / "verdicts.json"
SECONDS = 90
"""Time limit of one architecture."""


def judge(model_type: str, architecture: str) -> dict[str, Any]:
    """The verdict on one architecture, found in a process of its own, so that none can stop the others."""
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=lambda: send.send(asdict(check(model_type, architecture))))
    process.start()
    send.close()
    failed = asdict(Verdict(architecture=architecture, model_type=model_type, refusal="the check did not end"))
    try:
        found: dict[str, Any] = receive.recv() if receive.poll(SECONDS) else failed
        return found
    except EOFError:
        return failed
    finally:
        process.kill()
        process.join()


def main() -> None:
    wanted = sys.argv[1:]
    torch.set_num_threads(1)
    stored = json.loads(VERDICTS.read_text(encoding="utf-8")) if VERDICTS.is_file() else {}
    found = stored.get("verdicts", {}) if stored.get("transformers") == version() else {}
    known = causal_lms()
    check("llama", known["llama"])  # imports what all of the processes need
    for model_type, architecture in sorted(known.items()):
        if model_type in wanted or not (wanted or model_type in found):
            found[model_type] = judge(model_type, architecture)
            print(found[model_type], flush=True)
            kept = {name: found[name] for name in sorted(found) if name in known}
            VERDICTS.write_text(json.dumps({"transformers": version(), "verdicts": kept}, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
