"""One rank: model, attention backend, KV pool and sampler; takes a Step and gives back what it sampled."""

from __future__ import annotations

import time

import torch
from attrs import define

from engine.core.batch import BatchBuilder, ForwardPass
from engine.core.checkpoint import Checkpoint
from engine.core.config import EngineConfig
from engine.core.device import DeviceInfo
from engine.core.errors import CapacityError
from engine.core.kv_cache import KVPool
from engine.core.layers import LayerFactory
from engine.core.loader import DummySource, SafetensorsSource, load_weights
from engine.core.memory import estimate_activations, free_memory, plan_memory
from engine.core.sampler import Sampled, Sampler, prompt_logprobs
from engine.core.selection import Parts, attention_spec, fused_kernels, max_len, resolve_dtype
from engine.core.types import CacheInfo, NewSequence, SamplingParams, Slice, Step, StepResult, TokenLogprobs

PromptScores = tuple[tuple[int, tuple[TokenLogprobs, ...]], ...]
"""As StepResult.prompt_logprobs."""
MEMORY_SHARE = {"cpu": 0.5, "cuda": 0.9}
"""Of the free memory, for an engine that is told no other share."""


@define
class PendingStep:
    """A step whose kernels are launched; see executors.PendingResult."""

    step: int
    samples: list[Sampled | None]
    """One an iteration; None where nothing samples."""
    prompt_scores: PromptScores
    seconds: dict[str, float]

    def done(self) -> bool:
        """Whether `result` returns at once; results on a GPU are fetched by `result`."""
        return all(sampled is None or sampled.tokens.device.type == "cpu" for sampled in self.samples)

    def result(self) -> StepResult:
        """Wait for the tokens."""
        fetched = [sampled.to_host() if sampled is not None else ([], []) for sampled in self.samples]
        asked = any(entry is not None for _, entries in fetched for entry in entries)
        return StepResult(
            step=self.step,
            tokens=tuple(tuple(tokens) for tokens, _ in fetched),
            logprobs=tuple(tuple(entries) for _, entries in fetched) if asked else (),
            prompt_logprobs=self.prompt_scores,
            seconds=tuple(self.seconds.items()),
        )


