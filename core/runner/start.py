"""The start of a runner: load the weights, measure a full step, make the device state, capture the CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from attrs import evolve

from engine.core.attention.state_pool import StatePool
from engine.core.config.tree import EngineConfig
from engine.core.device import DeviceInfo
from engine.core.distributed.rank_group import OneRank, RankGroup
from engine.core.errors import CapacityError, ConfigError
from engine.core.grammars.compiler import Grammars
from engine.core.layers import LayerFactory
from engine.core.layers.base import torch_dtype
from engine.core.layers.experts import Experts
from engine.core.layers.kv_scale_reader import find_kv_scales
from engine.core.layers.linear import Linear
from engine.core.layers.matmul import kernel_bytes
from engine.core.layers.sinks import find_sinks
from engine.core.models.base import Model
from engine.core.plugin_host.cache_groups import cache_layout
from engine.core.plugin_host.derived import (
    attention_spec,
    fused_kernels,
    max_len,
    refuses_ranks,
    resolve_dtype,
    resolve_kv_dtype,
    shape_of,
)
from engine.core.plugin_host.faults import TRACEBACK, blame, expect, name_fault
from engine.core.plugin_host.result_checks import ResultChecks
from engine.core.plugin_host.selection import Parts
from engine.core.profiling.cost import ModelCost
from engine.core.profiling.count import count_model
from engine.core.quant.base import QuantMethod
from engine.core.quant.float8 import KVScales
from engine.core.runner.device_state import DeviceState, GroupState
from engine.core.runner.first_uses import FirstUses
from engine.core.runner.graph_sizes import MIN_GRAPH_TOKENS, all_counts_recorded, extra_graph_memory
from engine.core.runner.memory import (
    MemoryPlan,
    estimate_activations,
    format_bytes,
    free_memory,
    logits_bytes,
    max_sampling_rows,
    memory_share,
    plan_memory,
)
from engine.core.runner.persistent_batch import PersistentBatch
from engine.core.runner.start_graphs import GraphStart
from engine.core.runner.step import StepLauncher, enter_device
from engine.core.runner.trial_step import TrialResult, TrialStep, full_step
from engine.core.runner.warm_up import MAX_KERNEL_ROWS, warm_up_sampling, warm_up_verification
from engine.core.sampling.sampler import Sampler
from engine.core.sampling.token_counts import TokenCounts
from engine.core.schedulers.prompt_step import SEQUENCE, SHORT_PROMPTS, chunked_prompt_steps, prompt_step
from engine.core.startup import Phases
from engine.core.types import CacheInfo
from engine.core.weights.checkpoint import Checkpoint
from engine.core.weights.loader import load_weights
from engine.core.weights.sources import WeightSource, weight_source

if TYPE_CHECKING:
    from engine.core.runner.drafter_start import DrafterStart


class RunnerStart:
    """Starts one rank, phase by phase.

    The constructor resolves what follows from the configuration alone, and refuses what cannot run.
    """

    def __init__(
        self,
        config: EngineConfig,
        parts: Parts,
        checkpoint: Checkpoint,
        device: DeviceInfo,
        group: RankGroup | None,
        grammars: Grammars | None = None,
    ) -> None:
        """Raises ConfigError for a number of ranks that cannot share the model."""
        self._config = config
        self._parts = parts
        self._checkpoint = checkpoint
        self._device = device
        self._group = group or OneRank()
        self._grammars = grammars
        self._name = device.torch_name
        self.checks = ResultChecks()
        """Checks of what the plugins return; to be ended after the first steps."""
        self._sinks: tuple[torch.Tensor | None, ...] = ()
        """Attention sinks per layer, once the weights are loaded; empty if the model has none."""
        self._model_spec = shape_of(parts.model, checkpoint.config)
        self._dtype = resolve_dtype(config, checkpoint.config, device)
        self._fused = fused_kernels(config, device)
        self._speculates = parts.speculates
        ranks = self._group.ranks
        refusal = refuses_ranks(self._model_spec, ranks)
        if refusal is not None:
            raise ConfigError(refusal)
        kv_dtype = resolve_kv_dtype(config, self._dtype, checkpoint.config, parts.quant, device)
        shape = (self._model_spec, config, self._dtype, max_len(config, self._model_spec), kv_dtype, ranks)
        self._spec = attention_spec(*shape)
        self.layout = cache_layout(*shape)
        """Which layers share block tables."""
        self._attention: Any = None
        """Makes the attention backend of a cache group; None if all layers keep a state."""
        if parts.attention is not None:
            self._attention = self.checks.attention(parts.attention, self.layout)
        self.layers: LayerFactory | None = None
        """The factory that made the model's layers, once the model is made."""
        self._drafter: DrafterStart | None = None
        if parts.drafter is not None:
            from engine.core.runner.drafter_start import DrafterStart

            self._drafter = DrafterStart(
                parts.drafter, config, device, self._group, self.checks, dtype=self._dtype, fused=self._fused
            )

    @property
    def factories(self) -> list[LayerFactory]:
        """The factories that made the layers of the model and of a speculator on the device, once these are made."""
        made = (self.layers, None if self._drafter is None else self._drafter.layers)
        return [factory for factory in made if factory is not None]

    @torch.inference_mode()
    def run(self, phases: Phases) -> tuple[StepLauncher, CacheInfo]:
        """Start the rank. Raises CheckpointError or CapacityError."""
        enter_device(self._device)
        has_kernels = self._fused and self._device.type == "cuda"
        if has_kernels:
            from engine.core.runner.compile_ahead import compile_ahead, end_compile_ahead, tune_first_rank_first
        with phases.phase("model"):
            free = free_memory(self._device)
            if self._device.type == "cpu":
                free //= self._group.ranks  # all ranks share the host's memory
            if has_kernels:
                self._open_overlapped_sums()
            model, layers = self._build_model()
            self.layers = layers
            if self._drafter is not None:
                self._drafter.build(model, layers)
        with phases.phase("weights"):
            self._load_weights(layers, phases)
            if self._drafter is not None:
                self._drafter.load(phases)
        kv_scales = find_kv_scales(self._spec, layers.kv_scales)
        self._sinks = find_sinks(self._spec, layers.sinks, self._parts.owner("models"))
        if has_kernels:
            with phases.phase("recording"):
                compile_ahead(
                    self._config, self._group, self.factories, lambda: self._record_launches(model, kv_scales)
                )
            with phases.phase("tuning"):
                tune_first_rank_first(self._config, self._group, self.factories)
        with phases.phase("memory"):
            trial = self._measure_step(model, kv_scales)
        plan = self._plan_memory(free, layers, trial.activations)
        num_blocks = self._group.minimum(plan.num_blocks)  # the blocks of a step exist on all ranks
        try:
            with phases.phase("kv_cache"):
                state = self._make_state(model, num_blocks, kv_scales)
            with phases.phase("graphs"), self._name_fault("the capture of CUDA graphs"):
                graphs = self._graphs.capture(state, phases, trial.max_graph_tokens)
            if self._device.type == "cuda":
                with phases.phase("warm_up"), self._name_fault("the warm-up"):
                    self._warm_up(state)
        except torch.OutOfMemoryError as error:
            raise self._do_not_fit(plan) from error
        if has_kernels:
            end_compile_ahead(self._config)
        first_uses = FirstUses(counts_kernels=has_kernels, decode_graphs=graphs.decode)
        operations = count_model(layers, self.layout).condensed()
        info = self._cache_info(plan, num_blocks, phases, operations)
        return StepLauncher(self._device, state, graphs, first_uses), info

    def _open_overlapped_sums(self) -> None:
        """Allocate the memory of sums next to computation, if there may be any."""
        rows = self._graphs.max_overlapped_rows(self._group.ranks, self._attention, self._parts.model)
        if rows:
            self._group.open_overlapped_sums(rows, self._model_spec.hidden_size, torch_dtype(self._dtype))

    def _build_model(self) -> tuple[Model, LayerFactory]:
        """The model, its layers still empty, and the factory that made them."""
        parts, options = self._parts, self._parts.options
        quant = parts.quant.from_checkpoint(self._checkpoint.quantization, options["quant"])
        owner = parts.owner("quant")
        expect(isinstance(quant, QuantMethod), owner, "from_checkpoint()", quant, "a QuantMethod")
        layers = LayerFactory(
            dtype=self._dtype,
            device=self._name,
            quant=quant,
            group=self._group,
            fused=self._fused,
            cache=self.layout,
            owners={point: parts.owner(point) for point in ("quant", "models")},
            stored=self._source.names,
            expert_parallel=self._config.executor.expert_parallel,
            max_len=self._spec.max_len,
            hidden_states=None if self._drafter is None else self._drafter.make_hidden_states(),
        )
        cls = self.checks.model(parts.model, self._model_spec, self._dtype)
        model = cls(self._checkpoint.config, layers, options["models"])
        for layer in layers.layers:
            if isinstance(layer, (Linear, Experts)):
                layer.check_results(self.checks)
        if layers.expert_parallel and not any(isinstance(layer, Experts) for layer in layers.layers):
            raise ConfigError(
                "executor.expert_parallel (--expert-parallel) is set, but this model has no experts; leave it out"
            )
        return model, layers

    def _load_weights(self, layers: LayerFactory, phases: Phases) -> None:
        load_weights(layers, self._source, phases.progress, threads=self._config.model.load_threads)

    @cached_property
    def _source(self) -> WeightSource:
        """Where the weights come from. Raises CheckpointError if a file is missing or damaged."""
        return weight_source(self._checkpoint, self._config.model)

    def _measure_step(self, model: Model, kv_scales: tuple[KVScales, ...]) -> TrialResult:
        """What a full step needs on top of the weights: measured on a GPU, estimated on a CPU.

        The measured step has few sequences; the logits of a full batch are added, and what CUDA graphs of more than
        MIN_GRAPH_TOKENS tokens hold. Smaller graphs and the workspaces of attention use the memory that the memory
        fraction leaves free.
        """
        tokens = self._trial.tokens
        given = min(self._config.executor.max_graph_tokens, tokens)
        if self._device.type == "cpu":
            estimate = estimate_activations(self._model_spec, self._config, self._dtype, speculates=self._speculates)
            return TrialResult(activations=estimate, max_graph_tokens=given or min(MIN_GRAPH_TOKENS, tokens))
        try:
            found, captures = self._run_trial_step(model, kv_scales)
        except torch.OutOfMemoryError as error:
            states, fewer = "", ""
            if self.layout.states:
                states, fewer = (
                    f" and the states of {self._config.scheduler.max_running} sequences",
                    " or --max-running",
                )
            raise CapacityError(
                f"a step of {tokens} tokens does not fit on {self._name} next to the weights{states}; "
                f"use a lower --max-batch-tokens{fewer} or a smaller model"
            ) from error
        torch.cuda.empty_cache()
        largest = given if captures else 0
        if captures and not given:
            # The largest of all ranks': a rank with a slow host delays all.
            largest = -self._group.minimum(-found.max_graph_tokens)
        rows = min(max_sampling_rows(self._config, speculates=self._speculates), tokens)
        activations = int(found.activations * (1 + extra_graph_memory(largest, tokens)))
        sums = self._group.overlapped_sums
        activations += logits_bytes(self._model_spec, rows) + (0 if sums is None else sums.nbytes)
        return TrialResult(activations=activations, max_graph_tokens=largest)

    def _run_trial_step(self, model: Model, kv_scales: tuple[KVScales, ...]) -> tuple[TrialResult, bool]:
        """What a full step needs, run on a device state of its own, which is then freed; and whether steps with prefill
        chunks will have graphs."""
        state = self._make_state(model, self._trial.num_blocks, kv_scales)
        captures = self._graphs.captures_prefill(state)
        timed = captures and not self._config.executor.max_graph_tokens
        return self._trial.measure(state, self._name_fault, timed=timed), captures

    @cached_property
    def _trial(self) -> TrialStep:
        kinds, max_len, block_size = self.layout.kinds, self._spec.max_len, self._spec.block_size
        return TrialStep(
            step=full_step(self._config, max_len, kinds, block_size, propose=self._drafter is not None),
            device=self._device,
            not_built_in=self._parts.not_built_in,
        )

    def _record_launches(self, model: Model, kv_scales: tuple[KVScales, ...]) -> None:
        """Launch the kernels of the rest of the start, on a device state of its own, which is then freed.

        In the order in which the start needs them, so that it can go on while others are compiled. Only the prompts of
        the rehearsal come earlier, since kernels of attention take longest to compile.
        """
        from engine.core.autotune.tuner import collect_tasks

        state = self._make_state(model, self._trial.num_blocks, kv_scales)
        launcher = self._trial.run_untimed(state)
        tokens = self._trial.tokens
        kinds, block_size = self.layout.kinds, self._spec.block_size
        for step in chunked_prompt_steps(block_size, kinds, block_size):
            launcher.launch(step)
        for last, short in enumerate(SHORT_PROMPTS, SEQUENCE):
            step = prompt_step([min(short, self._spec.max_len, tokens)], kinds, block_size, first=last + 1)
            launcher.launch(evolve(step, finished=(last,)))
        graphs, _ = self._graphs.make(state, min(self._config.executor.max_graph_tokens or tokens, tokens))
        if graphs.decode is not None:
            graphs.decode.run_without_graphs()
        if graphs.piecewise is not None:
            tasks = [task for factory in self.factories for task in collect_tasks(factory)]
            graphs.piecewise.run_all_without_graphs(all_counts_recorded(task.rows for task in tasks))
        self._warm_up(state)

    def _plan_memory(self, free: int, layers: LayerFactory, activations: int) -> MemoryPlan:
        """free: bytes before the weights were loaded. layers: the model's. activations: bytes of a full step's."""
        shapes = frozenset[tuple[int, ...]]().union(*(factory.packed_shapes for factory in self.factories))
        return plan_memory(
            self._config,
            self._spec.max_len,
            self.layout.kinds,
            budget=int(free * memory_share(self._config, self._device)),
            weights=layers.nbytes + (0 if self._drafter is None else self._drafter.nbytes),
            activations=activations,
            kernels=kernel_bytes(len(shapes), self._config.scheduler.max_batch_tokens),
            states=self.layout.state_bytes(self._config.scheduler.max_running),
            bytes_per_block=self._bytes_per_block,
            penalties=TokenCounts.max_bytes(self._model_spec.vocab_size, self._config.scheduler.max_running),
        )

    def _do_not_fit(self, plan: MemoryPlan) -> CapacityError:
        """The error of a start whose caches and CUDA graphs need more memory than there is."""
        sizes = {"KV cache": plan.kv, "states": plan.states}
        caches = ", ".join(f"the {name} of {format_bytes(size)}" for name, size in sizes.items() if size)
        settings = "--max-graph-tokens or --max-running"
        if plan.kv:
            settings = f"--memory-fraction, --kv-memory, {settings}"
        return CapacityError(
            f"{caches} and the CUDA graphs do not fit on {self._name} together; use a lower {settings}"
        )

    @cached_property
    def _graphs(self) -> GraphStart:
        return GraphStart(
            config=self._config,
            device=self._device,
            hidden_size=self._model_spec.hidden_size,
            dtype=self._dtype,
            max_len=self._spec.max_len,
            layout=self.layout,
            fused=self._fused,
            speculates=self._speculates,
        )

    @property
    def _bytes_per_block(self) -> int:
        """Bytes of one block, in the layers of the model and of a speculator."""
        return self.layout.bytes_per_block + (0 if self._drafter is None else self._drafter.bytes_per_block)

    def _make_state(self, model: Model, num_blocks: int, kv_scales: tuple[KVScales, ...]) -> DeviceState:
        """The caches, with `num_blocks` blocks, and all else that is kept between steps."""
        max_running, device = self._config.scheduler.max_running, torch.device(self._name)
        options, layout = self._parts.options.get("attention"), self.layout
        pools = layout.make_pools(num_blocks, self._name, kv_scales)
        groups = []
        for group, pool in zip(layout.groups, pools, strict=True):
            attention = self._attention(group.spec, pool, options)
            if any(group.spec.sinks):
                with blame(self._parts.owner("attention"), "set_sinks()"):
                    attention.set_sinks([self._sinks[layer] for layer in group.layers])
            groups.append(GroupState(pool=pool, attention=attention))
        groups += [
            GroupState(pool=StatePool(state.tensors, len(state.layers), max_running, self._name), attention=None)
            for state in layout.states
        ]
        draft_rows = max_running if self._speculates else 0
        persistent_batch = PersistentBatch(
            max_running=max_running,
            max_len=self._spec.max_len,
            # Nothing reads the block tables of a model without blocks: one column is enough.
            block_size=self._spec.block_size if layout.kinds else self._spec.max_len,
            scratch_block=num_blocks,
            device=device,
            groups_by_kind=[kind.groups for kind in layout.kinds],
            draft_rows=draft_rows,
        )
        sampler = Sampler(
            self._model_spec.vocab_size,
            device,
            self._checkpoint.eos_tokens(),
            max_running=max_running,
            fused=self._fused,
            same_on_all_ranks=self._group.broadcast,
            grammars=self._grammars,
            draft_rows=draft_rows,
        )
        drafter = None
        if self._drafter is not None:
            drafter = self._drafter.make(num_blocks, persistent_batch, self._attention, options)
        return DeviceState(
            model=model, groups=tuple(groups), persistent_batch=persistent_batch, sampler=sampler, drafter=drafter
        )

    def _warm_up(self, state: DeviceState) -> None:
        """Run what no CUDA graph holds and the trial step did not need."""
        rows = min(MAX_KERNEL_ROWS + 1, self._config.scheduler.max_running)
        hidden = torch.zeros(rows, self._model_spec.hidden_size, dtype=torch_dtype(self._dtype), device=self._name)
        warm_up_sampling(state.model, state.sampler, hidden)
        if self._speculates:
            warm_up_verification(state.sampler, state.model.logits(hidden[:1]), state.persistent_batch.last_tokens)

    def _cache_info(self, plan: MemoryPlan, num_blocks: int, phases: Phases, cost: ModelCost) -> CacheInfo:
        return CacheInfo(
            num_blocks=num_blocks,
            block_size=self._spec.block_size,
            kinds=self.layout.kinds,
            states=sum(len(group.layers) for group in self.layout.states),
            state_bytes=plan.states,
            state_rows=self._config.scheduler.max_running if self.layout.states else 0,
            blocks_per_context=plan.blocks_per_context,
            weights_bytes=plan.weights,
            activation_bytes=plan.activations,
            penalty_bytes=plan.penalties,
            kernel_bytes=plan.kernels,
            kv_bytes=num_blocks * self._bytes_per_block,
            budget_bytes=plan.budget,
            device=f"{self._name} ({self._device.name})" if self._device.name else self._name,
            dtype=self._dtype,
            kv_dtype=self._spec.kv_dtype,
            cost=cost,
            phases=phases.seconds,
        )

    @contextmanager
    def _name_fault(self, call: str) -> Iterator[None]:
        """Name the plugin that raised an error in the `with` block; if it is unknown, name all that take part."""
        points = ("models", "quant") if self._parts.attention is None else ("models", "attention", "quant")
        *others, last = map(self._parts.owner, points)
        with blame(f"{', '.join(others)} or {last}", call, TRACEBACK):
            try:
                yield
            except BaseException as error:
                name_fault(error, not_built_in=self._parts.not_built_in)
                raise
