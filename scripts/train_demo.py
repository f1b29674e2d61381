"""Train the demo checkpoint that the package ships: a 6 M parameter Llama that has read Python's standard library.

    python scripts/train_demo.py                     # train on the GPU, write demo/engine-demo
    python scripts/train_demo.py --smoke --out DIR   # the whole path in a few tiny steps, on the CPU
    python scripts/train_demo.py --evaluate DIR      # held-out perplexity of a checkpoint, as JSON

The data are the source files of the interpreter that runs this, so nothing is downloaded. The work lies in
`demo_model`, in this order: sources, conversations, tokenizer, model, training, evaluation, checkpoint, card.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what deterministic matrix products need; read by CUDA

import torch
import transformers
from demo_model.evaluation import evaluate_checkpoint
from demo_model.run import build_demo
from demo_model.settings import REPOSITORY, SMOKE, Settings
from demo_model.sources import held_out_text


def parse_arguments(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, Settings]:
    """The command line: what to do, and the settings of a training run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--out", type=pathlib.Path, default=REPOSITORY / "demo" / "engine-demo", help="directory to write"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="torch device")
    parser.add_argument("--smoke", action="store_true", help="tiny settings, for a test of the script on a CPU")
    parser.add_argument("--evaluate", type=pathlib.Path, metavar="DIR", help="evaluate a checkpoint, train none")
    for item in fields(Settings):
        option, description = "--" + item.name.replace("_", "-"), item.metadata["help"]
        if isinstance(item.default, bool):
            parser.add_argument(option, action="store_true", default=None, help=description)
        else:
            shown = f"{description} (default: {item.default})"
            parser.add_argument(option, type=type(item.default), default=None, help=shown)
    options = parser.parse_args(arguments)
    given = {item.name: value for item in fields(Settings) if (value := getattr(options, item.name)) is not None}
    return options, replace(SMOKE if options.smoke else Settings(), **given)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    options, settings = parse_arguments(arguments)
    device = torch.device(options.device)
    logging: Any = transformers.utils.logging
    logging.disable_progress_bar()
    if options.evaluate:
        print(json.dumps(evaluate_checkpoint(options.evaluate, held_out_text(), device), indent=2))
    else:
        build_demo(settings, options.out, device)


if __name__ == "__main__":
    main()
