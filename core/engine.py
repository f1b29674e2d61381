"""The engine: a scheduler that plans steps, an executor that runs them, and the loop between."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import cached_property
from types import TracebackType
from typing import ParamSpec, TypeVar

import attrs

from engine.core.attention.base import AttentionBackend
from engine.core.config.load import flatten, load_config
from engine.core.config.tree import EngineConfig
from engine.core.device import find_device
from engine.core.errors import ConfigError, InvalidRequestError
from engine.core.executors.base import Executor, Health, PendingResult
from engine.core.generation import AsyncGenerator, Completion, generate, stream
from engine.core.plugin_host.derived import max_len, settle, shape_of
from engine.core.plugin_host.registry import Plugins, load_plugins
from engine.core.plugin_host.selection import check_names, resolve
from engine.core.quant.base import QuantMethod
from engine.core.schedulers.block_manager import BlockManager
from engine.core.schedulers.policy import SchedulingPolicy
from engine.core.schedulers.scheduler import Scheduler
from engine.core.startup import Listener, Phases
from engine.core.text.detokenizer import TextDelta
from engine.core.text.tokenizer import Tokenizer
from engine.core.types import CacheInfo, EngineStats, Output, Request, SamplingParams, Step
from engine.core.weights.checkpoint import Checkpoint

P = ParamSpec("P")
T = TypeVar("T")


class Engine:
    """Serves one model. Requests go in by `add`, tokens come out of `step`; `generate` and `stream` do both.

        engine = Engine(model="path/to/checkpoint", scheduler="priority", cache__memory="1GiB")
        print(engine.generate("def read_lines(path):")[0].text)

    model: directory of a Hugging Face checkpoint.
    config: a whole configuration; `settings` are then laid over it.
    attention, quant, scheduler, executor: a plugin's name, or a class that implements the contract (for the
        scheduler an instance too), which need not be registered.
    plugins: plugins already loaded; by default all that are installed.
    on_progress: called with the progress of each phase while the engine starts.
    settings: any other setting, with "__" for the dot (cache__block_size=32), or by the name of its option or an alias
        of it (max_running=64, max_model_len=4096).

    Raises ConfigError, PluginError, CheckpointError or CapacityError when it cannot be built.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        config: EngineConfig | None = None,
        attention: str | type[AttentionBackend] | None = None,
        quant: str | type[QuantMethod] | None = None,
        scheduler: str | type[SchedulingPolicy] | SchedulingPolicy | None = None,
        executor: str | type[Executor] | None = None,
        plugins: Plugins | None = None,
        on_progress: Listener | None = None,
        **settings: object,
    ) -> None:
        named = {"attention": attention, "quant": quant, "scheduler": scheduler, "executor": executor}
        given: dict[str, object] = {
            f"{section}.name": choice for section, choice in named.items() if isinstance(choice, str)
        }
        given |= {key.replace("__", "."): value for key, value in settings.items()}
        if model is not None:
            given["model.path"] = model
        base = {key: (value, "config") for key, value in flatten(config).items()} if config is not None else {}
        self.config = load_config(
            overrides={key: (value, "argument") for key, value in given.items()}, defaults=base
        ).config
        if not self.config.model.path:
            raise ConfigError("no model is named; give the directory of a checkpoint as model.path (--model)")

        phases = Phases(on_progress)
        with phases.phase("checkpoint"):
            path, generation = self.config.model.path, self.config.model.generation_config
            self.checkpoint = Checkpoint.open(path, generation_config=generation)
        objects = {section: choice for section, choice in named.items() if not isinstance(choice, str | None)}
        with phases.phase("plugins"):
            self.plugins = plugins or load_plugins(self.config.plugins)
            check_names(self.config, self.plugins, objects)
        with phases.phase("import"):
            import torch  # noqa: F401  (the slowest import of all, counted where it happens)
        with phases.phase("device"):
            self.device = find_device(self.config.executor.device)
            self.config = settle(self.config, self.device)
        with phases.phase("plugins"):
            self.parts = resolve(self.config, self.plugins, self.device, self.checkpoint.config, objects)

        model_spec = shape_of(self.parts.model, self.checkpoint.config)
        self.max_len = max_len(self.config, model_spec)
        self.vocab_size = model_spec.vocab_size
        with phases.phase("executor"):
            self._executor = self.parts.executor(self.config, self.parts, self.parts.options["executors"])
            if on_progress is not None:
                self._executor.watch(on_progress)
            info = self._executor.start()
            phases.include(info.phases)
        try:
            self._begin(attrs.evolve(info, phases=phases.seconds))
        except BaseException:
            self._executor.shutdown()  # nobody else has this engine to close it
            raise

    def _begin(self, info: CacheInfo) -> None:
        """What an engine needs beside its executor."""
        self.cache_info = info
        self._scheduler = Scheduler(
            self.parts.policy,
            BlockManager(
                self.cache_info.num_blocks, self.cache_info.block_size, prefix_caching=self.config.cache.prefix_caching
            ),
            max_batch_tokens=self.config.scheduler.max_batch_tokens,
            max_running=self.config.scheduler.max_running,
            max_len=self.max_len,
            eos_tokens=self.checkpoint.eos_tokens(),
        )
        overlap = self.config.scheduler.overlap
        self._steps_ahead = int(self._executor.asynchronous if overlap == "auto" else overlap == "on")
        self._in_flight: deque[tuple[Step, PendingResult]] = deque()
        self._seconds: dict[str, float] = {"schedule": 0.0, "submit": 0.0, "wait": 0.0, "commit": 0.0}
        self._async: AsyncGenerator | None = None
        self._closed = False
        self.plugins.call("engine_started", engine=self)

    def step(self) -> list[Output]:
        """Plan and begin a step, and finish the one before it (or this one, where nothing runs ahead).

        Returns what is new for each request.
        Raises ExecutorError when a step failed; the engine is then of no further use.
        """
        step = self._timed("schedule", self._scheduler.schedule, time.monotonic())
        if step is not None:
            self._in_flight.append((step, self._timed("submit", self._executor.submit, step)))
        if not self._in_flight or (step is not None and len(self._in_flight) <= self._steps_ahead):
            return []
        earlier, pending = self._in_flight.popleft()
        result = self._timed("wait", pending.result)
        for phase, seconds in result.seconds:
            self._seconds[phase] = self._seconds.get(phase, 0.0) + seconds
        return self._timed("commit", self._scheduler.commit, earlier, result, time.monotonic())

    def add(self, request: Request) -> None:
        """Take a request. Raises InvalidRequestError, and takes nothing, when it can never be served."""
        for token in (min(request.prompt, default=0), max(request.prompt, default=0)):
            if not 0 <= token < self.vocab_size:
                raise InvalidRequestError(
                    f"the prompt holds token {token}, but the model's vocabulary has {self.vocab_size}", "prompt"
                )
        for name, tokens in (
            ("logit_bias", (token for token, _ in request.params.logit_bias)),
            ("stop_token_ids", iter(request.params.stop_token_ids)),
        ):
            if any(token >= self.vocab_size for token in tokens):
                raise InvalidRequestError(f"{name} names a token beyond the vocabulary of {self.vocab_size}", name)
        self._scheduler.add(request)

    def abort(self, request_id: str) -> Output | None:
        """End a request and free what it holds, at once; None for one that is not (or no longer) there."""
        return self._scheduler.abort(request_id)

    @property
    def has_work(self) -> bool:
        """Whether `step` would do anything."""
        return bool(self._in_flight) or self._scheduler.has_work

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer and chat template, read when first asked for. Raises CheckpointError."""
        return Tokenizer.of_model(self.config.model)

    @property
    def default_params(self) -> SamplingParams:
        """What the checkpoint's generation_config.json recommends, unless model.generation_config is "none"."""
        return self.checkpoint.default_params()

    def generate(
        self,
        prompts: str | Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[Completion]:
        """Continue prompts (texts or token ids) and wait for all; one Completion each, in their order.

        params: for all, or one for each; None: `default_params`. progress: show a progress bar on stderr.
        """
        return generate(self, [prompts] if isinstance(prompts, str) else prompts, params, progress=progress)

    def stream(self, prompt: str | Sequence[int], params: SamplingParams | None = None) -> Iterator[TextDelta]:
        """Continue one prompt; text comes as it is made. Closing the iterator ends the request."""
        return stream(self, prompt, params)

    def astream(self, prompt: str | Sequence[int], params: SamplingParams | None = None) -> AsyncIterator[TextDelta]:
        """As `stream`, for asyncio; many may run at once in one event loop, and share their steps."""
        if self._async is None:
            self._async = AsyncGenerator(self)
        return self._async.stream(prompt, params)

    def stats(self) -> EngineStats:
        """Counters and gauges now."""
        return attrs.evolve(self._scheduler.stats(), seconds=tuple(self._seconds.items()))

    def check(self) -> Health:
        """Whether steps can be run."""
        return Health(ok=False, detail="the engine is closed") if self._closed else self._executor.check()

    def close(self) -> None:
        """Stop, and free the device; a second call does nothing."""
        if not self._closed:
            self._closed = True
            self._in_flight.clear()
            self._executor.shutdown()
            self.plugins.call("engine_stopped", engine=self)

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _timed(self, phase: str, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        begin = time.perf_counter()
        try:
            return call(*args, **kwargs)
        finally:
            self._seconds[phase] += time.perf_counter() - begin
