"""`engine chat`: a conversation on the terminal, or one user message per line from a pipe."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import attrs
import typer

from engine.cli.opening import open_engine
from engine.cli.options import OFFLINE, configured, sampled
from engine.core.config import Resolved
from engine.core.errors import InvalidRequestError

if TYPE_CHECKING:
    from engine.core.engine import Engine
    from engine.core.types import SamplingParams

Message = dict[str, str]
HELP = "/reset forgets the conversation, /exit ends it (as Ctrl-D does), Ctrl-C stops an answer."


@configured(without=OFFLINE)
@sampled(without=("logprobs", "prompt_logprobs"))
def chat(
    resolved: Resolved,
    sampling: dict[str, Any],
    system: Annotated[str, typer.Option(help="System message of the conversation.", show_default=False)] = "",
) -> None:
    """Talk to a model. Piped in, each line is one message; /reset and /exit work in both."""
    with open_engine(resolved) as engine:
        params = attrs.evolve(engine.default_params, **sampling)
        interactive = sys.stdin.isatty()
        if interactive:
            typer.echo(HELP)
        converse(engine, params, prompted_lines() if interactive else piped_lines(), system, forgiving=interactive)


def converse(
    engine: Engine, params: SamplingParams, lines: Iterator[str], system: str = "", *, forgiving: bool = False
) -> None:
    """Answer each line. With `forgiving`, drop a message that cannot be answered and continue."""
    beginning: list[Message] = [{"role": "system", "content": system}] if system else []
    messages = list(beginning)
    for line in lines:
        text = line.strip()
        if text == "/exit":
            return
        if text == "/reset":
            messages = list(beginning)
        elif text.startswith("/"):
            typer.echo(f"{text.split()[0]} is no command. {HELP}", err=True)
        elif text:
            messages.append({"role": "user", "content": text})
            try:
                messages.append({"role": "assistant", "content": answer(engine, params, messages)})
            except InvalidRequestError as error:
                if not forgiving:
                    raise
                messages.pop()
                typer.echo(f"error: {error} (/reset starts a new conversation)", err=True)


def answer(engine: Engine, params: SamplingParams, messages: list[Message]) -> str:
    """Print the model's answer as it is generated and return the answer; Ctrl-C stops it."""
    parts: list[str] = []
    try:
        for delta in engine.stream(engine.tokenizer.chat(messages), params):
            parts.append(delta.text)
            typer.echo(delta.text, nl=False)
            sys.stdout.flush()
    except KeyboardInterrupt:
        typer.echo(" (stopped)", nl=False)
    typer.echo()
    return "".join(parts)


def piped_lines() -> Iterator[str]:
    """Lines of standard input. Raises InvalidRequestError for one that is not UTF-8."""
    for line in sys.stdin.buffer:
        try:
            yield line.decode()
        except UnicodeDecodeError as error:
            raise InvalidRequestError(f"standard input is not UTF-8 text: {error}", "messages") from error


def prompted_lines() -> Iterator[str]:
    """Lines typed at a prompt, with history where readline is available; Ctrl-D ends the input."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (input() uses it once it is imported)
    while True:
        try:
            yield input("> ")
        except EOFError:
            typer.echo()
            return
        except KeyboardInterrupt:
            typer.echo()
