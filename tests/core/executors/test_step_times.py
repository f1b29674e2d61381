"""The times of steps are measured through the executor, and leave no trace."""

from __future__ import annotations

from typing import Any

import pytest

from engine.core.errors import StepFaultError
from engine.core.executors.step_times import measure_step_times
from engine.core.types import FULL, BlockKind, CacheInfo, SamplingParams, Step, StepResult
from engine.plugins.executors.uniproc import UniprocExecutor

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def cache_of(num_blocks: int, block_size: int = 16, kinds: tuple[BlockKind, ...] = (FULL,)) -> CacheInfo:
    sizes = dict.fromkeys(("weights_bytes", "activation_bytes", "kv_bytes", "budget_bytes"), 0)
    return CacheInfo(num_blocks=num_blocks, block_size=block_size, kinds=kinds, device="", dtype="float32", **sizes)


class Done:
    def __init__(self, result: StepResult) -> None:
        self._result = result

    def done(self) -> bool:
        return True

    def result(self) -> StepResult:
        return self._result


class Clocked:
    """An executor whose steps take a fixed time by their rows, and that checks what it is given."""

    def __init__(self, plain: float = 1.0, drafts: float = 2.0) -> None:
        self.now = 0.0
        self.plain, self.drafts = plain, drafts
        self.steps: list[Step] = []
        self.lengths: dict[int, int] = {}
        self.verifies = True

    def clock(self) -> float:
        return self.now

    def submit(self, step: Step) -> Any:
        self.steps.append(step)
        for new in step.new:
            self.lengths[new.sequence] = len(new.tokens)
        rows = len(step.decodes) + sum(len(part.tokens) for part in step.drafts)
        if step.drafts:
            self.now += self.drafts + 0.1 * rows
        elif step.decodes:
            self.now += self.plain + 0.01 * rows
        for part in step.drafts:
            assert part.start >= 1
            assert part.start + len(part.tokens) <= self.lengths[part.sequence]
        verified = tuple(part.tokens[1:2] for part in step.drafts) if self.verifies else ()
        return Done(StepResult(step=step.id, tokens=(), verified=verified))


def measure(executor: Clocked, **changes: Any) -> Any:
    cache = changes.pop("cache", cache_of(1000))
    limits = {
        "max_drafts": 3,
        "max_tokens": 2048,
        "max_len": 512,
        "max_running": 20,
        "owner": "executor 'mine'",
        **changes,
    }
    return measure_step_times(executor, cache, clock=executor.clock, **limits)  # type: ignore[arg-type]


def test_steps_with_and_without_drafts_are_measured_by_rows() -> None:
    executor = Clocked(plain=0.001, drafts=0.002)
    executor.clock = lambda: executor.now * 1e-3  # type: ignore[method-assign]
    times = measure(executor)
    scale = 1e-3
    assert times.plain.table(40)[[1, 2, 8, 20]].tolist() == pytest.approx(
        [scale * (0.001 + 0.01 * rows) for rows in (1, 2, 8, 20)]
    )
    assert times.drafts.table(100)[[2, 4, 8, 32, 80, 100]].tolist() == pytest.approx(
        [scale * (0.002 + 0.1 * rows) for rows in (2, 4, 8, 32, 80, 100)]
    )
    assert times.sequences == tuple(range(20))
    assert {len(step.decodes) for step in executor.steps} == {0, 1, 2, 4, 8, 16, 20}


def test_steps_are_measured_when_all_layers_keep_a_state() -> None:
    assert measure(Clocked(), cache=cache_of(0, kinds=()), max_running=1).sequences == (0,)


class Ahead(Clocked):
    """Computes decodes one after the other, while further ones are submitted; the host takes 3 s to submit a step."""

    def __init__(self) -> None:
        super().__init__()
        self.free = 0.0
        self.most_in_flight = self.in_flight = 0

    def submit(self, step: Step) -> Any:
        begin, done = self.now, super().submit(step)
        seconds, self.now = self.now - begin, begin + 3.0
        self.free = max(self.free, self.now) + seconds
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        return Later(self, self.free, done.result())


class Later(Done):
    def __init__(self, executor: Ahead, end: float, result: StepResult) -> None:
        super().__init__(result)
        self._executor, self._end = executor, end

    def result(self) -> StepResult:
        self._executor.now = max(self._executor.now, self._end)
        self._executor.in_flight -= 1
        return super().result()


def test_where_steps_overlap_the_time_without_drafts_is_that_between_results() -> None:
    executor = Ahead()
    executor.plain = 8.0
    assert measure(executor, max_running=1, ahead=1).plain.table(1)[1] == pytest.approx(8.01)
    assert (executor.most_in_flight, executor.in_flight) == (2, 0)
    executor = Ahead()
    executor.plain = 8.0
    assert measure(executor, max_running=1).plain.table(1)[1] == pytest.approx(11.01)
    assert executor.most_in_flight == 1


def test_a_slow_device_is_measured_with_few_rows() -> None:
    executor = Clocked(plain=5.0, drafts=6.0)
    times = measure(executor)
    assert max(len(step.decodes) for step in executor.steps) == 1
    assert times.sequences == (0,)
    assert [len(step.new) for step in executor.steps if step.new] == [1]
    assert times.plain.table(1)[1] == pytest.approx(5.01)
    assert times.drafts.table(4)[4] == pytest.approx(6.4)


@pytest.mark.parametrize(
    "limits",
    [
        {"max_tokens": 3},
        {"max_len": 4},
        {"cache": cache_of(0)},
        {"cache": cache_of(2, 1)},
    ],
)
def test_nothing_is_measured_where_there_is_no_room(limits: dict[str, Any]) -> None:
    executor = Clocked()
    assert measure(executor, **limits) is None
    assert not executor.steps


def test_a_cache_of_few_blocks_and_several_kinds_limits_the_sequences() -> None:
    kinds = (BlockKind(name="full", groups=2), BlockKind(name="window 8", window=8, groups=1))
    executor = Clocked()
    measure(executor, cache=cache_of(9, kinds=kinds))
    assert max(len(step.decodes) for step in executor.steps) <= 3
    blocks = [block for step in executor.steps for _, table in step.blocks for block in table]
    assert max(blocks) < 9
    assert len(set(blocks)) == len(blocks)


def test_an_executor_that_does_not_verify_drafts_is_named() -> None:
    executor = Clocked()
    executor.verifies = False
    with pytest.raises(
        StepFaultError, match=r"executor 'mine' returned .*verified = \(\), not the tokens of 1 sequences"
    ):
        measure(executor)


def test_an_engine_that_measured_generates_the_tokens_of_one_that_did_not(
    make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Step] = []
    submit = UniprocExecutor.submit

    def note(executor: UniprocExecutor, step: Step) -> Any:
        seen.append(step)
        return submit(executor, step)

    monkeypatch.setattr(UniprocExecutor, "submit", note)
    plain = make_engine(max_running=4)
    without = len(seen)
    engine = make_engine(speculator="ngram", max_running=4)
    assert len(seen) > 2 * without
    assert any(step.drafts for step in seen)
    fixed_from = len(seen)
    make_engine(speculator="ngram", draft_length="fixed")
    assert not any(step.drafts for step in seen[fixed_from:])
    prompts = ["abcabcabc", "x"]
    expected = [one.token_ids for one in plain.generate(prompts, GREEDY)]
    assert [one.token_ids for one in engine.generate(prompts, GREEDY)] == expected
    assert engine.stats().blocks_total == plain.stats().blocks_total
    assert engine.stats().blocks_used == 0
    assert tuple(range(4)) in [step.finished for step in seen]
