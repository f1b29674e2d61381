"""CPU time of building the events of streamed chats, us per token, by what the request asks for.

    python benchmarks/stream_events.py [--streams 64] [--tokens 400] [--repeat 3] [--json FILE]

Outputs of the engine are put into the front end's groups of requests, each stream in turn as in a step, and the events
are built as for a client: text, stop strings, parser, log probabilities and JSON, without sockets and event loop. The
least of several runs counts, since other load only adds time.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from attrs import frozen

import engine.demo
from engine.cli.bench.report import Row, report, write
from engine.core.device import find_device
from engine.core.parsers import Templates
from engine.core.protocols import AnswerWriter
from engine.core.text import Tokenizer
from engine.core.types import Output, Request, SamplingParams, TokenLogprobs
from engine.plugins.parsers.hermes import Hermes
from engine.plugins.parsers.tagged import ReasoningOptions
from engine.plugins.protocols.anthropic.writer import MessageWriter
from engine.server.front_end.phase_times import PhaseTimes
from engine.server.front_end.request_group import RequestGroup
from engine.server.http.chat import ChatWriter
from engine.server.http.chat_message import ChatMessage
from engine.server.http.generation import EventStream, Generation
from engine.server.http.parsed_output import OutputFormat

STOPS = ("\nUser:", "###", "</s>", "Observation:")
PARSER = Hermes(ReasoningOptions(reasoning=True), Templates(chat="<think></think><tool_call>"))


@frozen(kw_only=True)
class Case:
    """What a stream is asked for."""

    name: str
    stops: tuple[str, ...] = ()
    prompt: str | None = None
    """End of the prompt that the parser sees; None: the output is not parsed."""
    logprobs: int | None = None
    per_step: int = 1
    """Tokens per step, as with drafts."""
    anthropic: bool = False
    """Whether the events are those of /v1/messages."""


CASES = (
    Case(name="plain"),
    Case(name="four stop strings", stops=STOPS),
    Case(name="parsed, content", prompt=""),
    Case(name="parsed, reasoning", prompt="<think>"),
    Case(name="parsed, reasoning, 4 tokens per step", prompt="<think>", per_step=4),
    Case(name="/v1/messages, content", prompt="", anthropic=True),
    Case(name="/v1/messages, thinking", prompt="<think>", anthropic=True),
    Case(name="5 log probabilities", logprobs=5),
    Case(name="20 log probabilities", logprobs=20),
)


class GroupOnly:
    """Stands in for the connection to engines: the benchmark puts the outputs into the group."""

    phases = PhaseTimes()

    def submit(self, requests: list[Request], choices: int) -> RequestGroup:
        self.group = RequestGroup(lambda *_: None, range(len(requests) * choices))
        return self.group


def writer_of(case: Case, tokenizer: Tokenizer) -> AnswerWriter:
    if case.anthropic:
        return MessageWriter("msg_1", "bench", lambda: "call", max_tokens=10**6)
    service: Any = SimpleNamespace(name="bench", tokenizer=tokenizer)
    return ChatWriter(service, "chatcmpl-1", [ChatMessage(lambda: "call")], None, case.logprobs)


def open_stream(case: Case, tokenizer: Tokenizer) -> tuple[RequestGroup, Callable[[], bytes]]:
    """The group of a stream, and the function that builds its new events."""
    client: Any = GroupOnly()
    params = SamplingParams(max_tokens=10**6, stop=case.stops)
    form = (
        None if case.prompt is None else OutputFormat(begin=partial(PARSER.begin, case.prompt, ()), owner="the parser")
    )
    generation = Generation(client, tokenizer, [Request(id="r", prompt=(1,), params=params)], 1, form)
    generation.__enter__()
    writer = writer_of(case, tokenizer)
    build_events = partial(writer.events, usage=lambda: generation.usage)
    stream = EventStream(generation, writer.templates(), build_events, writer.end, writer.reasoning_templates())
    return client.group, stream.take


def logprobs_of(tokens: tuple[int, ...], top: int) -> tuple[TokenLogprobs, ...]:
    alternatives = tuple((64 + number, -float(number)) for number in range(top))
    return tuple(TokenLogprobs(token=token, logprob=-0.5, rank=1, top=alternatives) for token in tokens)


def measure(case: Case, tokenizer: Tokenizer, ids: list[int], streams: int, tokens: int) -> float:
    """Microseconds per token of one run."""
    opened = [open_stream(case, tokenizer) for _ in range(streams)]
    texts = [list(islice(cycle(ids), 37 * number, 37 * number + tokens)) for number in range(streams)]
    pieces = [
        [tuple(text[at : at + case.per_step]) for at in range(0, tokens - tokens % case.per_step, case.per_step)]
        for text in texts
    ]
    begin = counted = 0.0
    for step, outputs in enumerate(zip(*pieces, strict=True)):
        entries = [logprobs_of(piece, case.logprobs) if case.logprobs is not None else () for piece in outputs]
        begin = time.process_time()
        for (group, take), piece, logprobs in zip(opened, outputs, entries, strict=True):
            full = Output(request="r", tokens=piece, logprobs=logprobs) if not step or logprobs else None
            group.put(0, piece, full)
            take()
        if step > 1:  # the first events of a stream, and those of its templates, come once
            counted += time.process_time() - begin
    return 1e6 * counted / (streams * case.per_step * (len(pieces[0]) - 2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=400, help="of each stream")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    tokenizer = Tokenizer.open(Path(engine.demo.__file__ or "").with_name("engine-demo"))
    ids = tokenizer.encode(Path(statistics.__file__).read_text(encoding="utf-8"), add_special_tokens=False)
    rows = []
    for case in CASES:
        runs = [measure(case, tokenizer, ids, arguments.streams, arguments.tokens) for _ in range(arguments.repeat)]
        rows.append(Row(metric=case.name, value=min(runs), unit="us/token"))
        print(f"{case.name:40} {min(runs):8.2f} us/token", flush=True)
    if arguments.json is not None:
        settings = {"streams": arguments.streams, "tokens": arguments.tokens, "repeat": arguments.repeat}
        write(arguments.json, report("stream-events", find_device("cpu").name, rows, settings))


if __name__ == "__main__":
    main()
