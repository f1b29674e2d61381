"""Attention of shape_sweep.py: by the engine's Triton backend, and by all launches that its rules may choose."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from attention_batch import attention_error, make_batch
from attrs import evolve, frozen
from sweep_cases import AttentionCase
from sweep_timing import Call, SweepTimer, run_in_threads, runs
from tuned_attention import tuned_decode, tuned_prefill

from engine.core.attention import AttentionBackend, AttentionSpec, ForwardBatch, GraphSlot, KVPool
from engine.core.plugin_host import load_plugins
from engine.ops.attention.paged_decode_config import DecodeConfig, decode_configs
from engine.ops.attention.paged_prefill_config import (
    PrefillConfig,
    PrefillWork,
    can_persist,
    persistent_config,
    prefill_config,
)

BLOCK_SIZE = 16
COLD_BYTES = 160e6
"""Bytes of keys and values that are read before any are read again: three L2 caches of an H200."""
MAX_LAYERS = 48
MAX_COMPILED_LENGTH = 128
"""Length of the sequences that kernels are compiled with."""
FEW_SEQUENCES = 16
"""Decode kernels are compiled for up to this many sequences, and for more."""
INTERPRETER_SHARED_MEMORY = 65536

Config = DecodeConfig | PrefillConfig


@frozen(kw_only=True, eq=False)
class Attention:
    """Attention layers over random keys and values, and one batch."""

    case: AttentionCase
    spec: AttentionSpec
    pool: KVPool
    batch: ForwardBatch
    q: torch.Tensor
    backend: AttentionBackend[Any, Any]
    plan: Any

    @classmethod
    def make(cls, case: AttentionCase, device: torch.device, dtype: str) -> Attention:
        """Keys and values of enough layers that no cache holds them."""
        heads = case.shape
        layers = min(max(2, -(-int(COLD_BYTES) // case.cache_bytes)), MAX_LAYERS) if device.type == "cuda" else 1
        spec = AttentionSpec(
            num_layers=layers,
            num_heads=heads.heads,
            num_kv_heads=heads.kv_heads,
            head_dim=heads.head_dim,
            scale=heads.head_dim**-0.5,
            dtype=dtype,
            kv_dtype="float8_e4m3fn" if case.itemsize == 1 else dtype,
            block_size=BLOCK_SIZE,
            max_len=max(case.lengths),
            sliding_windows=(None,) * layers,
        )
        contexts = np.array(case.lengths, np.int32)
        news, decodes = (contexts, 0) if case.kind == "prefill" else (np.ones_like(contexts), len(contexts))
        batch, num_blocks = make_batch(contexts, news, decodes, BLOCK_SIZE, device)
        pool = KVPool(spec, num_blocks, device)
        for tensor in (*pool.keys, *pool.values):
            tensor.copy_(torch.randn(tensor.shape, dtype=getattr(torch, dtype), device=device))
        packed = torch.randn(len(batch.tokens), heads.heads + 2 * heads.kv_heads, heads.head_dim, device=device)
        backend_class = load_plugins().attention.get("triton").load()
        backend = backend_class(spec, pool, backend_class.options_class())
        plan = backend.plan(batch, None if case.kind == "prefill" else GraphSlot(num_sequences=batch.num_sequences))
        q = packed.to(getattr(torch, dtype))[:, : heads.heads]
        return cls(case=case, spec=spec, pool=pool, batch=batch, q=q, backend=backend, plan=plan)

    def calls(self) -> Sequence[Call]:
        """The backend's attention, one call per layer."""
        none = self.q[:, :0]
        return [
            lambda layer=layer: self.backend.forward(layer, self.q, none, none, self.plan)
            for layer in range(self.spec.num_layers)
        ]

    def chosen(self) -> Config:
        """The launch parameters that the backend's rule chose."""
        if self.case.kind == "prefill":
            [part] = self.plan.prefill
            return part.config
        config: Config = self.plan.decode_launch[0]
        return config

    def candidates(self) -> list[Config]:
        """Every outcome of the rule for heads like these, of any batch; the chosen one first."""
        heads, device = self.case.shape, self.q.device
        shared = INTERPRETER_SHARED_MEMORY
        if device.type == "cuda":
            shared = torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor
        if self.case.kind != "prefill":
            sizes = heads.heads, heads.kv_heads
            configs = decode_configs(heads.head_dim, self.pool.keys[0].itemsize, shared, sizes)
            return list(dict.fromkeys([self.chosen(), *(config for _, config in configs)]))
        group = heads.heads // heads.kv_heads
        works = [PrefillWork(longest=tokens, keys=tokens, tiles=1) for tokens in (max(self.case.lengths), 1)]
        others = [prefill_config(work, group, heads.head_dim, 2, shared) for work in works]
        if can_persist(self.pool.keys[0], self.q.dtype, group):
            works = [PrefillWork(longest=1, keys=keys, tiles=1) for keys in (math.inf, 1)]
            others += [persistent_config(heads.head_dim, work) for work in works]
        return list(dict.fromkeys([self.chosen(), *others]))

    def calls_by(self, config: Config) -> Sequence[Call]:
        """As `calls`, by given launch parameters."""
        call = (tuned_decode if isinstance(config, DecodeConfig) else tuned_prefill)(self, config)
        return [lambda layer=layer: call(layer, self.q) for layer in range(self.spec.num_layers)]

    def error(self) -> float:
        """Relative error of the first and the last sequence's last token, next to the definition in float64."""
        return self._error_of(self.calls()[0]())

    def error_by(self, config: Config) -> float:
        """As `error`, by given launch parameters."""
        return self._error_of(self.calls_by(config)[0]())

    def _error_of(self, out: object) -> float:
        assert isinstance(out, torch.Tensor)
        return attention_error(self, out)


