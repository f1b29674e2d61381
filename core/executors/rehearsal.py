"""The rehearsal: prompt steps and a decode step through a started executor, before the first request; on a GPU also
short prompts and a full step."""

from __future__ import annotations

from typing import Any

from engine.core.errors import CheckpointError, ExecutorError, StepFaultError
from engine.core.executors.base import Executor, Health
from engine.core.plugin_host.faults import PluginCall, expect, name_fault, shown
from engine.core.schedulers.block_kinds import longest_context, num_indices
from engine.core.schedulers.prompt_step import SEQUENCE, SHORT_PROMPTS, STEP, chunked_prompt_steps, prompt_step
from engine.core.types import NO_TOKEN, CacheInfo, Step, StepResult


def rehearse(
    executor: Executor,
    cache: CacheInfo,
    *,
    owner: str,
    not_built_in: str,
    max_tokens: int,
    max_len: int,
    max_running: int,
    vocab_size: int,
    full: bool,
    propose: int = 0,
) -> None:
    """Run a prompt in two chunks and one decode step, on all ranks, and check every answer of the executor.

    The steps compute sequences that no scheduler knows. A last step, of nothing else, makes the runner forget them;
    what remains are keys and values in blocks that are free.

    owner: how errors name the executor's plugin. not_built_in: Parts.not_built_in. max_tokens: of a step. full: also
    run short prompts, whose attention may have other kernels, and a step of as many tokens as a step may have. A
    GPU's allocator then holds the memory that the first burst of requests needs; to allocate it takes tens of
    milliseconds. propose: Step.propose of the steps that sample.
    Raises CheckpointError, ExecutorError or PluginFaultError for an error that the first request would have met.
    """
    fits = longest_context(cache.kinds, cache.num_blocks, cache.block_size, max_tokens)
    length = min(cache.block_size + 1, max_len - 1, max_tokens, fits - 1)
    if length < 1:
        return  # there is no room for a prompt and a token
    steps = chunked_prompt_steps(length, cache.kinds, cache.block_size, propose=propose)
    steps.append(Step(id=STEP, decodes=(SEQUENCE,), chunks=(), propose=propose))
    asynchronous = executor.asynchronous
    expect(isinstance(asynchronous, bool), owner, "asynchronous", asynchronous, "True or False")
    calls = _CheckedCalls(executor, owner)
    for step in steps:
        result = calls.run(step)
        if all(chunk.sample for chunk in step.chunks):
            calls.expect_token(result, vocab_size, not_built_in)
        else:
            calls.expect_no_token(result)
    finished = [SEQUENCE]
    lengths = _full_lengths(cache, max_tokens, max_len, max_running - 1) if full else []
    batches: list[list[int]] = []
    if lengths:
        short = dict.fromkeys(min(tokens, lengths[0]) for tokens in SHORT_PROMPTS)
        batches = [*([tokens] for tokens in list(short)[: max_running - 1 - len(lengths)]), lengths]
    for prompts in batches:
        # These prompts reuse the blocks of the sequences before.
        step = prompt_step(prompts, cache.kinds, cache.block_size, first=finished[-1] + 1)
        calls.run(step)
        finished += [one.sequence for one in step.new]
    calls.run(Step(id=STEP, decodes=(), chunks=(), finished=tuple(finished)))
    calls.expect_health()


def _full_lengths(cache: CacheInfo, max_tokens: int, max_len: int, max_prompts: int) -> list[int]:
    """Lengths of prompts that fill one step, or all blocks."""
    lengths: list[int] = []
    indices = num_indices(cache.kinds, cache.num_blocks)
    while max_tokens and indices and len(lengths) < max_prompts:
        length = min(max_tokens, max_len, indices * cache.block_size)
        lengths.append(length)
        max_tokens -= length
        indices -= -(-length // cache.block_size)
    return lengths


class _CheckedCalls:
    """Calls an executor's methods and checks their answers against the contract."""

    def __init__(self, executor: Executor, owner: str) -> None:
        self._executor = executor
        self._owner = owner

    def run(self, step: Step) -> StepResult:
        """Submit a step and wait for its result."""
        pending = self._call("submit", self._executor, step)
        for name in ("done", "result"):
            if not callable(getattr(pending, name, None)):
                raise self._wrong("submit", pending, "an object with the methods done() and result()")
        done = self._call("done", pending)
        if not isinstance(done, bool):
            raise self._wrong("done", done, "True or False")
        result = self._call("result", pending)
        if not isinstance(result, StepResult):
            raise self._wrong("result", result, "a StepResult")
        if result.step != step.id:
            raise self._wrong("result", result, f"the result of step {step.id}")
        return result

    def expect_no_token(self, result: StepResult) -> None:
        """Check that the result of a step in which no sequence samples has no token."""
        if any(result.tokens):
            raise self._wrong("result", result.tokens, "no token, since no sequence samples")

    def expect_token(self, result: StepResult, vocab_size: int, not_built_in: str) -> None:
        """Check that a result has one token, of the vocabulary."""
        match result.tokens:
            case ((int(token),),) if token == NO_TOKEN:
                raise CheckpointError(
                    "the logits of the rehearsal's prompt are not finite (NaN or infinite); the weights may be damaged,"
                    f" or the numbers outgrow this dtype: try bfloat16 or float32{not_built_in}"
                )
            case ((int(token),),) if 0 <= token < vocab_size:
                return
        raise self._wrong("result", result.tokens, f"one row of one token below {vocab_size}")

    def expect_health(self) -> None:
        """Check that the executor can run further steps."""
        health = self._call("check", self._executor)
        if not isinstance(health, Health):
            raise self._wrong("check", health, "a Health")
        if not health.ok:
            raise ExecutorError(f"{self._owner} failed after its first steps: {health.detail}")

    def _call(self, method: str, of: object, *arguments: object) -> Any:
        try:
            return getattr(of, method)(*arguments)
        except BaseException as error:
            name_fault(error, PluginCall(self._owner, f"{method}()"))
            raise

    def _wrong(self, method: str, answer: object, wanted: str) -> StepFaultError:
        return StepFaultError(f"{self._owner} returned a wrong result from {method}(): {shown(answer)}, not {wanted}")
