"""`engine chat`: a conversation on the terminal, or one user message per line from a pipe."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import attrs
import typer

from engine.cli.api_key import KEY_VARIABLES, client_key
from engine.cli.chat_client import CONTENT, REASONING, ChatClient, Piece
from engine.cli.errors import ServerError
from engine.cli.http_client import VISIBLE
from engine.cli.opening import open_engine
from engine.cli.options import DEMO_MODEL, MODEL, OFFLINE, configured, refuse_settings, sampled
from engine.core.config import Resolved
from engine.core.errors import ConfigError, EngineError, InvalidRequestError

if TYPE_CHECKING:
    from engine.core.engine import Engine
    from engine.core.types import SamplingParams

Message = dict[str, str]
Answers = Callable[[list[Message]], Generator[Piece]]
"""Answers the last of some messages, piece by piece."""
HELP = "/reset forgets the conversation, /exit ends it (as Ctrl-D does), Ctrl-C stops an answer."
MODEL_ORIGINS = (DEMO_MODEL, MODEL.upper(), "--model", "--set")
"""Origins of model.path that may name a model of a server."""


@configured(without=OFFLINE)
@sampled(without=("logprobs", "prompt_logprobs"))
def chat(
    resolved: Resolved,
    sampling: dict[str, Any],
    system: Annotated[str, typer.Option(help="System message of the conversation.", show_default=False)] = "",
    url: Annotated[
        str | None,
        typer.Option(
            help="Talk to the model of a server with OpenAI's API, as http://localhost:8000. MODEL is then its name"
            " there; none: the only one.",
            show_default=False,
        ),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            help=f"Key for --url. Options show in lists of processes: better give it in {' or '.join(KEY_VARIABLES)}.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Talk to a model. Piped in, each line is one message; /reset and /exit work in both."""
    interactive = sys.stdin.isatty()
    lines = prompted_lines() if interactive else piped_lines()
    if url is not None:
        answers, title = remote(url, client_key(api_key), resolved, sampling)
        if interactive:
            typer.echo(f"{title}\n{HELP}")
        converse(answers, lines, system, forgiving=interactive)
        return
    if api_key is not None:
        raise ConfigError("--api-key is the key of a server; give the server by --url, or leave the key out")
    with open_engine(resolved) as engine:
        params = attrs.evolve(engine.default_params, **sampling)
        if interactive:
            typer.echo(HELP)
        converse(offline(engine, params), lines, system, forgiving=interactive)


def offline(engine: Engine, params: SamplingParams) -> Answers:
    """Answers of an engine in this process."""

    def answers(messages: list[Message]) -> Generator[Piece]:
        for delta in engine.stream(engine.tokenizer.chat(messages), params):
            yield Piece(CONTENT, delta.text)

    return answers


def remote(url: str, api_key: str, resolved: Resolved, sampling: Mapping[str, Any]) -> tuple[Answers, str]:
    """Answers of a server, and a line that says whose they are. Raises what `ChatClient` raises, and ConfigError."""
    refuse_settings(resolved, but=("model.path",) if resolved.origins["model.path"] in MODEL_ORIGINS else ())
    client = ChatClient(url, api_key)
    named = resolved.origins["model.path"] != DEMO_MODEL
    model = resolved.config.model.path if named else _only_model(client)
    parameters = request_parameters(sampling)
    return lambda messages: client.stream(model, messages, parameters), f"{model} at {client.base}"


def request_parameters(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """SamplingParams fields as JSON of a request."""
    found = {name: list(value) if isinstance(value, tuple) else value for name, value in sampling.items()}
    if "logit_bias" in found:
        found["logit_bias"] = {str(token): bias for token, bias in found["logit_bias"]}
    return found


def _only_model(client: ChatClient) -> str:
    models = client.models()
    if len(models) == 1:
        return models[0]
    listed = f"the server has the models {', '.join(models[:20])}" if models else "the server lists no model"
    raise InvalidRequestError(f"{listed}; name one as MODEL", "model")


def converse(answers: Answers, lines: Iterator[str], system: str = "", *, forgiving: bool = False) -> None:
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
                messages.append({"role": "assistant", "content": answer(answers, messages)})
            except (InvalidRequestError, ServerError) as error:
                if not forgiving:
                    raise
                messages.pop()
                typer.echo(f"error: {error} (/reset starts a new conversation)", err=True)


def answer(answers: Answers, messages: Sequence[Message]) -> str:
    """Print the model's answer as it is generated and return the answer; Ctrl-C stops it.

    Reasoning goes to standard error, dim on a terminal, and is not returned. Each tool call is a line of its own.
    """
    printed = _Printed()
    try:
        with contextlib.closing(answers(list(messages))) as pieces:
            for piece in pieces:
                printed.add(piece)
    except KeyboardInterrupt:
        printed.end_reasoning()
        typer.echo(" (stopped)")
    except EngineError:
        printed.end_reasoning()
        if printed.said:
            typer.echo()
        raise
    else:
        printed.end_reasoning()
        typer.echo()
    return "".join(printed.said)


class _Printed:
    """An answer on the terminal, where control characters are made visible, or in a pipe, where they are not."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self._reasoning = False

    def add(self, piece: Piece) -> None:
        """Print a piece."""
        if piece.kind == REASONING:
            self._reasoning = True
            typer.secho(_shown(piece.text, sys.stderr), nl=False, err=True, dim=True)
            return
        self.end_reasoning()
        alone = piece.kind != CONTENT and self.said
        text = f"\n{piece.text}" if alone else piece.text
        self.said.append(text)
        typer.echo(_shown(text, sys.stdout), nl=False)
        sys.stdout.flush()

    def end_reasoning(self) -> None:
        """End the line of reasoning, if there is one."""
        if self._reasoning:
            typer.echo(err=True)
            self._reasoning = False


def _shown(text: str, stream: TextIO) -> str:
    return text.translate(VISIBLE) if stream.isatty() else text


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
