"""Measures how long one request, however large, delays the stream of another client and the answer of /health.

    python benchmarks/worst_latency.py [--only WORDS] [--repeat 3] [--url URL] [--json FILE]

Each case is one request at or beyond a limit. While the server handles the request, one client reads a steady stream
and another one asks for /health every 10 ms. The worst gap between two events of the stream, less the interval of the
engine's steps, and the slowest answer of /health are the case's figures; with --repeat, the best of several tries, as
other work on the machine disturbs them. The engine is a stand-in that yields one token per request every 20 ms, so that
the figures are the server's own. With --url the server is one that runs already.
"""

from __future__ import annotations

import argparse
import json
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

from attrs import define, field

import engine.demo
from engine.cli.bench.report import Row, report, write
from engine.core.config import EngineConfig, ExecutorConfig, ModelConfig, ParserConfig, ServerConfig
from engine.core.device import find_device
from engine.core.text import Tokenizer
from engine.core.types import FINISH_LENGTH, Output, Request, SamplingParams, TokenLogprobs
from server import PacedEngine, processes  # benchmarks/server.py

INTERVAL = 0.02
"""Seconds between two steps of the stand-in engine."""
CONTEXT = 32768
VOCAB = 4096
MAX_RUNNING = 256
LETTER = 70
"""A token with text, so that each step is an event."""
SCRIPT_STEPS = 100
"""Steps in which a scripted output comes, whatever its length."""
PATIENCE = 120.0
"""Seconds that a case may take."""
SETTLE = 0.5
"""Seconds of quiet before and after each case."""
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
TEMPLATE = (
    "{% for tool in tools or [] %}{{ (tool | tojson)[:30] }}\n{% endfor %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.arguments | tojson }}{% endfor %}\n{% endfor %}"
    "{# <tool_call> #}"
)
"""A chat template that writes calls, and the beginning of each tool, so that the context holds them."""
CALL = '<tool_call>{"name": "f", "arguments": '
SCRIPTS = {
    "string": CALL + '{"a": "' + "_handshake_timeout" * 30_000,
    "nesting": CALL + '{"a":' * 100_000,
    "calls": (CALL + '{"a": 1}}</tool_call>\n') * 1_000,
    "spaces": "a" + " " * 600_000,
    "marks": '<tool_call>{"id": "' + "<tool_call>" * 30_000,
}
"""Outputs by the word that the conversation ends with, after "say "."""


