"""The engine: one model behind a scheduler, an executor and the step loop that joins the two."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from os import PathLike, fspath
from reprlib import repr as shortened
from types import TracebackType
from typing import Any

import attrs
import numpy as np

from engine.core import arguments
from engine.core.arguments import Conversation, check_request
from engine.core.async_generation import AsyncGenerator
from engine.core.attention.base import AttentionBackend
from engine.core.config.default_model import demo_model
from engine.core.config.load import flatten, load_config
from engine.core.config.model_name import is_hub_name
from engine.core.config.tree import EngineConfig
from engine.core.device import find_device
from engine.core.errors import (
    ConfigError,
    ControlBusyError,
    ControlError,
    ExecutorError,
    InvalidRequestError,
)
from engine.core.executors.base import Executor, Health
from engine.core.executors.choose import PluginChoice
from engine.core.executors.rehearsal import rehearse
from engine.core.executors.step_times import StepTimes, measure_step_times
from engine.core.generation import Completion, generate, stream
from engine.core.grammars.base import GrammarBackend
from engine.core.hub.names import locate, locate_speculator
from engine.core.kv_events.stream import EventStream
from engine.core.models.base import ModelSpec
from engine.core.plugin_host.derived import max_len, settle, shape_of, speculator_spec
from engine.core.plugin_host.faults import PluginCall, name_fault
from engine.core.plugin_host.registry import Plugins, load_plugins
from engine.core.plugin_host.selection import check_names
from engine.core.profiling.live import StepMeter
from engine.core.profiling.peaks import find_peaks
from engine.core.quant.base import QuantMethod
from engine.core.schedulers.cache_metrics import CacheMetrics
from engine.core.schedulers.cache_observer import CacheObserver, join_observers
from engine.core.schedulers.grouped_block_manager import make_block_manager
from engine.core.schedulers.policy import SchedulingPolicy
from engine.core.schedulers.scheduler import Scheduler
from engine.core.speculators.base import Speculator
from engine.core.speculators.checked_speculator import CheckedSpeculator
from engine.core.speculators.device import DeviceSpeculator
from engine.core.speculators.device_proposals import DeviceProposals
from engine.core.speculators.draft_lengths import DraftLengths
from engine.core.startup import Listener, Phases
from engine.core.startup_display import show_startup
from engine.core.step_loop import STEP_PHASES, StepLoop
from engine.core.text.detokenizer import TextDelta
from engine.core.text.tokenizer import Tokenizer
from engine.core.timeline.merge import Report
from engine.core.timeline.recorder import Recorder, TraceOptions
from engine.core.types import CacheInfo, EngineStats, Output, Request, SamplingParams
from engine.core.wait_policy import set_wait_policy
from engine.core.weights.checkpoint import Checkpoint
from engine.core.weights.generation_config import not_honoured

log = logging.getLogger(__name__)


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
        self.config = _merged_config(config, model, names, settings)
        if not isinstance(plugins, Plugins | None):
            raise ConfigError(f"plugins must be what load_plugins() returns, not {shortened(plugins)}")
        if not (on_progress is None or callable(on_progress)):
            raise ConfigError(f"on_progress must be a function, not {shortened(on_progress)}")

        phases = Phases(on_progress)
        models = (self.config.model.path, self.config.model.tokenizer, self.config.speculator.model)
        on_hub = any(map(is_hub_name, models))
        with phases.phase("download" if on_hub else "checkpoint"), _listening(on_progress) as listener:
            speculator_config = locate_speculator(self.config, listener)
            model_config = locate(self.config.model, listener)
            self.config = attrs.evolve(self.config, model=model_config, speculator=speculator_config)
        with phases.phase("checkpoint"):
            path, generation = self.config.model.path, self.config.model.generation_config
            self.checkpoint = Checkpoint.open(path, generation_config=generation)
        with phases.phase("plugins"):
            self.plugins = plugins or load_plugins(self.config.plugins)
            check_names(self.config, self.plugins, objects)
        with phases.phase("import"):
            set_wait_policy(self.config.executor)
            import torch  # noqa: F401  (the slowest import of all, timed as a phase of its own)
        with phases.phase("device"):
            self.device = find_device(self.config.executor.device)
            self.config = settle(self.config, self.device)
        choice = PluginChoice(
            config=self.config, plugins=self.plugins, device=self.device, checkpoint=self.checkpoint, objects=objects
        )
        deployment, self._executor, cache_info = choice.start(phases, on_progress)
        self.parts, self._grammars = deployment.parts, deployment.grammars
        self._kv_events: EventStream | None = None
        try:
            model_spec = shape_of(self.parts.model, self.checkpoint.config)
            self.max_len = max_len(self.config, model_spec)
            self._warn_unused(model_spec)
            self.vocab_size = model_spec.vocab_size
            checked = self._make_speculator(model_spec)
            with phases.phase("rehearsal"):
                rehearse(
                    self._executor,
                    cache_info,
                    owner=self.parts.owner("executors"),
                    max_tokens=self.config.scheduler.max_batch_tokens,
                    max_len=self.max_len,
                    max_running=self.config.scheduler.max_running,
                    vocab_size=self.vocab_size,
                    full=self.device.type == "cuda",
                    propose=self.config.speculator.max_drafts if self.parts.drafter is not None else 0,
                )
                times = self._measure_steps(checked, cache_info)
            self.cache_info = attrs.evolve(cache_info, phases=phases.seconds)
            self._start_scheduling(checked, times)
            self.plugins.notify("engine_started", engine=self)
        except BaseException:
            self._executor.shutdown()  # the caller gets no engine to close
            if self._kv_events is not None:
                self._kv_events.close()
            raise

    def _warn_unused(self, model_spec: ModelSpec) -> None:
        """Log what the checkpoint's JSON files ask for and nothing computes."""
        model, checkpoint = self.parts.model, self.checkpoint
        keys = model.unknown_keys(checkpoint.config)
        if keys:
            log.warning(
                "config.json has keys that %s does not know, and that are not used: %s", model.__name__, ", ".join(keys)
            )
        settings = not_honoured(checkpoint.generation_config, model_spec.max_len)
        if settings:
            log.warning("generation_config.json has settings that are not used: %s", ", ".join(settings))

    def _make_meter(self) -> StepMeter | None:
        """Counts what steps compute; None where that is off or unknown."""
        config, cost = self.config.roofline, self.cache_info.cost
        peaks = find_peaks(config, self.device, self.cache_info.dtype)
        if not config.metrics or cost is None:
            return None
        if cost.uncounted:
            log.info("no roofline metrics: the FLOPs of %s are unknown", ", ".join(cost.uncounted))
            return None
        return StepMeter(cost, peaks)

    def _make_speculator(self, model_spec: ModelSpec) -> CheckedSpeculator | DeviceProposals | None:
        """The speculator, whose methods have been called once, or what keeps the proposals of one on the device; None:
        there is none."""
        spec = speculator_spec(self.config, model_spec)
        if self.parts.drafter is not None:
            return DeviceProposals(spec)
        if self.parts.speculator is None:
            return None
        options = self.parts.options["speculators"]
        speculator = CheckedSpeculator(self.parts.speculator(spec, options))
        speculator.rehearse()
        return speculator

    def _measure_steps(
        self, speculator: CheckedSpeculator | DeviceProposals | None, cache: CacheInfo
    ) -> StepTimes | None:
        """Measure how long steps are, to choose how many drafts they verify; None: they verify all."""
        if speculator is None or self.config.speculator.length == "fixed":
            return None
        scheduler, max_drafts = self.config.scheduler, speculator.spec.max_drafts
        times = measure_step_times(
            self._executor,
            cache,
            max_drafts=max_drafts,
            max_tokens=scheduler.max_batch_tokens,
            max_len=self.max_len,
            max_running=scheduler.max_running,
            owner=self.parts.owner("executors"),
            proposes=isinstance(speculator, DeviceProposals),
            ahead=self._steps_ahead,
        )
        if times is None:
            log.warning(
                "the times of steps with %s drafts cannot be measured: the KV cache or a step has no room for them; "
                "all drafts that are proposed are verified",
                max_drafts,
            )
        return times

    @property
    def _steps_ahead(self) -> int:
        """Steps that are in flight while the next is planned."""
        overlap = self.config.scheduler.overlap
        return int(self._executor.asynchronous if overlap == "auto" else overlap == "on")

    def _start_scheduling(
        self, speculator: CheckedSpeculator | DeviceProposals | None, times: StepTimes | None
    ) -> None:
        """Build the scheduler over the executor's KV cache, and the step loop."""
        lengths = None
        if speculator is not None and times is not None:
            lengths = DraftLengths(
                times.drafts, speculator.spec.max_drafts, plain=times.plain, overlaps=self._steps_ahead > 0
            )
        cache = self.config.cache
        cache_metrics = CacheMetrics(self.cache_info.kinds, sample=cache.metrics_sample) if cache.metrics else None
        observers: list[CacheObserver] = [cache_metrics] if cache_metrics is not None else []
        if self.config.kv_events.endpoint:
            self._kv_events = EventStream(self.config.kv_events, self.cache_info)
            observers.append(self._kv_events.recorder)
        meter = self._make_meter()
        self._scheduler = Scheduler(
            self.parts.policy,
            make_block_manager(
                self.cache_info,
                max_chunk=self.config.scheduler.max_batch_tokens,
                prefix_caching=cache.prefix_caching,
                observer=join_observers(observers),
            ),
            max_batch_tokens=self.config.scheduler.max_batch_tokens,
            max_running=self.config.scheduler.max_running,
            max_len=self.max_len,
            eos_tokens=self.checkpoint.eos_tokens(),
            cache_metrics=cache_metrics,
            meter=meter,
            speculator=speculator,
            draft_lengths=lengths,
            grammars=self._grammars,
            unknown_sequences=times.sequences if times is not None else (),
        )
        self._loop = StepLoop(
            self._scheduler,
            self._executor,
            steps_ahead=self._steps_ahead,
            owner=self.parts.owner("executors"),
            grammars=self._grammars,
            meter=meter,
            draft_lengths=lengths,
        )
        self._trace: Recorder | None = None
        """The recorder of the latest trace."""
        self._async: AsyncGenerator | None = None
        self._closed = False

    def step(self) -> list[Output]:
        """Plan and submit a step, then commit the oldest step in flight.

        With overlap, one step stays in flight: a step is committed only after the next one is submitted.
        Returns the new tokens of each request.
        Raises ExecutorError when a step failed (StepFaultError, naming the plugin, when a plugin made it fail); the
        engine can then only be closed.
        """
        if self._loop.failure:
            raise self._unusable()
        outputs = self._loop.step()
        if self._kv_events is not None:
            self._kv_events.flush()
        return outputs

    def _unusable(self) -> ExecutorError:
        """The error of a call that needs a working engine."""
        if self._closed:
            return ExecutorError("the engine is closed; make a new one")
        return ExecutorError(f"a step failed, so the engine can only be closed; make a new one ({self._loop.failure})")

    def add(self, request: Request) -> None:
        """Queue a request. Raises InvalidRequestError, and queues nothing, for a request that can never be served, and
        ExecutorError when the engine is closed or a step has failed. Waits for a grammar that is not compiled yet."""
        if self._loop.failure:
            raise self._unusable()
        check_request(request)
        for name, given in (("prompt", request.prompt), ("prediction", request.prediction)):
            ids = np.frombuffer(given.pack(), np.uint32)  # unsigned, so that a negative id is too large as well
            if ids.max(initial=0) >= self.vocab_size:
                token = given[int(ids.argmax())]
                raise InvalidRequestError(
                    f"the {name} holds token {token}, but the model's vocabulary has {self.vocab_size}", name
                )
        for name, tokens in (
            ("logit_bias", (token for token, _ in request.params.logit_bias)),
            ("stop_token_ids", iter(request.params.stop_token_ids)),
        ):
            if any(token >= self.vocab_size for token in tokens):
                raise InvalidRequestError(f"{name} names a token beyond the vocabulary of {self.vocab_size}", name)
        if request.params.grammar is not None:
            self._grammars.compile(request.params.grammar)
        self._scheduler.add(request)

    def can_add(self, request: Request) -> bool:
        """Whether `add` returns or raises without waiting for the request's grammar, which is compiled meanwhile."""
        return request.params.grammar is None or self._grammars.ready(request.params.grammar)

    def compile_grammar(self, params: SamplingParams | None) -> None:
        """Wait until the grammar of these parameters, if they have one, is compiled; may be called from any thread.

        Raises InvalidRequestError for a grammar that is refused.
        """
        if params is not None and params.grammar is not None:
            self._grammars.compile(params.grammar)

    def abort(self, request_id: str) -> Output | None:
        """Finish a request immediately and free its blocks; None if no running or waiting request has this id."""
        output = self._scheduler.abort(request_id)
        if self._kv_events is not None:
            self._kv_events.flush()
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
        n: completions per prompt, which follow each other in the result. With a seed, number i has the seed + i.
        priority: lower is more urgent than other requests, for policies that have priorities.
        progress: show a progress bar on stderr.
        Raises InvalidRequestError, with `parameter` set, for an argument of a wrong type and for what cannot be served.
        A prompt for which no token can be sampled has the finish_reason "error", and a sentence in `error`.
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
        if self._loop.failure:
            raise self._unusable()
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

        notify: called with a directory when recording begins, and with an empty text when it ends, for what other
        processes add. While recording, the steps are slower by what torch.profiler takes.
        Raises ControlError if the options or a rank refuse, and ControlBusyError while another trace is recorded or
        written; ExecutorError as `call` does.
        """
        if self._loop.failure:
            raise self._unusable()
        if self._trace is not None and self._trace.running:
            self.trace_report()
            if self._trace.running:
                raise ControlBusyError("a profile is in progress; stop it first, or wait for its end")
        refusal = options.refusal(self.device.type)
        if refusal is not None:
            raise ControlError(refusal)

        def ended() -> None:
            self._loop.recorder = None

        self._trace = self._loop.recorder = Recorder(
            options,
            call=self.call,
            timers=self._loop.timers,
            phases=STEP_PHASES,
            scheduler=self._scheduler,
            ended=ended,
            notify=notify,
        )
        self._trace.begin_if_due()

    def stop_trace(self) -> None:
        """End the recording now, if it has not ended, and write the trace in the background.

        Raises ControlError if there is none or the trace cannot be written, ExecutorError as `call` does.
        """
        if self._trace is None:
            raise ControlError("no profile was started; start one first")
        self._trace.stop()

    def trace_report(self, *, wait: bool = False) -> Report | None:
        """What the latest trace has, once it is written; None before that. wait: until it is, once it has ended.

        Raises ControlError if it failed. Ends a recording that has lasted `TraceOptions.max_seconds`.
        """
        if self._trace is None:
            raise ControlError("no profile was started; start one first")
        self._trace.check_time()
        return self._trace.report(wait=wait)

    def reset_prefix_cache(self) -> int:
        """Empty the prefix cache; return the number of KV blocks freed.

        Running requests keep their blocks, which no later request shares. Nothing is to be done on the ranks, for which
        a block is one among others.
        """
        if self._loop.failure:
            raise self._unusable()
        freed = self._scheduler.reset_prefix_cache()
        if self._kv_events is not None:
            self._kv_events.flush()
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
        """Stop the executor and free the device; a second call does nothing."""
        if not self._closed:
            self._closed = True
            self._loop.failure = "the engine is closed"
            self._loop.forget()
            if self._trace is not None:
                self._trace.close()
            self._executor.shutdown()
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


def _listening(on_progress: Listener | None) -> AbstractContextManager[Listener]:
    """The listener; None: one that shows a download, which may take long, and nothing else."""
    return show_startup(lines=False, prefix="") if on_progress is None else nullcontext(on_progress)


def _merged_config(
    config: EngineConfig | None,
    model: str | PathLike[str] | None,
    names: Mapping[str, str],
    settings: Mapping[str, Any],
) -> EngineConfig:
    """`config` (None: all defaults) with the arguments of Engine taking precedence, and the demo model by default.

    names: the plugin chosen by name for each extension point.
    """
    if not isinstance(config, EngineConfig | None):
        raise ConfigError(f"config must be an EngineConfig, not {shortened(config)}; give settings as arguments")
    given: dict[str, object] = {f"{point}.name": name for point, name in names.items()}
    given |= {key.replace("__", "."): value for key, value in settings.items()}
    if model is not None:
        given["model.path"] = model
    given = {key: fspath(value) if isinstance(value, PathLike) else value for key, value in given.items()}
    base = {key: (value, "config") for key, value in flatten(config).items()} if config is not None else {}
    merged = load_config(overrides={key: (value, "argument") for key, value in given.items()}, defaults=base).config
    if not merged.model.path:
        merged = attrs.evolve(merged, model=attrs.evolve(merged.model, path=demo_model()))
    if not merged.model.path:
        raise ConfigError("no model is named; give a directory, or a name on the hub, as model.path (--model)")
    return merged
