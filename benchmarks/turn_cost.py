"""Time to the first token of a chat turn that adds 200 tokens to a long cached conversation, by part.

    python benchmarks/turn_cost.py [--cached 1000,10000,100000] [--tokenizer bpe-128k] [--json FILE]

Each turn sends the whole conversation again, as agents do, with another last message. A tiny model with random weights
and a long context keeps the prefill small; its attention still reads the whole cache.

"TTFT" is measured by a client over HTTP, on the clock, and with it the processor time of all processes of the server,
for both tokens of the answer. The parts are the same functions on the same conversation, each called in this process
and timed by itself: processor time of this process, so that other load does not count. "hash" and "look up" are in
"schedule", too. What the parts leave of the TTFT are sockets, the event loop, threads, and the first event.

Tokenizers: bpe-128k is byte-level BPE with 128,000 tokens, trained on Python's standard library; demo is the demo
model's, of 4,096 tokens, made with the same template.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sysconfig
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from attrs import define
from models import TINY

from engine.cli.bench.load import say
from engine.cli.bench.report import Row, report, write
from engine.cli.bench.server_process import Server, cpu_seconds, running
from engine.core.config import EngineConfig, load_config
from engine.core.engine import Engine
from engine.core.executors import MessageDecoder, encode
from engine.core.types import Request
from engine.server.engine_process.pending_requests import make_choice
from engine.server.front_end.phase_times import PhaseTimes
from engine.server.front_end.routing import Router
from engine.server.http.messages import template_message
from engine.server.http.request_bodies import ChatBody, check_values, decode, surely_fits
from engine.server.http.service import Service
from engine.server.shared.messages import Add, FrontEndToEngine, Started

NEW_TOKENS = 200
"""Tokens that a turn adds."""
MESSAGE_CHARS = (60, 300, 2000, 6000, 12000)
"""Lengths of messages: what users, assistants and tools say."""
CORPUS_BYTES = 2**23
"""Text that a tokenizer is trained on."""
ROOM = 1024
"""Tokens of the context beyond the conversation."""
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""What published tokenizers of this size take for words."""