class StandIn(PacedEngine):
    """Yields one token per running request and step, with as many log probabilities as were requested."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.max_len, self.vocab_size = CONTEXT, VOCAB
        self._params: dict[str, SamplingParams] = {}
        self._prompts: dict[str, int] = {}
        self._tokenizer = Tokenizer.of_model(config.model)
        self._script_tokens = {
            name: self._tokenizer.encode(text, add_special_tokens=False) for name, text in SCRIPTS.items()
        }
        self._scripts: dict[str, Iterator[tuple[int, ...]]] = {}

    def add(self, request: Request) -> None:
        super().add(request)
        self._params[request.id] = request.params
        end = self._tokenizer.decode(request.prompt[-16:])
        if (said := re.search(r"say (\w+)\s*$", end)) and said[1] in SCRIPTS:
            tokens = self._script_tokens[said[1]][: request.params.max_tokens]
            size = -(-len(tokens) // SCRIPT_STEPS)
            self._scripts[request.id] = (tuple(tokens[at : at + size]) for at in range(0, len(tokens), size))
        if request.params.prompt_logprobs is not None:
            self._prompts[request.id] = len(request.prompt)

    def abort(self, request_id: str) -> None:
        super().abort(request_id)
        self._params.pop(request_id, None)
        self._scripts.pop(request_id, None)
        self._prompts.pop(request_id, None)

    def step(self) -> list[Output]:
        everything = self._counts
        self._counts = dict(islice(everything.items(), MAX_RUNNING))
        outputs = super().step()
        everything |= self._counts
        self._counts = everything
        return [self._finish(output) for output in outputs]

    def _finish(self, output: Output) -> Output:
        """The output with its log probabilities and its finish reason."""
        params, count = self._params[output.request], self._counts[output.request]
        prompt = self._prompts.pop(output.request, 0)
        finish_reason = None
        if (script := self._scripts.get(output.request)) is not None:
            tokens = next(script, ())
            if not tokens:
                self.abort(output.request)
            return Output(
                request=output.request, tokens=tokens or (LETTER,), finish_reason=None if tokens else FINISH_LENGTH
            )
        if count == params.max_tokens:
            finish_reason = FINISH_LENGTH
            self.abort(output.request)
        return Output(
            request=output.request,
            tokens=(LETTER,),
            logprobs=() if params.logprobs is None else (logprobs(LETTER, params.logprobs),),
            prompt_logprobs=tuple(logprobs(at % VOCAB, params.prompt_logprobs or 0) for at in range(1, prompt)) or None,
            finish_reason=finish_reason,
        )


@cache
def logprobs(token: int, count: int) -> TokenLogprobs:
    top = tuple(((token + at) % VOCAB, -0.5 - at) for at in range(count))
    return TokenLogprobs(token=token, logprob=-0.5, rank=1, top=top)


@define
class Case:
    """One request. leave: seconds after which its client disconnects; None: the client waits for the answer."""

    name: str
    path: str
    body: Callable[[], bytes]
    leave: float | None = None


def completion(**changes: Any) -> Callable[[], bytes]:
    return lambda: json.dumps({"model": "bench", "prompt": "x", "max_tokens": 1} | changes).encode()


def chat(content: Any = "x", **changes: Any) -> Callable[[], bytes]:
    messages = [{"role": "user", "content": content}]
    return lambda: json.dumps({"model": "bench", "messages": messages, "max_tokens": 1} | changes).encode()


def repeated(before: str, each: str, after: str, size: int = 8 * 2**20 - 200) -> Callable[[], bytes]:
    """A body of `size` bytes: `each` again and again, with commas, between `before` and `after`."""
    return (before + ",".join([each] * (size // (len(each) + 1))) + after).encode


MESSAGE = '{"role":"user","content":""}'
LONG_MESSAGE = '{"role":"user","content":"01234567890123456789"}'
LINE = "hello, world and all of it "
ONE_CHAT = '{"model":"bench","messages":[{"role":"user","content":"x"}],'


def tool(size: int, number: int = 0, strict: bool = False) -> dict[str, Any]:
    """A tool of about `size` characters, in 40 strings, lists and objects."""
    names = [f"p{at}" for at in range(5)]
    properties = {name: {"type": "string", "pattern": "a" * (size // 5 - 60)} for name in names}
    parameters = {"type": "object", "properties": properties, "required": names, "additionalProperties": False}
    return {"name": f"f{number}", "parameters": parameters, **({"strict": True} if strict else {})}


def protocols(
    what: str,
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    calls: Sequence[Sequence[str]] = (),
    said: str = "x",
    tokens: int = 1,
    **others: Any,
) -> Iterator[Case]:
    """The same request in three protocols. calls: JSON arguments of calls, by message. others: further parameters."""

    def chat() -> bytes:
        messages: list[Any] = [{"role": "user", "content": "x"}]
        for index, several in enumerate(calls):
            made = [
                {"id": f"c{index}_{at}", "type": "function", "function": {"name": "f", "arguments": one}}
                for at, one in enumerate(several)
            ]
            messages.append({"role": "assistant", "content": None, "tool_calls": made})
            messages += [{"role": "tool", "tool_call_id": call["id"], "content": "1"} for call in made]
        messages.append({"role": "user", "content": f"say {said}"})
        given = {"tools": [{"type": "function", "function": one} for one in tools]} if tools else {}
        return json.dumps({"model": "bench", "messages": messages, "max_tokens": tokens} | given | others).encode()

    def responses() -> bytes:
        items: list[Any] = [{"role": "user", "content": "x"}]
        for index, several in enumerate(calls):
            for at, one in enumerate(several):
                items.append({"type": "function_call", "call_id": f"c{index}_{at}", "name": "f", "arguments": one})
                items.append({"type": "function_call_output", "call_id": f"c{index}_{at}", "output": "1"})
        items.append({"role": "user", "content": f"say {said}"})
        given = {"tools": [{"type": "function", **one} for one in tools]} if tools else {}
        return json.dumps({"model": "bench", "input": items, "max_output_tokens": tokens} | given | others).encode()

    def messages() -> bytes:
        said_so_far: list[Any] = [{"role": "user", "content": "x"}]
        for index, several in enumerate(calls):
            uses = [
                {"type": "tool_use", "id": f"c{index}_{at}", "name": "f", "input": json.loads(one)}
                for at, one in enumerate(several)
            ]
            results = [{"type": "tool_result", "tool_use_id": use["id"], "content": "1"} for use in uses]
            said_so_far += [{"role": "assistant", "content": uses}, {"role": "user", "content": results}]
        said_so_far.append({"role": "user", "content": f"say {said}"})
        given: dict[str, Any] = {}
        if tools:
            given["tools"] = [
                {"name": one["name"], "input_schema": one["parameters"]} | ({"strict": True} if "strict" in one else {})
                for one in tools
            ]
        if others.get("tool_choice") == "required":
            given["tool_choice"] = {"type": "any"}
        stream = {"stream": True} if others.get("stream") else {}
        body = {"model": "bench", "messages": said_so_far, "max_tokens": tokens} | given | stream
        return json.dumps(body).encode()

    for path, body in ((CHAT, chat), (RESPONSES, responses), (MESSAGES, messages)):
        yield Case(f"{what}, {path.removeprefix('/v1/')}", path, body)


ONE_MB = json.dumps({"a": "hello, world " * 77_000})
MANY_VALUES = json.dumps({"a": [[]] * 1_000_000})
SMALL = json.dumps({"city": "Rome", "days": 3})
ENUM = {"enum": [f"{at:09}" for at in range(5_000)]}
TOOLS = [tool(6_000, at) for at in range(1_000)]
STRICT = [tool(6_000, at, strict=True) for at in range(1_000)]
FEW_TOOLS = [tool(10_000, at) for at in range(100)]
ONE_TOOL = [{"name": "f", "parameters": {"type": "object"}}]
CASES = (
    *protocols("a history of 1,000 calls", calls=[[SMALL]] * 1_000),
    *protocols("1,000 calls in a message", calls=[[SMALL] * 1_000]),
    *protocols("arguments of 1 MB", calls=[[ONE_MB]]),
    *protocols("1,000 messages with arguments of 8 kB", calls=[[json.dumps({"a": "hello " * 1_250})]] * 1_000),
    *islice(protocols("arguments of a million lists", calls=[[MANY_VALUES]]), 2),
    *protocols("1,000 tools of 6 kB", tools=TOOLS),
    *protocols("1,000 tools of 6 kB, required", tools=TOOLS, tool_choice="required"),
    *protocols("1,000 strict tools of 6 kB", tools=STRICT),
    *protocols("100 tools of 10 kB, required", tools=FEW_TOOLS, tool_choice="required"),
    Case("an enum of 60,000 characters", CHAT, chat(response_format={
        "type": "json_schema", "json_schema": {"name": "e", "schema": ENUM}
    })),
    Case("an enum of 700,000 characters", CHAT, chat(response_format={
        "type": "json_schema", "json_schema": {"name": "e", "schema": {"enum": [f"{at:09}" for at in range(60_000)]}}
    })),
    *(
        case
        for stream in (False, True)
        for script in SCRIPTS
        for case in protocols(
            f"an output of {script}{', streamed' if stream else ''}",
            tools=ONE_TOOL, said=script, tokens=30_000, stream=stream,
        )
    ),
    Case("8 MiB of empty messages", CHAT, repeated('{"model":"bench","messages":[', MESSAGE, "]}")),
    Case("3,000 messages of 20 characters", CHAT, repeated(
        '{"model":"bench","max_tokens":1,"messages":[', LONG_MESSAGE, "]}", 150_000
    )),
    Case("8 MiB of empty parts of one message", CHAT, repeated(
        '{"model":"bench","messages":[{"role":"user","content":[', '{"type":"text","text":""}', "]}]}"
    )),
    Case("256 prompts of 8,191 characters", COMPLETIONS, completion(prompt=[LINE * 303] * 256)),
    Case("a text of 8 MB", COMPLETIONS, completion(prompt="hello, world " * 640_000)),
    Case("a text of 8 MB, /tokenize", "/tokenize", repeated('{"model":"bench","prompt":"', "hello", '"}')),
    Case("a text of 100,000 characters", COMPLETIONS, completion(prompt="hello, world " * 7_700)),
    Case("a text of 8 MB, left after 0.2 s", COMPLETIONS, completion(prompt="hello, world " * 640_000), leave=0.2),
    Case("4 M ids, /detokenize", "/detokenize", repeated('{"model":"bench","tokens":[', "1", "]}")),
    Case("32,000 ids, /detokenize", "/detokenize", repeated('{"model":"bench","tokens":[', "300", "]}", 128_000)),
    Case("4 M ids, echoed", COMPLETIONS, repeated('{"model":"bench","echo":true,"prompt":[', "1", "]}")),
    Case("256 prompts of 2,000 ids", COMPLETIONS, completion(prompt=[[300 + at] * 2000 for at in range(256)])),
    Case("256 prompts of 2,000 ids, echoed", COMPLETIONS, completion(
        prompt=[[300 + at] * 2000 for at in range(256)], echo=True
    )),
    Case("8 MiB of empty lists as prompts", COMPLETIONS, repeated('{"model":"bench","prompt":[', "[]", "]}")),
    Case("8 MiB of empty texts as prompts", COMPLETIONS, repeated('{"model":"bench","prompt":[', '""', "]}")),
    Case("300,000 chat_template_kwargs", CHAT, chat(chat_template_kwargs={f"key{at}": at for at in range(300_000)})),
    Case("8 MiB of lists in chat_template_kwargs", CHAT, repeated(
        ONE_CHAT + '"chat_template_kwargs":{"a":[', "[]", "]}}"
    )),
    Case("8 MiB of lists in response_format", CHAT, repeated(ONE_CHAT + '"response_format":{"a":[', "[]", "]}}")),
    Case("600,000 tokens in logit_bias", COMPLETIONS, completion(logit_bias={str(at): 1 for at in range(600_000)})),
    Case("8 MiB of stop strings", COMPLETIONS, repeated('{"model":"bench","prompt":"x","stop":[', '"a"', "]}")),
    Case("a cache_salt of 2 MB, 64 choices", COMPLETIONS, completion(cache_salt="s" * 2_000_000, n=64)),
    Case("64 choices of 30,000 ids", COMPLETIONS, completion(prompt=[300] * 30_000, n=64)),
    Case("4,096 choices", COMPLETIONS, completion(prompt=["x"] * 64, n=64)),
    Case("4,096 choices with a seed, streamed", COMPLETIONS, completion(prompt=["x"] * 64, n=64, seed=1, stream=True)),
    Case("4,096 choices, left after 1 s", COMPLETIONS, completion(prompt=["x"] * 64, n=64, max_tokens=9999), leave=1),
    Case("1,024 choices of 16 tokens, 20 log probabilities each", COMPLETIONS, completion(
        prompt=["x"] * 16, n=64, max_tokens=16, logprobs=20
    )),
    Case("32,000 ids echoed, 20 log probabilities each", COMPLETIONS, completion(
        prompt=[300] * 32_000, echo=True, logprobs=20
    )),
    Case("32,000 ids echoed, 20 log probabilities each, streamed", COMPLETIONS, completion(
        prompt=[300] * 32_000, echo=True, logprobs=20, stream=True
    )),
)  # fmt: skip


def connect(url: str) -> socket.socket:
    host, _, port = url.removeprefix("http://").rpartition(":")
    return socket.create_connection((host, int(port)), timeout=PATIENCE)


def head(method: str, path: str, length: int) -> bytes:
    return f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n\r\n".encode()


@define
class Watch:
    """The times of a stream's events, and of answers of /health, read by two threads."""

    url: str
    events: list[float] = field(factory=list)
    answers: list[tuple[float, float]] = field(factory=list)
    """(when asked, seconds until the answer)."""
    stop: threading.Event = field(factory=threading.Event)

    def read_stream(self) -> None:
        body = completion(max_tokens=CONTEXT - 10, stream=True, ignore_eos=True)()
        with connect(self.url) as connection:
            connection.sendall(head("POST", COMPLETIONS, len(body)) + body)
            while not self.stop.is_set():
                if not connection.recv(1 << 16):
                    raise SystemExit("the steady stream has ended")
                self.events.append(time.monotonic())

    def ask_health(self) -> None:
        with connect(self.url) as connection:
            while not self.stop.wait(0.01):
                asked = time.monotonic()
                connection.sendall(head("GET", "/health", 0))
                connection.recv(1 << 16)
                self.answers.append((asked, time.monotonic() - asked))

    def worst(self, begin: float, end: float) -> tuple[float, float]:
        """The worst gap of the stream and the slowest /health between two times, seconds."""
        times = [at for at in list(self.events) if begin <= at <= end]
        gaps = [after - before for before, after in zip([begin, *times], [*times, end], strict=True)]
        return max(gaps), max(seconds for asked, seconds in list(self.answers) if begin <= asked <= end)


