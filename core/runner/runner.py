"""One rank: model, attention backend, KV pool and sampler; takes a Step and gives back what it sampled."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from attrs import define

from engine.core.attention.kv_pool import KVPool
from engine.core.config.tree import EngineConfig
from engine.core.device import DeviceInfo
from engine.core.distributed.rank_group import OneRank, RankGroup
from engine.core.errors import CapacityError, ConfigError, ExecutorError
from engine.core.layers import LayerFactory
from engine.core.layers.kv_scale_reader import find_kv_scales
from engine.core.models.forward_pass import ForwardPass
from engine.core.plugin_host.derived import (
    attention_spec,
    fused_kernels,
    max_len,
    refuses_ranks,
    resolve_dtype,
    resolve_kv_dtype,
    shape_of,
    use_graphs,
)
from engine.core.plugin_host.faults import TRACEBACK, blame
from engine.core.plugin_host.selection import Parts
from engine.core.quant.float8 import KVScales
from engine.core.runner.build_batch import build_batch
from engine.core.runner.cuda_graphs import DecodeGraphs, Recorder
from engine.core.runner.memory import MEMORY_SHARE, estimate_activations, format_bytes, free_memory, plan_memory
from engine.core.runner.persistent_batch import PersistentBatch
from engine.core.runner.piecewise_graphs import PiecewiseGraphs
from engine.core.runner.transfer import to_device
from engine.core.sampling.result import SampledTokens
from engine.core.sampling.sampler import Sampler, prompt_logprobs
from engine.core.startup import Phases
from engine.core.types import CacheInfo, NewSequence, PrefillChunk, SamplingParams, Step, StepResult, TokenLogprobs
from engine.core.weights.checkpoint import Checkpoint
from engine.core.weights.loader import DummySource, SafetensorsSource, load_weights

PromptScores = tuple[tuple[int, tuple[TokenLogprobs, ...]], ...]
"""As StepResult.prompt_logprobs."""
ROWS_AT_ONCE = 256
"""Logits of a prompt computed in one go."""


@define
class PendingStep:
    """A step whose kernels are launched; see executors.PendingResult."""

    step: int
    samples: Sequence[SampledTokens | None]
    """One an iteration, whose tokens are on the way to the host; None where no sequence samples."""
    prompt_scores: PromptScores
    seconds: dict[str, float]

    def done(self) -> bool:
        """Whether `result` returns at once."""
        return all(sampled is None or sampled.ready() for sampled in self.samples)

    def result(self) -> StepResult:
        """Wait for the tokens. Raises ExecutorError when the device failed, or logits were not finite."""
        try:
            fetched = [sampled.to_host() if sampled is not None else ([], []) for sampled in self.samples]
        except RuntimeError as error:  # torch raises nothing else
            raise ExecutorError(f"step {self.step} failed on the device: {error}") from error
        logprobs = tuple(tuple(entries) for _, entries in fetched)
        return StepResult(
            step=self.step,
            tokens=tuple(tuple(tokens) for tokens, _ in fetched),
            logprobs=logprobs if any(entry is not None for entries in logprobs for entry in entries) else (),
            prompt_logprobs=self.prompt_scores,
            seconds=tuple(self.seconds.items()),
        )


class Laps:
    """Seconds since the last call, by phase."""

    def __init__(self) -> None:
        self.seconds = {"prepare": 0.0, "launch": 0.0, "sample": 0.0}
        self._begin = time.perf_counter()

    def __call__(self, phase: str) -> None:
        """`phase` has just ended."""
        now = time.perf_counter()
        self.seconds[phase] += now - self._begin
        self._begin = now


class Runner:
    """Runs steps on one device. `start` comes first.

    With several ranks each has a runner, and all are given the same steps in the same order; the results are the same
    on all.
    """

    def __init__(
        self,
        config: EngineConfig,
        parts: Parts,
        checkpoint: Checkpoint,
        device: DeviceInfo,
        group: RankGroup | None = None,
    ) -> None:
        """group: the ranks that share the model; None: this one has all of it. Raises ConfigError for a number of ranks
        that cannot share it."""
        self.config = config
        self._group = group or OneRank()
        self.parts = parts
        self.checkpoint = checkpoint
        self.device = device
        self._scored_prompts: dict[int, NewSequence] = {}
        if config.executor.threads:
            torch.set_num_threads(config.executor.threads)
        self._name = device.torch_name
        self._model_spec = shape_of(parts.model, checkpoint.config)
        self._dtype = resolve_dtype(config, checkpoint.config, device)
        self._fused = fused_kernels(config, device)
        ranks = self._group.ranks
        refusal = refuses_ranks(self._model_spec, ranks)
        if refusal is not None:
            raise ConfigError(refusal)
        self._spec = attention_spec(
            self._model_spec,
            config,
            self._dtype,
            max_len(config, self._model_spec),
            resolve_kv_dtype(config, self._dtype, checkpoint.config, parts.quant, device),
            ranks,
        )
        self._kv_scales: tuple[KVScales, ...] = ()

    @torch.inference_mode()
    def start(self, phases: Phases | None = None) -> CacheInfo:
        """Load the weights, measure, and make the KV cache. Raises CheckpointError or CapacityError."""
        phases = phases or Phases()
        self._enter_device()
        with phases.phase("model"):
            free = free_memory(self.device)
            if self.device.type == "cpu":
                free //= self._group.ranks  # which all take theirs from the same
            config = self.config
            parts, options = self.parts, self.parts.options
            quant = parts.quant.from_checkpoint(self.checkpoint.quantization, options["quant"])
            layers = LayerFactory(
                dtype=self._dtype,
                device=self._name,
                quant=quant,
                group=self._group,
                fused=self._fused,
                owners={point: parts.owner(point) for point in ("quant", "models")},
            )
            self._model = parts.model(self.checkpoint.config, layers, options["models"])
        with phases.phase("weights"):
            dummy = config.model.load_format == "dummy"
            source = DummySource(config.model.seed) if dummy else SafetensorsSource(self.checkpoint)
            load_weights(layers, source, phases.progress, threads=config.model.load_threads)
        self._kv_scales = find_kv_scales(self._spec, layers.kv_scales)
        if self._fused and self.device.type == "cuda":
            from engine.core.autotune.tuner import tune

            with phases.phase("tuning"):
                tune(layers, config.executor.kernel_cache)
        weights = layers.nbytes

        share = config.cache.memory_fraction or MEMORY_SHARE[self.device.type]
        with phases.phase("memory"):
            activations = self._measure_activations()
        plan = plan_memory(
            config,
            self._spec,
            budget=int(free * share),
            weights=weights,
            activations=activations,
            bytes_per_block=KVPool.bytes_per_block(self._spec),
        )
        num_blocks = self._group.minimum(plan.num_blocks)  # a step's blocks are on all ranks
        try:
            with phases.phase("kv_cache"):
                self._make_state(num_blocks)
            with phases.phase("graphs"), self._blame_all("the capture of CUDA graphs"):
                self._capture(phases)
        except torch.OutOfMemoryError as error:
            raise CapacityError(
                f"the KV cache of {format_bytes(plan.kv)} and the CUDA graphs do not fit on {self._name} together;"
                " use a lower --memory-fraction, --kv-memory or --max-running"
            ) from error
        return CacheInfo(
            num_blocks=num_blocks,
            block_size=self._spec.block_size,
            weights_bytes=plan.weights,
            activation_bytes=plan.activations,
            kv_bytes=num_blocks * KVPool.bytes_per_block(self._spec),
            budget_bytes=plan.budget,
            device=f"{self._name} ({self.device.name})" if self.device.name else self._name,
            dtype=self._dtype,
            kv_dtype=self._spec.kv_dtype,
            phases=phases.seconds,
        )

    @torch.inference_mode()
    def launch(self, step: Step) -> PendingStep:
        """Do the step. On a GPU this only launches the kernels."""
        laps = Laps()
        self._enter_device()
        self._update(step)
        if self._graphs is not None and not step.chunks:
            samples = self._graphs.run(step.decodes, step.iterations, laps)
            return PendingStep(step.id, samples, (), laps.seconds)
        if self._graphs is not None:
            self._graphs.leave()
        return self._launch_kernels(step, laps)

    def _launch_kernels(self, step: Step, laps: Laps) -> PendingStep:
        """Do the step without graphs."""
        sampling = (*step.decodes, *(piece.sequence for piece in step.chunks if piece.sample))
        samples: list[SampledTokens | None] = []
        prompt_scores: PromptScores = ()
        for _ in range(step.iterations):
            batch, sampling_rows = build_batch(self._persistent_batch, step)
            run = ForwardPass(batch=batch, attention=self._attention, plan=self._attention.plan(batch), pool=self._pool)
            laps("prepare")
            if self._piecewise_graphs is not None and len(batch.tokens) <= self._piecewise_graphs.most_tokens:
                hidden = self._piecewise_graphs.run(batch, run.plan)
            else:
                hidden = self._model.forward(run)
            logits = None
            if sampling:
                everything = len(batch.logit_rows) == len(hidden)
                logits = self._model.logits(hidden if everything else hidden[batch.logit_rows])
            laps("launch")
            sampled = None
            if logits is not None:
                sampled = self._sampler.sample(logits, sampling, sampling_rows)
                self._persistent_batch.keep(sampling_rows, sampled.tokens)
            samples.append(sampled)
            if self._scored_prompts:
                prompt_scores = self._score_prompts(step, hidden)
            laps("sample")
        return PendingStep(step.id, samples, prompt_scores, laps.seconds)

    def _make_state(self, num_blocks: int) -> None:
        """The KV pool and all that is kept between steps."""
        max_running, device = self.config.scheduler.max_running, torch.device(self._name)
        self._pool = KVPool(self._spec, num_blocks, self._name, self._kv_scales)
        self._attention = self.parts.attention(self._spec, self._pool, self.parts.options["attention"])
        self._persistent_batch = PersistentBatch(
            max_running=max_running,
            max_len=self._spec.max_len,
            block_size=self._spec.block_size,
            scratch_block=self._pool.scratch_block,
            device=device,
        )
        self._sampler = Sampler(
            self._model_spec.vocab_size,
            device,
            self.checkpoint.eos_tokens(),
            max_running=max_running,
            fused=self._fused,
            agree=self._group.broadcast,
        )
        self._graphs: DecodeGraphs | None = None
        self._piecewise_graphs: PiecewiseGraphs | None = None

    def _capture(self, phases: Phases) -> None:
        """Make the graphs, where the configuration wants them and device and attention backend can."""
        if use_graphs(self.config, self._attention, self.device):
            if self.device.type == "cuda":
                torch.cuda.empty_cache()  # a capture cannot take back what the allocator keeps
            recorder = Recorder(torch.device(self._name))
            self._graphs = DecodeGraphs(
                self._model,
                self._attention,
                self._pool,
                self._persistent_batch,
                self._sampler,
                max_running=self.config.scheduler.max_running,
                max_len=self._spec.max_len,
                fused=self._fused,
                recorder=recorder,
            )
            self._graphs.capture_all(lambda done, total: phases.progress(done, total, "batch sizes"))
            if self.config.executor.graphs != "decode":
                self._piecewise_graphs = PiecewiseGraphs(
                    self._model,
                    self._attention,
                    self._pool,
                    recorder,
                    max_batch_tokens=self.config.scheduler.max_batch_tokens,
                    device=torch.device(self._name),
                )
                self._piecewise_graphs.record_all(lambda done, total: phases.progress(done, total, "token counts"))

    def _blame_all(self, call: str) -> AbstractContextManager[None]:
        """For what several plugins do together."""
        model, attention, quant = map(self.parts.owner, ("models", "attention", "quant"))
        return blame(f"{model}, {attention} or {quant}", call, TRACEBACK)

    def _enter_device(self) -> None:
        """Make the device this thread's current one: Triton launches there, wherever the tensors are."""
        if self.device.type == "cuda" and torch.cuda.current_device() != self.device.index:
            torch.cuda.set_device(self.device.index)

    def _update(self, step: Step) -> None:
        self._persistent_batch.update(step)
        for sequence in step.finished:
            self._sampler.remove(sequence)
            self._scored_prompts.pop(sequence, None)
        for new in step.new:
            self._sampler.add(new, self._persistent_batch.row(new.sequence))
            if new.params.prompt_logprobs is not None and len(new.tokens) == new.prompt_len:
                self._scored_prompts[new.sequence] = new

    def _score_prompts(self, step: Step, hidden: torch.Tensor) -> PromptScores:
        """Log probabilities of the prompt tokens that this step's slices lead to, where asked for."""
        scores = []
        row = len(step.decodes)
        for piece in step.chunks:
            new = self._scored_prompts.get(piece.sequence)
            if new is not None and piece.start < new.prompt_len - 1:
                targets = self._persistent_batch.prompt_targets(new, piece.start, piece.count)
                (there,) = to_device([targets], hidden.device)
                count = new.params.prompt_logprobs or 0
                entries: list[TokenLogprobs] = []
                for begin in range(0, len(targets), ROWS_AT_ONCE):  # logits of a whole chunk would take gigabytes
                    some = slice(begin, min(begin + ROWS_AT_ONCE, len(targets)))
                    logits = self._model.logits(hidden[row + some.start : row + some.stop])
                    entries += prompt_logprobs(logits, there[some], count)
                scores.append((piece.sequence, tuple(entries)))
            row += piece.count
        return tuple(scores)

    def _measure_activations(self) -> int:
        """Peak bytes of a full step beside the weights: measured on a GPU, estimated on a CPU.

        The step measured has few sequences; logits of as many rows as may run are counted on top. Graphs and the
        workspaces of attention come out of what the memory fraction leaves.
        """
        if self.device.type == "cpu":
            return estimate_activations(self._model_spec, self.config, self._dtype)
        scheduler = self.config.scheduler
        tokens = min(scheduler.max_batch_tokens, scheduler.max_running * self._spec.max_len)
        step = _trial_step(tokens, self._spec.max_len, self._spec.block_size)
        try:
            self._make_state(sum(len(blocks) for _, blocks in step.blocks))
            torch.cuda.reset_peak_memory_stats(self._name)
            before = torch.cuda.memory_allocated(self._name)
            with self._blame_all("the first step"):
                self.launch(step).result()
            peak = torch.cuda.max_memory_allocated(self._name) - before
        except torch.OutOfMemoryError as error:
            raise CapacityError(
                f"a step of {tokens} tokens does not fit on {self._name} beside the weights; "
                "use a lower --max-batch-tokens or a smaller model"
            ) from error
        del self._pool, self._attention, self._persistent_batch, self._sampler  # made anew, in their place
        torch.cuda.empty_cache()
        return peak + min(scheduler.max_running, tokens) * 3 * self._model_spec.vocab_size * 4


def _trial_step(tokens: int, longest: int, block_size: int) -> Step:
    """A step of `tokens` prompt tokens, in sequences of at most `longest`."""
    lengths = [longest] * (tokens // longest) + ([tokens % longest] if tokens % longest else [])
    pages = -(-longest // block_size)
    greedy = SamplingParams(temperature=0.0, seed=0)
    return Step(
        id=0,
        decodes=(),
        chunks=tuple(PrefillChunk(i, 0, length, True) for i, length in enumerate(lengths)),
        new=tuple(
            NewSequence(sequence=i, tokens=(0,) * length, prompt_len=length, params=greedy)
            for i, length in enumerate(lengths)
        ),
        blocks=tuple(
            (i, tuple(range(i * pages, i * pages - (-length // block_size)))) for i, length in enumerate(lengths)
        ),
    )