def corpus() -> Iterator[str]:
    """The files of Python's standard library, in a fixed order."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    random.Random(0).shuffle(files)
    return (file.read_text(encoding="utf-8", errors="replace") for file in files)


def write_model(directory: Path, tokenizer: str, max_len: int) -> None:
    """Write a model directory: config.json of a tiny model, a tokenizer and a chat template."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    if tokenizer == "demo":
        import engine.demo

        raw = Tokenizer.from_file(str(Path(engine.demo.__file__).parent / "engine-demo" / "tokenizer.json"))
    else:
        raw = Tokenizer(models.BPE())
        words = pre_tokenizers.Split(Regex(WORDS), "isolated")
        letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        raw.pre_tokenizer = pre_tokenizers.Sequence([words, letters])  # type: ignore[assignment]
        raw.decoder = decoders.ByteLevel()  # type: ignore[assignment]
        text = "\n".join(corpus())
        trainer = trainers.BpeTrainer(
            vocab_size=128_000,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            min_frequency=1,
            show_progress=False,
        )
        raw.train_from_iterator(
            [text[at : at + 2**16] for at in range(0, min(len(text), CORPUS_BYTES), 2**16)], trainer
        )
        raw.add_special_tokens([AddedToken(text, special=True) for text in ("<|im_start|>", "<|im_end|>")])
    PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|im_end|>", chat_template=CHAT_TEMPLATE).save_pretrained(
        directory
    )
    config = TINY | {"vocab_size": raw.get_vocab_size(), "max_position_embeddings": max_len}
    config |= {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


@define
class Conversation:
    """A conversation, of which all but the last message stays the same."""

    history: list[dict[str, str]]
    text: str
    at: int
    """Characters of `text` that are in use."""
    chars: int
    """Characters of a last message."""

    @classmethod
    def of_length(cls, text: str, tokens: int, count: Callable[[str], int]) -> Conversation:
        """A conversation of about this many tokens. count: the number of tokens of a text."""
        draw = random.Random(tokens)
        history: list[dict[str, str]] = []
        at = length = 0
        per_char = count(text[: 2**16]) / 2**16
        while length < tokens or len(history) % 2:
            chars = min(draw.choice(MESSAGE_CHARS), int(tokens / per_char))
            history.append({"role": "assistant" if len(history) % 2 else "user", "content": text[at : at + chars]})
            length += count(text[at : at + chars]) + 5
            at += chars
        return cls(history, text, at, int(NEW_TOKENS / per_char))

    def turn(self) -> list[dict[str, str]]:
        """The messages of another turn, with a last message that has not been sent yet."""
        self.at += self.chars
        return [*self.history, {"role": "user", "content": self.text[self.at - self.chars : self.at]}]


def body_of(model: str, messages: list[dict[str, str]]) -> bytes:
    body = {"model": model, "messages": messages, "max_tokens": 2, "temperature": 0, "stream": True}
    return json.dumps(body).encode()


def timed(call: Callable[[], Any], times: list[float]) -> Any:
    """The result of `call`; appends the milliseconds of processor time that it took."""
    begin = time.process_time()
    result = call()
    times.append(1e3 * (time.process_time() - begin))
    return result


class NoClient:
    """Stands in for the connection to engines: sends nothing, times and traces nothing."""

    phases = PhaseTimes()

    def traced(self, name: str, work: Callable[[], Any]) -> Callable[[], Any]:
        return work


class Parts:
    """Calls the functions that a turn runs through, one after another, and times each."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        started = Started(
            cache=engine.cache_info,
            choices=engine.parts.choices,
            max_len=engine.max_len,
            vocab_size=engine.vocab_size,
            default_params=engine.default_params,
            seconds=0.0,
        )
        client: Any = NoClient()
        self._service = Service(engine.config, client, engine.tokenizer, started, 0)
        self._router = Router([engine.cache_info.num_blocks] * 2, engine.cache_info.block_size)
        self._decoder: MessageDecoder[Any] = MessageDecoder(FrontEndToEngine)
        self._turns = 0
        self.times: dict[str, list[float]] = {}
        self.prompt_tokens = 0

    async def run(self, messages: list[dict[str, str]]) -> None:
        """One turn, up to its last token."""
        service, engine = self._service, self._engine
        data = body_of(service.name, messages)
        times = self.times.setdefault

        begin = time.process_time()
        if not surely_fits(data, service.limits.max_body_values):
            await check_values(data, service.limits.max_body_values)
        body = decode(data, ChatBody)
        times("parse the body", []).append(1e3 * (time.process_time() - begin))

        plain = [template_message(message, "messages") for message in body.messages]
        timed(lambda: service.tokenizer.render_chat(plain), times("render the chat template", []))

        begin = time.process_time()
        prompt = await service.encode_chat(body.messages)
        both = 1e3 * (time.process_time() - begin)
        times("tokenize", []).append(both - self.times["render the chat template"][-1])
        self.prompt_tokens = len(prompt.tokens)

        self._turns += 1
        params = [engine.default_params.__class__(max_tokens=2, temperature=0.0)]
        requests = timed(
            lambda: service.requests(f"turn-{self._turns}", [prompt.tokens], params),
            times("make the request", []),
        )
        timed(lambda: self._router.place(requests, [0.0, 0.0]), times("route (of two replicas)", []))
        sent = timed(lambda: encode(Add(0, tuple(requests))), times("encode the message", []))
        received = timed(lambda: self._decoder.decode(sent), times("decode the message", []))
        request = make_choice(received.requests[0], 0)
        self._schedule(request)

    def _schedule(self, request: Request) -> None:
        """Queue a request, and step the engine until it has ended."""
        engine, times = self._engine, self.times.setdefault
        blocks = engine._scheduler._blocks
        chain = blocks.chain("")
        count = (len(request.prompt) - 1) // blocks.block_size
        timed(lambda: chain.digest(request.prompt, count - 1), times("hash", []))
        timed(lambda: blocks.lookup(request.prompt, chain), times("look up", []))
        timed(lambda: engine.add(request), times("check and queue", []))
        scheduler, planned = engine._scheduler, list[float]()
        plan = scheduler.schedule
        scheduler.schedule = lambda now: timed(lambda: plan(now), planned)  # type: ignore[method-assign]
        begin = time.process_time()
        while not engine.step():
            pass
        whole = 1e3 * (time.process_time() - begin)
        scheduler.schedule = plan  # type: ignore[method-assign]
        times("schedule", []).append(sum(planned))
        times("prefill", []).append(whole - sum(planned))
        timed(lambda: [engine.step() for _ in iter(lambda: engine.has_work, False)], times("after the first token", []))


def time_to_first_token(server: Server, data: bytes) -> float:
    """Milliseconds from sending a request to its first event."""
    request = urllib.request.Request(f"{server.url}/v1/chat/completions", data, {"Content-Type": "application/json"})
    begin = time.perf_counter()
    with urllib.request.urlopen(request) as answer:
        answer.readline()
        seconds = time.perf_counter() - begin
        answer.read()
    return 1e3 * seconds


def measure(arguments: argparse.Namespace, cached: int, directory: Path, given: EngineConfig) -> list[Row]:
    """The figures of one length of the conversation."""
    text = "\n".join(corpus())
    with Engine(config=given) as engine:
        tokenizer = engine.tokenizer
        conversation = Conversation.of_length(text, cached, lambda piece: len(tokenizer.encode(piece)))
        parts = Parts(engine)
        asyncio.run(parts.run(conversation.turn()))  # fills the caches
        parts.times.clear()
        for _ in range(arguments.turns):
            asyncio.run(parts.run(conversation.turn()))
    case = f"{cached} cached"
    rows = [Row(metric="prompt", case=case, value=parts.prompt_tokens, unit="tokens")]
    rows += [Row(metric=part, case=case, value=statistics.median(ms), unit="ms") for part, ms in parts.times.items()]
    with running(given) as server:
        time_to_first_token(server, body_of(server.model, conversation.turn()))
        assert server.pid is not None
        before = cpu_seconds(server.pid)
        ttft = [time_to_first_token(server, body_of(server.model, conversation.turn())) for _ in range(arguments.turns)]
        cpu = 1e3 * (cpu_seconds(server.pid) - before) / arguments.turns
    rows.append(Row(metric="processor time of the server per turn", case=case, value=cpu, unit="ms"))
    return [*rows, Row(metric="TTFT p50", case=case, value=statistics.median(ttft), unit="ms")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cached", default="1000,10000,100000", help="tokens of the conversations, with commas")
    parser.add_argument("--tokenizer", default="bpe-128k", choices=("bpe-128k", "demo"))
    parser.add_argument("--turns", type=int, default=15, help="turns measured of each conversation")
    parser.add_argument("--machine", default="", help="name of the machine in the result")
    parser.add_argument("--json", type=Path, help="file to write the result to")
    arguments = parser.parse_args()
    lengths = [int(length) for length in arguments.cached.split(",")]
    max_len = max(lengths) + max(lengths) // 8 + ROOM
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name) / "tiny-long"
        directory.mkdir()
        write_model(directory, arguments.tokenizer, max_len)
        settings: dict[str, Any] = {
            "model.path": str(directory),
            "model.load_format": "dummy",
            "executor.device": "cpu",
            "cache.memory": "256MiB",
            "server.port": 0,
            "server.api_workers": 1,
        }
        config = load_config(overrides=settings).config
        for cached in lengths:
            say(f"{cached} cached tokens")
            found = measure(arguments, cached, directory, config)
            rows += found
            for row in found:
                print(f"{row.case or '':15} {row.metric:38} {row.value:10.3f} {row.unit}", flush=True)
    if arguments.json:
        chosen = {"tokenizer": arguments.tokenizer, "turns": arguments.turns, "new_tokens": NEW_TOKENS}
        write(arguments.json, report("turn-cost", arguments.machine, rows, chosen))


if __name__ == "__main__":
    main()