@contextmanager
def watching(url: str) -> Iterator[Watch]:
    watch = Watch(url)
    threads = [threading.Thread(target=target) for target in (watch.read_stream, watch.ask_health)]
    for thread in threads:
        thread.start()
    try:
        while len(watch.events) < 5:
            time.sleep(0.05)
        yield watch
    finally:
        watch.stop.set()
        for thread in threads:
            thread.join()


def request(url: str, case: Case, body: bytes) -> str:
    """Send a case's request and read the answer; its status."""
    size, first = 0, b""
    with connect(url) as connection:
        try:
            connection.sendall(head("POST", case.path, len(body)) + body)
            if case.leave is not None:
                time.sleep(case.leave)
                return "left"
            length: int | None = None
            while length is None or size < length:
                data = connection.recv(1 << 20)
                if not data:
                    break
                size += len(data)
                first = (first + data)[:2000] if len(first) < 2000 else first
                found = re.search(rb"content-length: (\d+)\r\n(?:.*\r\n)*?\r\n", first, re.IGNORECASE)
                if found:
                    length = found.end() + int(found[1])
                elif data.endswith(b"0\r\n\r\n"):
                    break
        except (ConnectionError, TimeoutError) as error:
            return type(error).__name__
    return first[9:12].decode()


def peak_memory(pid: int) -> float:
    """The highest resident memory of the server's processes so far, MB."""
    peaks = [
        int(re.findall(r"VmHWM:\s+(\d+)", Path(f"/proc/{process}/status").read_text())[0])
        for _, process in processes(pid)
    ]
    return sum(peaks) / 1e3


