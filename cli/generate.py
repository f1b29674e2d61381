"""`engine generate`: continue one prompt."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import attrs
import msgspec
import typer

from engine.cli.json_output import only_json
from engine.cli.opening import open_engine
from engine.cli.options import OFFLINE, configured, sampled
from engine.core.config import Resolved
from engine.core.errors import ExecutorError, InvalidRequestError

if TYPE_CHECKING:
    from engine.core.engine import Engine
    from engine.core.types import SamplingParams


@configured(without=OFFLINE, before="prompt")
@sampled(without=("prompt_logprobs",))
def generate(
    resolved: Resolved,
    sampling: dict[str, Any],
    prompt: Annotated[
        str | None, typer.Argument(help="Text to continue; - or none: standard input.", show_default=False)
    ] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(help="File with the text to continue, unchanged.", metavar="FILE")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON line: text, token_ids, finish_reason, usage.")
    ] = False,
) -> None:
    """Continue a prompt, printing the text as it comes."""
    text = read_prompt(prompt, prompt_file)
    if "logprobs" in sampling and not as_json:
        raise InvalidRequestError("--logprobs needs --json, where they are printed", "logprobs")

    if as_json:
        with only_json() as print_json, open_engine(resolved, live=False) as engine:
            print_json(completion(engine, text, attrs.evolve(engine.default_params, **sampling)))
        return
    with open_engine(resolved) as engine:
        print_stream(engine, text, attrs.evolve(engine.default_params, **sampling))


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """The prompt from the argument, the file or standard input. Raises InvalidRequestError if there is none."""
    if prompt is not None and file is not None:
        raise InvalidRequestError(
            "PROMPT and --prompt-file exclude each other; give one of them (and the model by --model)", "prompt"
        )
    if prompt is not None and prompt != "-":
        return prompt
    if file is None and prompt is None and sys.stdin.isatty():
        raise InvalidRequestError("there is no prompt; give PROMPT, --prompt-file FILE or pipe the text in", "prompt")
    try:
        return sys.stdin.buffer.read().decode() if file is None else file.read_bytes().decode()
    except OSError as error:
        raise InvalidRequestError(f"--prompt-file {file} cannot be read: {error.strerror}", "prompt") from error
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"{file or 'standard input'} is not UTF-8 text: {error}", "prompt") from error


def completion(engine: Engine, prompt: str, params: SamplingParams) -> dict[str, Any]:
    """The completion, as plain data for JSON."""
    done = engine.generate([prompt], params)[0]
    if done.error is not None:
        raise ExecutorError(done.error)
    result: dict[str, Any] = {
        "text": done.text,
        "token_ids": list(done.token_ids),
        "finish_reason": done.finish_reason,
        "usage": {
            "prompt_tokens": done.prompt_tokens,
            "completion_tokens": len(done.token_ids),
            "total_tokens": done.prompt_tokens + len(done.token_ids),
        },
    }
    if done.logprobs is not None:
        result["logprobs"] = [msgspec.structs.asdict(one) for one in done.logprobs]
    return result


def print_stream(engine: Engine, prompt: str, params: SamplingParams) -> None:
    """Print the text as it is generated, then a newline."""
    for delta in engine.stream(prompt, params):
        typer.echo(delta.text, nl=False)
        sys.stdout.flush()
    typer.echo()
