"""The sums of a serving engine's steps, against a count of every sequence of every step."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from engine.core.config.tree import RooflineConfig
from engine.core.device import DeviceInfo
from engine.core.engine import Engine
from engine.core.errors import ConfigError
from engine.core.profiling import ModelCost, ModuleCost, Peaks, StepMeter, StepShape, Work, find_peaks
from engine.core.profiling.context_sums import ContextSums
from engine.core.profiling.step_shape import Window
from engine.core.schedulers.block_manager import BlockManager
from engine.core.schedulers.policy import RequestView, SchedulingPolicy, Split
from engine.core.schedulers.scheduler import Scheduler
from engine.core.speculators import CheckedSpeculator, SpeculatedSequence, Speculator, SpeculatorSpec
from engine.core.types import Request, SamplingParams, Step, StepResult
from engine.testing.checkpoints import make_checkpoint

WINDOWS: tuple[Window, ...] = (None, 5, 12)
COST = ModelCost(
    modules=(
        ModuleCost(name="a", kind="linear", eight_bit=True, weight_bytes=1000, flops_per_row=300),
        ModuleCost(name="b", kind="linear", weight_bytes=70, flops_per_row=30),
        ModuleCost(name="c", kind="experts", num_experts=8, top_k=2, expert_bytes=640, flops_per_row=90),
        ModuleCost(name="d", kind="lm_head", rows="sampled", weight_bytes=500, flops_per_row=200),
        ModuleCost(name="e", kind="state", state_bytes=11),
        *(
            ModuleCost(name=f"f{window}", kind="attention", window=window, flops_per_pair=8, kv_bytes_per_token=3)
            for window in WINDOWS
        ),
    )
)
PEAKS = Peaks(bandwidth=100, flops=1000, flops8=2000)


class Changing(SchedulingPolicy[Any]):
    """Decodes several iterations at times, and at times not all sequences."""

    api = "1"

    def __init__(self) -> None:
        super().__init__(None)
        self.random = random.Random(4)

    def split(self, budget: int, waiting: object, running: object) -> Split:
        return Split(decode=self.random.choice((2, budget, budget)), prefill=budget)

    def victim(self, running: list[RequestView]) -> RequestView:  # type: ignore[override]
        return running[-1]

    def order(self, waiting: list[RequestView], now: float) -> list[RequestView]:  # type: ignore[override]
        return waiting

    def decode_steps(self, running: object, waiting: object) -> int:
        return self.random.choice((1, 1, 3))


class Recount:
    """Counts each step again, sequence by sequence."""

    def __init__(self) -> None:
        self.computed: dict[int, int] = {}
        self.work: defaultdict[str, Work] = defaultdict(Work)
        self.floor: defaultdict[str, float] = defaultdict(float)
        self.iterations = 0

    def step(self, step: Step) -> None:
        for number in step.finished:
            self.computed.pop(number, None)
        self.computed.update(step.positions)
        total = Work()
        for _ in range(step.iterations):
            for number in step.decodes:
                self.computed[number] += 1
            shape = StepShape.of(
                decodes=[self.computed[number] for number in step.decodes],
                chunks=[
                    *((chunk.start, chunk.count) for chunk in step.chunks),
                    *((part.start, len(part.tokens)) for part in step.drafts),
                ],
                sampled=len(step.decodes)
                + sum(chunk.sample for chunk in step.chunks)
                + sum(len(part.tokens) for part in step.drafts),
                windows=WINDOWS,
            )
            total += COST.work(shape)
        for chunk in step.chunks:
            self.computed[chunk.sequence] = chunk.start + chunk.count
        kind = "decode" if not step.chunks else "mixed" if step.decodes or step.drafts else "prefill"
        self.iterations = max(self.iterations, step.iterations)
        self.work[kind] += total
        self.floor[kind] += total.step_floor(PEAKS)


class Guessing(Speculator):
    """Proposes something, now and then."""

    api = "1"

    def propose(self, sequence: SpeculatedSequence, limit: int) -> list[int]:
        return [1, 2, 3][: limit if len(sequence.tokens) % 3 else 0]


@pytest.mark.parametrize("drafts", [False, True])
def test_sums_equal_a_count_of_every_sequence_under_preemption_and_multi_step(drafts: bool) -> None:
    clock = count()
    meter = StepMeter(COST, PEAKS, clock=lambda: float(next(clock)))
    spec = SpeculatorSpec(vocab_size=9, max_len=40, max_drafts=3)
    scheduler = Scheduler(
        Changing(),
        BlockManager(14, 4),
        max_batch_tokens=16,
        max_running=6,
        max_len=40,
        eos_tokens=frozenset({0}),
        meter=meter,
        speculator=CheckedSpeculator(Guessing(spec), spec) if drafts else None,
    )
    recount, draw = Recount(), random.Random(1)
    in_flight: deque[Step] = deque()
    for number in range(400):
        if number < 300 and draw.random() < 0.3:
            prompt = tuple(draw.choices(range(1, 9), k=draw.randrange(1, 25)))
            params = SamplingParams(max_tokens=draw.randrange(1, 15))
            scheduler.add(Request(id=str(number), prompt=prompt, params=params))
        if draw.random() < 0.05 and scheduler.requests():
            scheduler.abort(draw.choice(scheduler.requests()))
        step = None if in_flight and scheduler.needs_result() else scheduler.schedule(0.0)
        scheduler.check()
        if step is not None:
            recount.step(step)
            in_flight.append(step)
        if in_flight and (step is None or len(in_flight) > 1):
            oldest = in_flight.popleft()
            meter.finish()
            columns = len(oldest.decodes) + sum(chunk.sample for chunk in oldest.chunks)
            rows = tuple(tuple(draw.choices((0, 1, 2, 3), (1, 9, 9, 9), k=columns)) for _ in range(oldest.iterations))
            verified = tuple((*part.tokens[1 : draw.randint(1, len(part.tokens))], 2) for part in oldest.drafts)
            scheduler.commit(oldest, StepResult(step=oldest.id, tokens=rows, verified=verified), 0.0)
    assert not in_flight
    assert scheduler.stats().preemptions
    speculation = scheduler.stats().speculation
    assert (speculation is not None and sum(speculation.accepted) > 0) == drafts
    assert recount.iterations == 3
    totals = meter.totals()
    assert [work.kind for work in totals] == ["decode", "mixed", "prefill"]
    for work in totals:
        counted = recount.work[work.kind]
        assert work.flops == pytest.approx(counted.flops)
        assert work.weight_bytes == pytest.approx(counted.weight_bytes)
        assert (work.kv_read, work.kv_written) == (counted.kv_read, counted.kv_written)
        assert work.floor_seconds == pytest.approx(recount.floor[work.kind], rel=0.02)  # of a step, not an iteration


def test_a_step_lasts_from_its_submission_or_the_result_before_to_its_result() -> None:
    times = iter([10.0, 11.0, 14.0, 15.0, 30.0, 32.0])
    meter = StepMeter(COST, clock=lambda: next(times))
    step = Step(id=1, decodes=(), chunks=())
    meter.submit(step)  # at 10
    meter.submit(step)  # at 11, while the first one runs
    meter.finish()  # at 14
    meter.finish()  # at 15
    meter.submit(step)  # at 30, after a pause
    meter.finish()
    [work] = meter.totals()
    assert work.steps == 3
    assert work.seconds == 4.0 + 1.0 + 2.0
    assert work.floor_seconds is None


def test_context_sums_follow_sequences_that_join_grow_advance_and_leave() -> None:
    sums, draw = ContextSums(WINDOWS), random.Random(0)
    offsets: list[int] = []
    for iteration in range(300):
        for _ in range(draw.randrange(3)):
            offsets.append(draw.randrange(20) - iteration)
            sums.add(offsets[-1])
        while len(offsets) > 6:
            offsets.remove(leaving := draw.choice(offsets))
            sums.remove(leaving)
        for place in draw.sample(range(len(offsets)), draw.randrange(len(offsets) + 1)):
            gained = draw.randrange(4)
            sums.advance([(offsets[place], gained)])
            offsets[place] += gained
        contexts = [offset + iteration + 1 for offset in offsets]
        expected = [sum(min(one, window or one) for one in contexts) for window in WINDOWS]
        assert sums.at(iteration) == expected


def test_an_engine_reports_its_work_unless_it_is_off(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "tiny", tokenizer=True)
    settings: dict[str, Any] = {"executor__device": "cpu", "cache__memory": "8MiB"}
    with Engine(model, roofline__bandwidth=0.1, roofline__flops=1.0, **settings) as engine:
        engine.generate([[1, 2, 3]], SamplingParams(max_tokens=4, temperature=0, ignore_eos=True))
        stats, cost = engine.stats(), engine.cache_info.cost
        assert cost is not None
        prefill = cost.work(StepShape.of(chunks=[(0, 3)], windows=cost.windows))
        decode = [cost.work(StepShape.of(decodes=[length], windows=cost.windows)).flops for length in (4, 5, 6)]
        found = {work.kind: work for work in stats.work}
        assert (found["prefill"].steps, found["decode"].steps) == (1, 3)
        assert (found["prefill"].flops, found["decode"].flops) == (prefill.flops, sum(decode))
        assert stats.peaks is not None
        assert 0 < (found["decode"].floor_seconds or 0) < found["decode"].seconds
    with Engine(model, roofline__metrics=False, **settings) as engine:
        engine.generate([[1, 2, 3]], SamplingParams(max_tokens=2))
        assert engine.stats().work == ()


def test_peaks_are_given_or_those_of_a_known_device_or_unknown() -> None:
    h200, cpu = DeviceInfo(type="cuda", name="NVIDIA H200"), DeviceInfo(type="cpu", name="Some CPU")
    known = find_peaks(RooflineConfig(), h200, "bfloat16")
    assert known == Peaks(bandwidth=4.8e12, flops=989e12, flops8=1979e12, source="data sheet of NVIDIA H200")
    assert find_peaks(RooflineConfig(), h200, "float32") is None
    assert find_peaks(RooflineConfig(), cpu, "float32") is None
    given = find_peaks(RooflineConfig(bandwidth=4.28), h200, "float16")
    assert given is not None
    assert given.bandwidth == pytest.approx(4.28e12)
    assert given.source == "data sheet of NVIDIA H200, as given"
    rest = find_peaks(RooflineConfig(flops=60), h200, "float32")
    assert rest == Peaks(bandwidth=4.8e12, flops=60e12, flops8=1979e12, source="data sheet of NVIDIA H200, as given")
    every = find_peaks(RooflineConfig(bandwidth=4, flops=60, flops8=120), h200, "float32")
    assert every == Peaks(bandwidth=4e12, flops=60e12, flops8=120e12, source="as given")
    assert find_peaks(RooflineConfig(bandwidth=0.1, flops=2), cpu, "float32") == Peaks(
        bandwidth=1e11, flops=2e12, source="as given"
    )
    with pytest.raises(ConfigError, match=r"roofline\.flops \(--peak-flops\) is not given, and the peaks of Some CPU"):
        find_peaks(RooflineConfig(bandwidth=0.1), cpu, "float32")
