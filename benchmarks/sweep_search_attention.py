"""Attention of near_sweep.py: as a backend chooses its launch, or by the fastest of all launches."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from attrs import evolve
from sweep_attention import FEW_SEQUENCES, INTERPRETER_SHARED_MEMORY, MAX_COMPILED_LENGTH, Attention, Config, label
from sweep_cases import MAX_CACHE_BYTES, AttentionCase, Space
from sweep_timing import SweepTimer, runs

from engine.core.compilation import record_launches
from engine.ops.attention.paged_decode_config import PRESETS, fit_preset, presets_of

CONTEXTS = (288, 1448, 7296)
"""Longest contexts with which decode launches are timed. A captured graph has one launch for all contexts: the one with
the least geometric mean of these times. The lengths divide the drawn ones evenly by their logarithms; shorter ones are
used where the cache would exceed MAX_CACHE_BYTES."""


def decode_searches(case: AttentionCase) -> list[AttentionCase]:
    """The cases whose times choose the launch for a case: the same but for the contexts."""
    longest = max(case.lengths)
    most = longest * MAX_CACHE_BYTES / case.cache_bytes
    lengths = sorted({min(context, max(round(most), CONTEXTS[0])) for context in CONTEXTS})
    return [
        evolve(case, lengths=tuple(max(round(length * context / longest), 1) for length in case.lengths))
        for context in lengths
    ]


class AttentionSearch:
    """Attention layers of cases of one kind. Only those of the last case measured are kept."""

    def __init__(self, device: torch.device, space: Space, timer: SweepTimer) -> None:
        self._device = device
        self._space = space
        self._timer = timer
        self._made: dict[AttentionCase, Attention] = {}
        self._best: dict[AttentionCase, Config] = {}

    def begin(self, cases: Sequence[AttentionCase]) -> None:
        """Begin to compile all launches in other processes."""
        compiled = set()
        for case in cases:
            # A prompt's length decides which launch is chosen, but a kernel is compiled for any length.
            made = self._make(evolve(case, lengths=tuple(min(length, MAX_COMPILED_LENGTH) for length in case.lengths)))
            for config in self.candidates(made):
                key = (case.shape, len(case.lengths) > FEW_SEQUENCES, config)
                if key not in compiled:
                    with record_launches():
                        made.calls_by(config)[0]()
                compiled.add(key)
        self.forget()

    def candidates(self, made: Attention) -> list[Config]:
        """The chosen launch, and all others: of decode attention those of every preset."""
        heads, size = made.case.shape, made.case.itemsize
        found = made.candidates()
        if made.case.kind == "prefill":
            return found
        shared = INTERPRETER_SHARED_MEMORY
        if self._device.type == "cuda":
            shared = torch.cuda.get_device_properties(self._device).shared_memory_per_multiprocessor
        presets = [*presets_of(heads.head_dim, size), *(PRESETS if size > 1 else ())]
        sizes = heads.heads, heads.kv_heads
        others = [fit_preset(preset, heads.head_dim, size, shared, sizes) for preset in presets]
        return list(dict.fromkeys(evolve(one, rotates=False) for one in (*found, *others)))

    def _make(self, case: AttentionCase) -> Attention:
        if case not in self._made:
            self._made[case] = Attention.make(case, self._device, self._space.dtype)
        return self._made[case]

    def forget(self) -> None:
        """Free the memory of what was measured."""
        self._made.clear()

    def search(self, case: AttentionCase) -> str:
        """Find the fastest launch. Returns it in words."""
        totals: dict[Config, float] = {}
        for one in [case] if case.kind == "prefill" else decode_searches(case):
            made = self._make(one)
            for config in self.candidates(made):
                calls = made.calls_by(config)
                seconds = self._timer.per_call(calls) if runs(calls[0]) else math.inf
                totals[config] = totals.get(config, 0.0) + math.log(seconds)
            if one != case:
                del self._made[one]
        self._best[case] = min(totals, key=lambda one: totals[one])
        return f"    {case.near_name}: {label(self._best[case])}, of {len(totals)}"

    def seconds(self, case: AttentionCase) -> float:
        """Seconds of a layer: by the launch that was found, or else as the backend chooses."""
        made = self._make(case)
        best = self._best.get(case)
        return self._timer.per_call(made.calls() if best is None else made.calls_by(best))

    def error(self, case: AttentionCase) -> float:
        """Relative error of the launch that `seconds` times."""
        made = self._make(case)
        best = self._best.get(case)
        return made.error() if best is None else made.error_by(best)

    def choices(self, case: AttentionCase) -> Mapping[str, float]:
        """Seconds by each launch, the backend's choice first."""
        made = self._make(case)
        ways = {label(config): made.calls_by(config) for config in self.candidates(made)}
        return {name: self._timer.per_call(calls) for name, calls in ways.items() if runs(calls[0])}
