"""The engine: one model behind a scheduler, an executor and the step loop that joins the two."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from os import PathLike
from reprlib import repr as shortened
from types import TracebackType
from typing import TYPE_CHECKING, Any

import attrs

from engine.core import arguments
from engine.core.arguments import Conversation, check_request, check_tokens
from engine.core.async_generation import AsyncGenerator
from engine.core.attention.base import AttentionBackend
from engine.core.config.merge import merge_arguments
from engine.core.config.tree import EngineConfig
from engine.core.engine_start import start_engine
from engine.core.errors import ConfigError, ControlError, ExecutorError
from engine.core.executors.base import Executor, Health
from engine.core.executors.deployment import shut_down
from engine.core.generation import Completion, generate, stream
from engine.core.grammars.base import GrammarBackend
from engine.core.plugin_host.faults import PluginCall, name_fault
from engine.core.plugin_host.registry import Plugins
from engine.core.quant.base import QuantMethod
from engine.core.schedulers.policy import SchedulingPolicy
from engine.core.speculators.base import Speculator
from engine.core.speculators.device import DeviceSpeculator
from engine.core.startup import Listener
from engine.core.text.detokenizer import TextDelta
from engine.core.text.tokenizer import Tokenizer
from engine.core.timeline.traces import Traces
from engine.core.types import EngineStats, Output, Request, SamplingParams

if TYPE_CHECKING:
    from engine.core.timeline.merge import Report
    from engine.core.timeline.recorder import TraceOptions

MIN_PRIORITY = -(2**31)


class Engine:
    """Serves one model. `add` queues a request and `step` returns new tokens; `generate` and `stream` do both.

        engine = Engine(model="path/to/checkpoint", scheduler="priority", cache__memory="1GiB")
        print(engine.generate("def read_lines(path):")[0].text)

    model: directory of a Hugging Face checkpoint, or name of a model on the hub (ORG/NAME), which is downloaded; None,
        unless `config` or a setting names one: the demo model.
    config: a whole configuration, over which `settings` take precedence.
    attention, quant, scheduler, executor, grammar, speculator: a plugin's name, or an unregistered class that
        implements the contract of the extension point (for the scheduler an instance too).
    plugins: plugins already loaded; default: all that are installed.
    on_progress: called with the progress of each start-up phase.
    settings: any other setting, with "__" for the dot (cache__block_size=32), or by the name of its option or an
        alias of it (max_running=64, max_model_len=4096).

    Afterwards `config` is the resolved configuration, `parts` the chosen plugins, `cache_info` the allocated KV cache,
    and `max_len` the maximum context length in tokens.
    Raises ConfigError, PluginError, CheckpointError or CapacityError when the engine cannot be built.
    """

    def __init__(
        self,
        model: str | PathLike[str] | None = None,
        *,
        config: EngineConfig | None = None,
        attention: str | type[AttentionBackend[Any, Any]] | None = None,
        quant: str | type[QuantMethod[Any]] | None = None,
        scheduler: str | type[SchedulingPolicy[Any]] | SchedulingPolicy[Any] | None = None,
        executor: str | type[Executor] | None = None,
        grammar: str | type[GrammarBackend[Any]] | None = None,
        speculator: str | type[Speculator[Any] | DeviceSpeculator[Any]] | None = None,
        plugins: Plugins | None = None,
        on_progress: Listener | None = None,
        **settings: object,
    ) -> None:
        chosen = {
            "attention": attention,
            "quant": quant,
            "scheduler": scheduler,
            "executor": executor,
            "grammar": grammar,
            "speculator": speculator,
        }
        names = {point: choice for point, choice in chosen.items() if isinstance(choice, str)}
        objects = {point: choice for point, choice in chosen.items() if not isinstance(choice, str | None)}
        merged = merge_arguments(config, model, names, settings)
        if not isinstance(plugins, Plugins | None):
            raise ConfigError(f"plugins must be what load_plugins() returns, not {shortened(plugins)}")
        if not (on_progress is None or callable(on_progress)):
            raise ConfigError(f"on_progress must be a function, not {shortened(on_progress)}")

        started = start_engine(merged, plugins, objects, on_progress)
        self.config = started.config
        self.plugins = started.plugins
        self.checkpoint = started.checkpoint
        self.device = started.device
        self.parts, self._grammars = started.deployment.parts, started.deployment.grammars
        self.cache_info = started.cache_info
        self.max_len = started.max_len
        self.vocab_size = started.vocab_size
        self._executor = started.executor
        self._kv_events = started.kv_events
        self._loop = started.loop
        self._scheduler = self._loop.scheduler
        self._async: AsyncGenerator | None = None
        self._closed = False
        try:
            self._traces = Traces(self._loop, self.device.type)
            self.plugins.notify("engine_started", engine=self)
        except BaseException:
            started.close()  # the caller gets no engine to close
            raise

    def step(self) -> list[Output]:
        """Plan and submit a step, then commit the oldest step in flight.

        With overlap, one step stays in flight: a step is committed only after the next one is submitted.
        Returns the new tokens of each request.
        Raises ExecutorError when a step failed (StepFaultError, naming the plugin, when a plugin made it fail); the
        engine can then only be closed.
        """
        self.require_usable()
        outputs = self._loop.step()
        self._flush_kv_events()
        return outputs

    def require_usable(self) -> None:
        """Raise ExecutorError if the engine is closed or a step has failed."""
        if self._closed:
            raise ExecutorError("the engine is closed; make a new one")
        if self._loop.failure:
            raise ExecutorError(
                f"a step failed, so the engine can only be closed; make a new one ({self._loop.failure})"
            )

    def _flush_kv_events(self) -> None:
        """Publish what the last call changed in the KV cache, if events are published."""
        if self._kv_events is not None:
            self._kv_events.flush()

    def add(self, request: Request) -> None:
        """Queue a request. Waits until its grammar is compiled.

        Raises InvalidRequestError, and queues nothing, for a request that can never be served, and ExecutorError when
        the engine is closed or a step has failed.
        """
        self.require_usable()
        check_request(request)
        check_tokens(request, self.vocab_size)
        if request.params.grammar is not None:
            self._grammars.compile(request.params.grammar)
        self._scheduler.add(request)

    def can_add(self, request: Request) -> bool:
        """Whether `add` need not wait for the request's grammar; if it must, compiling the grammar begins now."""
        return request.params.grammar is None or self._grammars.ready(request.params.grammar)

    def compile_grammar(self, params: SamplingParams | None) -> None:
        """Wait until the grammar of these parameters, if they have one, is compiled; may be called from any thread.

        Raises InvalidRequestError for a grammar that is refused, PluginError for a broken backend, and ExecutorError
        once the engine is closed.
        """
        if params is not None and params.grammar is not None:
            self._grammars.compile(params.grammar)

    async def acompile_grammar(self, params: SamplingParams | None) -> None:
        """`compile_grammar` for asyncio; no thread waits."""
        if params is not None and params.grammar is not None:
            await self._grammars.acompile(params.grammar)

    def abort(self, request_id: str) -> Output | None:
        """Finish a request immediately and free its blocks; None if no running or waiting request has this id."""
        output = self._scheduler.abort(request_id)
        self._flush_kv_events()
        return output

    @property
    def has_work(self) -> bool:
        """Whether a request is waiting or running, or a step is in flight."""
        return self._loop.has_steps or self._scheduler.has_work

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer and chat template, read on first use. Raises CheckpointError."""
        return Tokenizer.of_model(self.config.model)

    @property
    def default_params(self) -> SamplingParams:
        """Sampling parameters of the checkpoint's generation_config.json, unless model.generation_config is "none"."""
        return self.checkpoint.default_params()

    def generate(
        self,
        prompts: str | Iterable[str | Sequence[int]],
        params: SamplingParams | Iterable[SamplingParams | None] | None = None,
        *,
        n: int = 1,
        priority: int = 0,
        progress: bool = False,
    ) -> list[Completion]:
        """Generate from prompts (texts or token ids) and wait for all of them; a Completion per prompt, in order.

        params: one for all prompts, or one per prompt; None: `default_params`.
        n: completions per prompt, which follow each other in the result. With a seed, number i (from 0) uses seed + i.
        priority: lower values are more urgent, for policies that have priorities.
        progress: show a progress bar on stderr.
        Raises InvalidRequestError, with `parameter` set, for an argument of a wrong type or a request that can never be
        served. A prompt for which no token can be sampled has the finish_reason "error", and the reason in `error`.
        """
        tokens = [arguments.prompt_tokens(prompt, self.tokenizer) for prompt in arguments.prompt_list(prompts)]
        return self._generate(tokens, params, n, priority, progress=progress)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        params: SamplingParams | Iterable[SamplingParams | None] | None = None,
        *,
        n: int = 1,
        priority: int = 0,
        progress: bool = False,
        **template: Any,
    ) -> list[Completion]:
        """`generate` the next message of one conversation or of several, by the model's chat template.

        messages: [{"role": "user", "content": "..."}, ...], or a list of such lists.
        template: arguments of Tokenizer.chat (tools, continue_final_message), and any variables of the template.
        """
        tokens = [self.tokenizer.chat(one, **template) for one in arguments.conversations(messages)]
        return self._generate(tokens, params, n, priority, progress=progress)

    def _generate(
        self, prompts: Sequence[Sequence[int]], params: Any, n: int, priority: int, *, progress: bool
    ) -> list[Completion]:
        arguments.check_whole("n", n, 1)
        arguments.check_whole("priority", priority, MIN_PRIORITY)
        each = arguments.params_list(params, len(prompts), self.default_params)
        self._end_abandoned_streams()
        return generate(
            self,
            [prompt for prompt in prompts for _ in range(n)],
            [one.of_choice(choice) for one in each for choice in range(n)],
            priority=priority,
            progress=progress,
        )

    def stream(self, prompt: str | Sequence[int], params: SamplingParams | None = None) -> Iterator[TextDelta]:
        """Generate from one prompt and yield text as it is produced. Closing the iterator aborts the request."""
        tokens = arguments.prompt_tokens(prompt, self.tokenizer)
        self._end_abandoned_streams()
        return stream(self, tokens, arguments.checked_params(params))

    def astream(self, prompt: str | Sequence[int], params: SamplingParams | None = None) -> AsyncIterator[TextDelta]:
        """`stream` for asyncio; any number of streams may run concurrently in one event loop, batched together."""
        if self._async is None:
            self._async = AsyncGenerator(self)
        tokens = arguments.prompt_tokens(prompt, self.tokenizer)
        return self._async.stream(tokens, arguments.checked_params(params))

    def _end_abandoned_streams(self) -> None:
        if self._async is not None:
            self._async.end_abandoned()

    def call(self, name: str, arguments: Mapping[str, Any] | None = None) -> list[Any]:
        """Run a control operation (core/runner/control.py) on every rank; return the answers, plain data, by rank.

        Ordered with the steps: the ranks run the steps in flight first. Their results are kept, and committed by the
        next `step`. Waits for all answers, so no step runs meanwhile.

        Raises ControlError if the operation is unknown, refused or fails, after which the engine goes on. Raises
        ExecutorError when the engine is closed or a device or worker has failed; the engine can then only be closed.
        """
        self.require_usable()
        try:
            return self._executor.call(name, arguments or {})
        except ControlError:
            raise
        except BaseException as error:
            name_fault(error, PluginCall(self.parts.owner("executors"), "call()"))
            self._loop.failure = str(error) or type(error).__name__
            raise

    def start_trace(self, options: TraceOptions, notify: Callable[[str], None] = lambda directory: None) -> None:
        """Record phases, steps and requests, and on every rank operators and kernels, as `options` say.

        notify: called with a directory when recording begins, and with an empty text when it ends, so that other
        processes write their parts there. torch.profiler makes steps slower while recording.
        Raises ControlError if the options or a rank refuse, and ControlBusyError while another trace is recorded or
        written; ExecutorError as `call` does.
        """
        self.require_usable()
        self._traces.start(options, self.call, notify)

    def stop_trace(self) -> None:
        """End the recording now, if it has not ended, and write the trace in the background.

        Raises ControlError if there is none or the trace cannot be written, ExecutorError as `call` does.
        """
        self._traces.stop()

    def trace_report(self, *, wait: bool = False) -> Report | None:
        """The report on the latest trace; None: the trace is not written yet. Ends a recording that is due to end.

        wait: wait until the trace is written, if its recording has ended.
        Raises ControlError if no trace was started, or if writing it failed.
        """
        return self._traces.report(wait=wait)

    def reset_prefix_cache(self) -> int:
        """Empty the prefix cache; return the number of KV blocks freed.

        Running requests keep their blocks, which no later request shares. Ranks do not know which blocks are cached, so
        they are not called.
        """
        self.require_usable()
        freed = self._scheduler.reset_prefix_cache()
        self._flush_kv_events()
        return freed

    def stats(self) -> EngineStats:
        """Current counters and gauges."""
        return attrs.evolve(
            self._loop.add_stats(self._scheduler.stats()),
            kv_events=None if self._kv_events is None else (self._kv_events.published, self._kv_events.dropped),
        )

    def check(self) -> Health:
        """Whether the engine is open, no step has failed and the executor can run steps."""
        return Health(ok=False, detail=self._loop.failure) if self._loop.failure else self._executor.check()

    def close(self) -> None:
        """Stop the executor and free the device; a second call does nothing.

        If streams of `astream` are open, this waits for the step in progress; the streams end with an ExecutorError.
        """
        if not self._closed:
            self._closed = True
            if self._async is not None:
                self._async.close()  # first, so that no step uses what is freed below
            self._loop.failure = "the engine is closed"
            self._loop.forget()
            self._traces.close()
            shut_down(self._executor, self.parts.owner("executors"))
            self._grammars.close()
            if self._kv_events is not None:
                self._kv_events.close()
            self.plugins.notify("engine_stopped", engine=self)

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