class AttentionSweep:
    """The attention layers of all cases of one kind. Only those of the last case measured are kept."""

    def __init__(
        self,
        device: torch.device,
        dtype: str,
        timer: SweepTimer,
        cases: Sequence[AttentionCase],
        others: Sequence[AttentionCase],
    ) -> None:
        """others: further cases, measured only by the launch that the rule chooses."""
        self._device = device
        self._dtype = dtype
        self._timer = timer
        self._cases = cases
        self._others = others
        self._made: dict[AttentionCase, Attention] = {}

    def tune(self) -> str:
        """Compile all kernels in threads. Returns an empty text, as no choice is tuned."""
        calls: dict[tuple[object, ...], Call] = {}
        for case in (*self._cases, *self._others):
            # A prompt's length decides which launch is chosen, but a kernel is compiled for any length.
            lengths = tuple(min(length, MAX_COMPILED_LENGTH) for length in case.lengths)
            made = Attention.make(evolve(case, lengths=lengths), self._device, self._dtype)
            for config in made.candidates() if case in self._cases else [made.chosen()]:
                calls.setdefault((case.shape, len(lengths) > FEW_SEQUENCES, config), made.calls_by(config)[0])
        run_in_threads(list(calls.values()))
        return ""

    def _make(self, case: AttentionCase) -> Attention:
        if case not in self._made:
            self._made[case] = Attention.make(case, self._device, self._dtype)
        return self._made[case]

    def forget(self) -> None:
        """Free the memory of what was measured."""
        self._made.clear()

    def seconds(self, case: AttentionCase) -> float:
        """Seconds of a layer."""
        return self._timer.per_call(self._make(case).calls())

    def error(self, case: AttentionCase) -> float:
        return self._make(case).error()

    def choices(self, case: AttentionCase) -> Mapping[str, float]:
        """Seconds by each launch that the rule could have chosen, the chosen first."""
        made = self._make(case)
        ways = {label(config): made.calls_by(config) for config in made.candidates()}
        return {name: self._timer.per_call(calls) for name, calls in ways.items() if runs(calls[0])}


def label(config: Config) -> str:
    """Launch parameters in words."""
    if isinstance(config, DecodeConfig):
        fold = f", {config.fold} heads folded" if config.fold > 1 else ""
        return (
            f"{config.block_n} keys, {config.num_warps} warps, {config.num_stages} stages,"
            f" {config.programs_per_sm} programs per SM{fold}"
        )
    kernel = "persistent " if config.persistent else ""
    return f"{kernel}{config.block_m}x{config.block_n}, {config.num_warps} warps, {config.num_stages} stages"
