"""Adds up what the steps of a serving engine compute and move, and the least time that takes on its device."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from attrs import frozen

from engine.core.profiling.context_sums import ContextSums
from engine.core.profiling.cost import ModelCost, Peaks
from engine.core.profiling.step_shape import total_pairs, visible_keys, visible_pairs

if TYPE_CHECKING:
    from engine.core.types import Step

StepKind = Literal["prefill", "decode", "mixed"]
"""Steps of prefill chunks alone, of decodes alone, of both."""


@frozen(kw_only=True)
class StepWork:
    """What all steps of one kind have computed and moved so far, on one rank."""

    kind: StepKind
    steps: int = 0
    seconds: float = 0.0
    """From the submission of each step, or from the result of the step before if that came later, to its result."""
    floor_seconds: float | None = None
    """The least that the steps take at the device's peaks (`Work.step_floor`); None: the peaks are unknown."""
    flops: float = 0.0
    weight_bytes: float = 0.0
    kv_read: float = 0.0
    kv_written: float = 0.0


class ClosedForm:
    """A ModelCost as few numbers, to be evaluated in every step."""

    def __init__(self, cost: ModelCost) -> None:
        self.windows = cost.windows
        self._token_flops = self._token_flops8 = self._sampled_flops = self._sampled_flops8 = 0.0
        self._token_weights = self._sampled_weights = self._kv_written = self._state_bytes = 0
        self._pair_flops = [0] * len(self.windows)
        self._key_bytes = [0] * len(self.windows)
        experts: dict[float, int] = {}
        for module in cost.modules:
            if module.rows == "tokens":
                self._token_flops += module.flops_per_row
                self._token_flops8 += module.flops_per_row * module.eight_bit
                self._token_weights += module.weight_bytes
            else:
                self._sampled_flops += module.flops_per_row
                self._sampled_flops8 += module.flops_per_row * module.eight_bit
                self._sampled_weights += module.weight_bytes
            if module.flops_per_pair:
                place = self.windows.index(module.window)
                self._pair_flops[place] += module.flops_per_pair
                self._key_bytes[place] += module.kv_bytes_per_token
                self._kv_written += module.kv_bytes_per_token
            self._state_bytes += module.state_bytes
            if module.num_experts:
                unused = 1 - module.top_k / module.num_experts
                experts[unused] = experts.get(unused, 0) + module.expert_bytes
        self._experts = tuple(experts.items())

    def work(
        self, tokens: int, sampled: int, sequences: int, pairs: list[int], keys: list[int], iterations: int
    ) -> tuple[float, float, float, float, float]:
        """(FLOPs, the part of them in 8-bit layers, weight bytes, KV bytes read, KV bytes written) of a step.

        pairs, keys: per window. The others are the fields of StepShape.
        """
        flops = self._token_flops * tokens + self._sampled_flops * sampled
        read = written = float(self._state_bytes * sequences)
        for place, number in enumerate(pairs):
            flops += self._pair_flops[place] * number
            read += self._key_bytes[place] * keys[place]
        weights = float(self._token_weights * iterations)
        if sampled:
            weights += self._sampled_weights * iterations
        for unused, size in self._experts:
            weights += size * (1 - unused ** (tokens / iterations)) * iterations
        flops8 = self._token_flops8 * tokens + self._sampled_flops8 * sampled
        return flops, flops8, weights, read, written + self._kv_written * tokens


class _Sums:
    """Sums of one kind of steps."""

    __slots__ = ("floor", "flops", "kv_read", "kv_written", "seconds", "steps", "weights")

    def __init__(self) -> None:
        self.steps = 0
        self.seconds = self.floor = self.flops = self.weights = self.kv_read = self.kv_written = 0.0