@contextmanager
def serving() -> Iterator[tuple[str, int]]:
    """Run the server with the stand-in engine; its URL and process ID."""
    with subprocess.Popen([sys.executable, __file__, "serve"], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield next(line.split()[-1] for line in server.stdout if line.startswith("Listening on")), server.pid
        finally:
            server.terminate()


def measure(url: str, case: Case, pid: int | None, repeat: int) -> Mapping[str, Any]:
    """Send a case's request `repeat` times and return the least of its figures by name, milliseconds and MB."""
    body = case.body()
    tries = [measure_once(url, case, body) for _ in range(repeat)]
    figures = {name: min(each[name] for each in tries) for name in ("stream", "health", "took")}
    if pid is not None:
        figures["memory"] = peak_memory(pid)
    return figures | {"status": tries[-1]["status"]}


def measure_once(url: str, case: Case, body: bytes) -> Mapping[str, Any]:
    """Send a case's request once and return its figures."""
    with watching(url) as watch:
        time.sleep(SETTLE)
        begin = time.monotonic()
        status = request(url, case, body)
        end = time.monotonic()
        # Until the stream goes on, so that a server that is still at work is seen to be.
        seen = len(watch.events)
        while len(watch.events) < seen + SETTLE / INTERVAL and time.monotonic() < end + PATIENCE:
            time.sleep(INTERVAL)
        gap, answer = watch.worst(begin, time.monotonic())
    return {
        "stream": max(0.0, gap - INTERVAL) * 1e3,
        "health": answer * 1e3,
        "took": (end - begin) * 1e3,
        "status": status,
    }


def serve() -> int:
    """Run the server with the stand-in engine."""
    from engine import server
    from engine.server.supervisor.main import Commands

    template = Path(tempfile.mkdtemp()) / "tools.jinja"
    template.write_text(TEMPLATE)
    config = EngineConfig(
        model=ModelConfig(path=str(engine.demo.path()), served_name="bench", chat_template=str(template)),
        parser=ParserConfig(name="hermes"),
        executor=ExecutorConfig(options={"interval": INTERVAL}),
        server=ServerConfig(port=0, api_workers=1, max_waiting=8192),
    )
    return server.run(config, commands=Commands(engine=[sys.executable, __file__, "engine"]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("role", nargs="?", default="measure", choices=("measure", "serve", "engine"))
    parser.add_argument("--url", help="a server that runs already and serves the model `bench`")
    parser.add_argument("--only", default="", help="measure the cases whose names this expression finds")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.role == "serve":
        return serve()
    if options.role == "engine":
        from engine.server.engine_process import main as engine_process

        return engine_process.run(StandIn)  # type: ignore[arg-type]
    rows = []
    print(f"{'':58}{'stream':>9}{'/health':>9}{'took':>9}{'memory':>9}  status", flush=True)
    for case in CASES:
        if not re.search(options.only, case.name):
            continue
        if options.url:
            figures = measure(options.url, case, None, options.repeat)
        else:
            with serving() as (url, pid):  # a new server for each, whose memory is the case's own
                figures = measure(url, case, pid, options.repeat)
        cells = "".join(f"{figures[name]:9.0f}" for name in ("stream", "health", "took"))
        print(f"{case.name:58}{cells}{figures.get('memory', 0):9.0f}  {figures['status']}", flush=True)
        for name, unit in (("stream", "ms"), ("health", "ms"), ("took", "ms"), ("memory", "MB")):
            if name in figures:
                rows.append(Row(metric=name, value=round(figures[name], 1), unit=unit, case=case.name))
    if options.json is not None:
        settings = {"engine": "stand-in", "context": CONTEXT, "interval_ms": INTERVAL * 1e3, "repeat": options.repeat}
        write(options.json, report("worst-latency", find_device("cpu").name, rows, settings))
    return 0


if __name__ == "__main__":
    sys.exit(main())
