"""Measures at start how long steps take by number of rows, with and without drafts, through a started executor."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

from attrs import frozen

from engine.core.errors import StepFaultError
from engine.core.executors.base import Executor, PendingResult
from engine.core.plugin_host.faults import shown
from engine.core.schedulers.block_kinds import longest_context, num_indices
from engine.core.schedulers.prompt_step import STEP, prompt_step
from engine.core.speculators.step_costs import StepCosts
from engine.core.types import CacheInfo, DraftSlice, Step, StepResult

_MAX_ROWS = 512
"""Rows of the longest step that is measured; times beyond follow from the last two measurements."""
_REPETITIONS = 3
_MAX_SECONDS = 2.0
"""No further number of rows is measured after this time."""
_DECODES = 2 * _REPETITIONS
"""Positions behind the drafts that are kept for decodes."""


@frozen
class StepTimes:
    """Seconds of steps by their rows."""

    plain: StepCosts
    """Of decodes without drafts."""
    drafts: StepCosts
    """Of steps with drafts: a row per last token and per draft."""
    sequences: tuple[int, ...]
    """Sequences that the measurement has left running: the first step of requests must name them in `Step.finished`."""


def measure_step_times(
    executor: Executor,
    cache: CacheInfo,
    *,
    max_drafts: int,
    max_tokens: int,
    max_len: int,
    max_running: int,
    owner: str,
    proposes: bool = False,
    ahead: int = 0,
    clock: Callable[[], float] = time.perf_counter,
) -> StepTimes | None:
    """Run decodes of more and more sequences, without drafts and with `max_drafts` each; None: there is no room.

    To be called after the rehearsal, in which results are checked; takes up to 2 seconds, or as long as a prompt and
    the first nine steps take. What remains are keys and values in blocks that are free. max_tokens: of a step; max_len:
    of a context; owner: the executor, as errors name it; proposes: whether steps with drafts also propose `max_drafts`
    tokens, as by a speculator on the device; ahead: steps without drafts that are submitted before the result of one
    is awaited. Raises what the executor raises, and StepFaultError where a result does not have the tokens of each
    draft slice.
    """
    length = 1 + max_drafts + _DECODES
    most = min(
        max_running,
        max(max_tokens, 1) // (1 + max_drafts),
        max_tokens // length,
        _MAX_ROWS // (1 + max_drafts),
        num_indices(cache.kinds, cache.num_blocks) // -(-length // cache.block_size),
    )
    longest = min(max_len, longest_context(cache.kinds, cache.num_blocks, cache.block_size, max_tokens))
    if most < 1 or length > longest:
        return None
    prompts = prompt_step([length] * most, cache.kinds, cache.block_size)
    tables = len(cache.kinds)
    plain: list[tuple[int, float]] = []
    drafts: list[tuple[int, float]] = []
    end = clock() + _MAX_SECONDS
    running = 0
    # Fewest rows first: a slow device may have time for no more.
    for count, width in _sizes(most, max_drafts):
        if plain and clock() > end:
            break
        if count > running:
            new, blocks = prompts.new[running:count], prompts.blocks[running * tables : count * tables]
            chunks = prompts.chunks[running:count]
            _run(executor, Step(id=STEP, decodes=(), chunks=chunks, new=new, blocks=blocks))
            running = count
        chosen = tuple(range(count))
        for _ in range(_REPETITIONS):
            slices = tuple(DraftSlice(number, 1, (0,) * (1 + width)) for number in chosen)
            propose = max_drafts if proposes else 0
            step = Step(id=STEP, decodes=(), chunks=(), drafts=slices, propose=propose)
            seconds, result = _time(executor, step, clock)
            _check_verified(step, result, owner)
            drafts.append((count * (1 + width), seconds))
        if width < max_drafts:
            continue
        plain += [(count, seconds) for seconds in _time_decodes(executor, chosen, length - _DECODES, ahead, clock)]
    return StepTimes(plain=_costs(plain), drafts=_costs(drafts), sequences=tuple(range(running)))


def _costs(measured: Sequence[tuple[int, float]]) -> StepCosts:
    """The costs of steps; if only one number of rows was measured, one row more costs the same."""
    more = [(rows + 1, seconds) for rows, seconds in measured] if len(dict(measured)) < 2 else []
    return StepCosts([*measured, *more])


def _sizes(most: int, max_drafts: int) -> Iterator[tuple[int, int]]:
    """(sequences, drafts of each) of the steps to be measured."""
    yield 1, 1
    if max_drafts > 1:
        yield 1, max_drafts
    count = 2
    while count < most:
        yield count, max_drafts
        count *= 2
    if most > 1:
        yield most, max_drafts


def _time(executor: Executor, step: Step, clock: Callable[[], float]) -> tuple[float, StepResult]:
    """(seconds of a step, its result)."""
    begin = clock()
    result = _run(executor, step)
    return clock() - begin, result


def _time_decodes(
    executor: Executor, chosen: tuple[int, ...], position: int, ahead: int, clock: Callable[[], float]
) -> list[float]:
    """Seconds between the results of decodes of these sequences, the first at `position`. ahead: steps that are
    submitted before the result of a step is awaited."""
    pending: deque[PendingResult] = deque()
    times = [clock()]
    for number in range(_REPETITIONS + ahead):
        positions = () if number else tuple((each, position) for each in chosen)
        pending.append(executor.submit(Step(id=STEP, decodes=chosen, chunks=(), positions=positions)))
        if number >= ahead:
            pending.popleft().result()
            times.append(clock())
    for each in pending:
        each.result()
    return [after - before for before, after in pairwise(times)][ahead:]


def _run(executor: Executor, step: Step) -> StepResult:
    return executor.submit(step).result()


def _check_verified(step: Step, result: StepResult, owner: str) -> None:
    """Raise StepFaultError unless a result has 1 token or more for each draft slice."""
    fits = len(result.verified) == len(step.drafts) and all(
        1 <= len(tokens) <= len(part.tokens) for tokens, part in zip(result.verified, step.drafts, strict=True)
    )
    if not fits:
        raise StepFaultError(
            f"{owner} returned a wrong result from result(): verified = {shown(result.verified)}, not the tokens of"
            f" {len(step.drafts)} sequences with drafts; it cannot run with a speculator, leave that out"
        )