class StepMeter:
    """Counts each step when it is planned, and adds it up when its result is there.

    The cost per step does not depend on the number of decoding sequences; prefill chunks are counted one by one.
    """

    def __init__(
        self, cost: ModelCost, peaks: Peaks | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """peaks: of the device; None: floors are not computed. clock: seconds."""
        self._cost = ClosedForm(cost)
        self.peaks = peaks
        self._per_byte = self._per_flop = self._per_flop8 = 0.0
        if peaks is not None:
            self._per_byte = 1 / peaks.bandwidth
            self._per_flop = 1 / peaks.flops
            self._per_flop8 = 1 / (peaks.flops8 or peaks.flops)
        self.contexts = ContextSums(self._cost.windows)
        """Context sums of the decoding sequences; to be updated whenever a sequence is added or removed, or has
        accepted drafts."""
        self._clock = clock
        self._decodes: tuple[list[int], list[int]] = ([], [])
        self._sums: dict[StepKind, _Sums] = {}
        self._in_flight: deque[tuple[StepKind, float, tuple[float, float, float, float, float]]] = deque()
        self._last_result = 0.0

    def count_decodes(self, iteration: int, iterations: int) -> None:
        """Note the contexts of the decoding sequences, with drafts or without, in the step being planned.

        iteration: number of the step's first iteration. Call it before `contexts` changes for later steps.
        """
        seen = self.contexts.at(iteration)
        for later in range(1, iterations):
            seen = [sum(both) for both in zip(seen, self.contexts.at(iteration + later), strict=True)]
        self._decodes = seen, seen.copy()

    def submit(self, step: Step) -> None:
        """Count a step that is about to be submitted. Steps have results in the order of these calls."""
        decodes, chunks, iterations = len(step.decodes) * step.iterations, step.chunks, step.iterations
        pairs, keys = self._decodes
        tokens = sequences = sampled = decodes
        for chunk in chunks:
            tokens += chunk.count
            sequences += 1
            sampled += chunk.sample
            for place, window in enumerate(self._cost.windows):
                pairs[place] += visible_pairs(chunk.start, chunk.count, window)
                keys[place] += visible_keys(chunk.start, chunk.count, window)
        if step.drafts:  # the first token of a slice is counted by `count_decodes`, the others follow
            drafts = [len(part.tokens) - 1 for part in step.drafts]
            starts = [part.start + 1 for part in step.drafts]
            number = sum(drafts)
            tokens += number + len(drafts)
            sampled += number + len(drafts)
            sequences += len(drafts)
            for place, window in enumerate(self._cost.windows):
                pairs[place] += total_pairs(starts, drafts, window)
                keys[place] += number
        kind: StepKind = "decode" if not chunks else "mixed" if decodes or step.drafts else "prefill"
        self._in_flight.append(
            (kind, self._clock(), self._cost.work(tokens, sampled, sequences, pairs, keys, iterations))
        )

    def finish(self) -> None:
        """Add up the oldest step submitted, whose result has just come."""
        kind, begin, (flops, flops8, weights, kv_read, kv_written) = self._in_flight.popleft()
        now = self._clock()
        sums = self._sums.get(kind)
        if sums is None:
            sums = self._sums[kind] = _Sums()
        sums.steps += 1
        sums.seconds += now - max(begin, self._last_result)
        sums.flops += flops
        sums.weights += weights
        sums.kv_read += kv_read
        sums.kv_written += kv_written
        moving = (weights + kv_read + kv_written) * self._per_byte
        sums.floor += max(moving, (flops - flops8) * self._per_flop + flops8 * self._per_flop8)
        self._last_result = now

    def totals(self) -> tuple[StepWork, ...]:
        """The sums of each kind of which there were steps."""
        return tuple(
            StepWork(
                kind=kind,
                steps=sums.steps,
                seconds=sums.seconds,
                floor_seconds=None if self.peaks is None else sums.floor,
                flops=sums.flops,
                weight_bytes=sums.weights,
                kv_read=sums.kv_read,
                kv_written=sums.kv_written,
            )
            for kind, sums in sorted(self._sums.items())
        )