class Runner:
    """Runs steps on one device. `start` comes first."""

    def __init__(self, config: EngineConfig, parts: Parts, checkpoint: Checkpoint, device: DeviceInfo) -> None:
        self.config = config
        self.parts = parts
        self.checkpoint = checkpoint
        self.device = device
        self._scored_prompts: dict[int, NewSequence] = {}
        if config.executor.threads:
            torch.set_num_threads(config.executor.threads)
        self._name = device.torch_name
        self._model_spec = parts.model.spec(checkpoint.config)
        self._dtype = resolve_dtype(config, checkpoint.config, device)
        self._spec = attention_spec(self._model_spec, config, self._dtype, max_len(config, self._model_spec))

    @torch.inference_mode()
    def start(self) -> CacheInfo:
        """Load the weights, measure, and make the KV cache. Raises CheckpointError or CapacityError."""
        free = free_memory(self.device)
        config = self.config
        quant = self.parts.quant.from_checkpoint(self.checkpoint.quantization, self.parts.options["quant"])
        fused = fused_kernels(config, self.device)
        layers = LayerFactory(dtype=self._dtype, device=self._name, quant=quant, fused=fused)
        self._model = self.parts.model(self.checkpoint.config, layers, self.parts.options["models"])
        dummy = config.model.load_format == "dummy"
        source = DummySource(config.model.seed) if dummy else SafetensorsSource(self.checkpoint)
        load_weights(layers, source)
        if fused and self.device.type == "cuda":
            from engine.core.layers.tuning import tune

            tune(layers, config.executor.kernel_cache)
        weights = layers.nbytes

        share = config.cache.memory_fraction or MEMORY_SHARE[self.device.type]
        activations = self._measure_activations()
        plan = plan_memory(
            config,
            self._spec,
            budget=int(free * share),
            weights=weights,
            activations=activations,
            bytes_per_block=KVPool.bytes_per_block(self._spec),
        )
        self._make_state(plan.num_blocks)
        return CacheInfo(
            num_blocks=plan.num_blocks,
            page_size=self._spec.page_size,
            weights_bytes=plan.weights,
            activation_bytes=plan.activations,
            kv_bytes=plan.kv,
            budget_bytes=plan.budget,
            device=f"{self._name} ({self.device.name})" if self.device.name else self._name,
            dtype=self._dtype,
        )

    @torch.inference_mode()
    def launch(self, step: Step) -> PendingStep:
        """Do the step. On a GPU this only launches the kernels."""
        begin = time.perf_counter()
        seconds = {"prepare": 0.0, "forward": 0.0, "sample": 0.0}
        self._update(step)
        sampling = [*step.decodes, *(piece.sequence for piece in step.chunks if piece.sample)]
        samples: list[Sampled | None] = []
        prompt_scores: PromptScores = ()
        for _ in range(step.iterations):
            batch = self._builder.build(step)
            run = ForwardPass(batch=batch, attention=self._attention, plan=self._attention.plan(batch), pool=self._pool)
            begin = _lap(seconds, "prepare", begin)
            hidden = self._model.forward(run)
            logits = self._model.logits(hidden[batch.logit_rows]) if sampling else None
            begin = _lap(seconds, "forward", begin)
            sampled = self._sampler.sample(logits, sampling) if logits is not None else None
            if sampled is not None:
                self._builder.keep(sampling, sampled.tokens)
            samples.append(sampled)
            if self._scored_prompts:
                prompt_scores = self._score_prompts(step, hidden)
            begin = _lap(seconds, "sample", begin)
        return PendingStep(step.id, samples, prompt_scores, seconds)

    def _make_state(self, num_blocks: int) -> None:
        """The KV pool and all that is kept between steps."""
        scheduler = self.config.scheduler
        self._pool = KVPool(self._spec, num_blocks, self._name)
        self._attention = self.parts.attention(self._spec, self._pool, self.parts.options["attention"])
        self._builder = BatchBuilder(
            max_running=scheduler.max_running,
            max_len=self._spec.max_len,
            page_size=self._spec.page_size,
            device=self._name,
        )
        self._sampler = Sampler(self._model_spec.vocab_size, self._name, self.checkpoint.eos_tokens())

    def _update(self, step: Step) -> None:
        self._builder.update(step)
        for sequence in step.finished:
            self._sampler.remove(sequence)
            self._scored_prompts.pop(sequence, None)
        for new in step.new:
            self._sampler.add(new)
            if new.params.prompt_logprobs is not None:
                self._scored_prompts[new.sequence] = new

    def _score_prompts(self, step: Step, hidden: torch.Tensor) -> PromptScores:
        """Log probabilities of the prompt tokens that this step's chunks lead to, where asked for."""
        scores = []
        row = len(step.decodes)
        for piece in step.chunks:
            new = self._scored_prompts.get(piece.sequence)
            if new is not None and piece.start < new.prompt_len - 1:
                targets = self._builder.prompt_targets(new, piece.start, piece.count)
                logits = self._model.logits(hidden[row : row + len(targets)])
                scores.append((piece.sequence, prompt_logprobs(logits, targets, new.params.prompt_logprobs or 0)))
            row += piece.count
        return tuple(scores)

    def _measure_activations(self) -> int:
        """Peak bytes of a full step beside the weights: measured on a GPU, estimated on a CPU.

        The step measured has few sequences; logits of as many rows as may run are counted on top.
        """
        if self.device.type == "cpu":
            return estimate_activations(self._model_spec, self.config, self._dtype)
        scheduler = self.config.scheduler
        tokens = min(scheduler.max_batch_tokens, scheduler.max_running * self._spec.max_len)
        step = _trial_step(tokens, self._spec.max_len, self._spec.page_size)
        try:
            self._make_state(sum(len(blocks) for _, blocks in step.blocks))
            torch.cuda.reset_peak_memory_stats(self._name)
            before = torch.cuda.memory_allocated(self._name)
            self.launch(step).result()
            peak = torch.cuda.max_memory_allocated(self._name) - before
        except torch.OutOfMemoryError as error:
            raise CapacityError(
                f"a step of {tokens} tokens does not fit on {self._name} beside the weights; "
                "use a lower --max-batch-tokens or a smaller model"
            ) from error
        return peak + min(scheduler.max_running, tokens) * 3 * self._model_spec.vocab_size * 4


def _trial_step(tokens: int, longest: int, page_size: int) -> Step:
    """A step of `tokens` prompt tokens, in sequences of at most `longest`."""
    lengths = [longest] * (tokens // longest) + ([tokens % longest] if tokens % longest else [])
    pages = -(-longest // page_size)
    greedy = SamplingParams(temperature=0.0, seed=0)
    return Step(
        id=0,
        decodes=(),
        chunks=tuple(Slice(i, 0, length, True) for i, length in enumerate(lengths)),
        new=tuple(
            NewSequence(sequence=i, tokens=(0,) * length, prompt_len=length, params=greedy)
            for i, length in enumerate(lengths)
        ),
        blocks=tuple(
            (i, tuple(range(i * pages, i * pages - (-length // page_size)))) for i, length in enumerate(lengths)
        ),
    )


def _lap(seconds: dict[str, float], phase: str, begin: float) -> float:
    """Add the time since `begin` to a phase; returns now."""
    now = time.perf_counter()
    seconds[phase] += now - begin
    return now
