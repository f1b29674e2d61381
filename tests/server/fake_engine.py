"""An engine process without a model: tokens are bytes, and the output is the alphabet. Run as a script.

executor.options of the configuration set its behaviour:
    delay: seconds per step; die_after: steps until the process kills itself; raise_after: steps until a step fails;
    start_error: fail at start with this sentence; exit: exit at start with this code; stuck: no step completes;
    busy: control calls are refused, since one is in progress;
    silent_rank: rank of a worker whose loop iterated at the engine's start only;
    at_start: path of a file that controls the start: wait while the file exists, or fail if it contains "refuse";
    hold: path of a file; while the file exists, a request gets its first token and no other;
    helper: start a child process; max_len: context length;
    answers: path of a file with a JSON list of texts; each chat is answered with the first, which is removed.
A request with a chat whose last message is `say TEXT` is answered with TEXT, and ends by a stop token. If TEXT
ends with UNENDED, what is before it is said, and then nothing until the request is aborted.
A request whose prompt is `hold PATH` is held in the same way by a file of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import string
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from attrs import define, evolve

from engine.core.config.tree import EngineConfig
from engine.core.errors import CapacityError, ConfigError, ControlBusyError, ExecutorError, InvalidRequestError
from engine.core.executors.base import Health
from engine.core.plugin_host import ChosenPlugin
from engine.core.types import CacheInfo, EngineStats, Output, Request, RequestTimes, SamplingParams, TokenLogprobs

HELPER = "import time; time.sleep(60)"
EOS = 256
MAX_LEN = 256
HOLD = b"hold "
SAY = b"<user>say "
UNENDED = b" and so on"
HELD_SECONDS = 0.005
"""Seconds of a step in which every request is held."""


@define
class Parts:
    choices: tuple[ChosenPlugin, ...]


@define
class Sequence:
    request: Request
    made: int = 0
    scheduled: float = 0.0
    script: bytes | None = None
    """What the model says; None: the alphabet."""
    gate: Path | None = None
    """The file that holds the request, until it has been removed."""

    def is_held(self) -> bool:
        if self.script is not None and self.script.endswith(UNENDED):
            return self.made == len(self.script) - len(UNENDED)
        if self.gate is None or not self.made:
            return False
        if self.gate.exists():
            return True
        self.gate = None
        return False


class FakeEngine:
    """The part of engine.core.engine.Engine that the engine process uses."""

    def __init__(self, config: EngineConfig) -> None:
        options: dict[str, Any] = dict(config.executor.options)
        if "start_error" in options:
            raise CapacityError(options["start_error"])
        if "exit" in options:
            sys.exit(options["exit"])
        wait_or_refuse(Path(options["at_start"]) if "at_start" in options else None)
        if options.get("helper"):
            subprocess.Popen([sys.executable, "-c", HELPER])
        self._hold = Path(options["hold"]) if "hold" in options else None
        self._stuck = options.get("stuck", False)
        self._busy = options.get("busy", False)
        self._silent_rank = options.get("silent_rank")
        self._answers = Path(options["answers"]) if "answers" in options else None
        self._started = time.monotonic()
        self._delay = options.get("delay", 0.0)
        self._die_after = options.get("die_after")
        self._raise_after = options.get("raise_after")
        self._sequences: dict[str, Sequence] = {}
        self._stats = EngineStats(blocks_total=100)
        self.max_len = options.get("max_len", MAX_LEN)
        self.vocab_size = EOS + 1
        self.default_params = SamplingParams()
        self.parts = Parts(
            (ChosenPlugin(extension_point="attention", name="fake", provenance="tests 1.0", reason="the only one"),)
        )
        self.cache_info = CacheInfo(
            num_blocks=100,
            block_size=16,
            weights_bytes=1000,
            activation_bytes=2000,
            kv_bytes=5 * 2**20,
            budget_bytes=6 * 2**20,
            device="no device",
            dtype="float32",
        )

    def add(self, request: Request) -> None:
        if request.prompt == tuple(b"refuse me"):
            raise InvalidRequestError("this prompt is refused by the engine", "prompt")
        prompt = bytes(token for token in request.prompt if token != EOS)
        gate = Path(prompt.removeprefix(HOLD).decode()) if prompt.startswith(HOLD) else self._hold
        script = prompt.rpartition(SAY)[2].rpartition(b"<assistant>")[0] if SAY in prompt else None
        if self._answers is not None and (answers := json.loads(self._answers.read_text())):
            script = answers[0].encode()
            self._answers.write_text(json.dumps(answers[1:]))
        self._sequences[request.id] = Sequence(request, script=script, gate=gate)

    def can_add(self, request: Request) -> bool:
        return True

    def abort(self, request_id: str) -> None:
        self._sequences.pop(request_id, None)

    @property
    def has_work(self) -> bool:
        return bool(self._sequences)

    def step(self) -> list[Output]:
        time.sleep(self._delay)
        if self._stuck:
            return []
        self._stats = evolve(self._stats, steps=self._stats.steps + 1)
        if self._stats.steps == self._die_after:
            os.kill(os.getpid(), signal.SIGKILL)
        if self._stats.steps == self._raise_after:
            raise ExecutorError("the fake step failed")
        free = [sequence for sequence in self._sequences.values() if not sequence.is_held()]
        if not free:
            time.sleep(HELD_SECONDS)
        outputs = [self._advance(sequence) for sequence in free]
        self._stats = evolve(self._stats, generation_tokens=self._stats.generation_tokens + len(outputs))
        return outputs

    def _advance(self, sequence: Sequence) -> Output:
        request, params = sequence.request, sequence.request.params
        if request.prompt == tuple(b"fail me"):
            del self._sequences[request.id]
            return Output(request=request.id, finish_reason="error", error="this request failed in the engine")
        sequence.scheduled = sequence.scheduled or time.monotonic()
        token = _token(sequence.made + (params.seed or 0))
        stopped = False
        if sequence.script is not None:
            stopped = sequence.made >= len(sequence.script)
            token = EOS if stopped else sequence.script[sequence.made]
        done = stopped or sequence.made + 1 == params.max_tokens
        times = None
        first = sequence.made == 0
        if done or first:
            now = time.monotonic()
            times = RequestTimes(
                arrival=request.arrival, scheduled=sequence.scheduled, first_token=sequence.scheduled, finished=now
            )
        if done:
            del self._sequences[request.id]
        sequence.made += 1
        return Output(
            request=request.id,
            tokens=(token,),
            logprobs=() if params.logprobs is None else (_logprobs(token, params.logprobs),),
            prompt_logprobs=tuple(_logprobs(token, params.prompt_logprobs) for token in request.prompt[1:])
            if first and params.prompt_logprobs is not None
            else None,
            finish_reason="stop" if stopped else "length" if done else None,
            stop_token=EOS if stopped else None,
            cached_tokens=2 if len(request.prompt) > 2 else 0,
            times=times,
            num_tokens=sequence.made if done else 0,
            preemptions=len(request.prompt) // 5 if done else 0,
        )

    def reset_prefix_cache(self) -> int:
        if self._busy:
            raise ControlBusyError("another reset is in progress")
        return 7

    def stats(self) -> EngineStats:
        used = len(self._sequences)
        return evolve(self._stats, running=used, blocks_used=used, seconds=(("schedule", 0.5),))

    def check(self) -> Health:
        if self._silent_rank is not None:
            return Health(ok=True, heartbeat=self._started, rank=self._silent_rank)
        return Health(ok=True)

    def close(self) -> None:
        pass


def wait_or_refuse(file: Path | None) -> None:
    """Wait while the file exists; raise ConfigError if it contains "refuse"."""
    with contextlib.suppress(FileNotFoundError):
        while file is not None:
            if file.read_text() == "refuse":
                raise ConfigError("the setting is wrong by now")
            time.sleep(0.01)


def _token(index: int) -> int:
    return ord(string.ascii_lowercase[index % 26])


def _logprobs(token: int, count: int) -> TokenLogprobs:
    top = tuple(((token + index) % (EOS + 1), -0.5 - index) for index in range(count))
    return TokenLogprobs(token=token, logprob=-0.5, rank=1, top=top)


if __name__ == "__main__":
    from engine.server.engine_process import main as engine_process

    sys.exit(engine_process.run(FakeEngine))  # type: ignore[arg-type]
