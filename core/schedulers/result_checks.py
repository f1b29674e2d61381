"""Whether the result of a step has the shape that the step asks for."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat

from engine.core.errors import ExecutorError
from engine.core.types import Step, StepResult, TokenLogprobs


def check_result(step: Step, result: StepResult) -> None:
    """Raise ExecutorError unless a result has a token for each sequence that samples, and the drafts accepted."""
    columns = len(step.decodes) + sum(chunk.sample for chunk in step.chunks)
    for rows in (result.tokens, result.logprobs or result.tokens):
        if len(rows) != step.iterations or any(len(row) != columns for row in rows):
            raise ExecutorError(
                f"the result of step {step.id} does not hold {step.iterations} rows of {columns} tokens"
            )
    if result.proposals and not _proposals_fit(step, result, columns):
        raise ExecutorError(
            f"the result of step {step.id} does not hold up to {step.propose} proposed tokens for each of"
            f" {columns + len(step.drafts)} sequences"
        )
    if (step.drafts or result.verified) and not _drafts_fit(step, result):
        raise ExecutorError(
            f"the result of step {step.id} does not hold the drafts accepted in each of {len(step.drafts)} slices, and "
            "one token after them"
        )


def _proposals_fit(step: Step, result: StepResult, columns: int) -> bool:
    """Whether a result has a proposal for each sequence that samples, of at most the tokens that were asked for."""
    return len(result.proposals) == columns + len(step.drafts) and all(
        len(tokens) <= step.propose for tokens in result.proposals
    )


def _drafts_fit(step: Step, result: StepResult) -> bool:
    """Whether a result has the tokens of each draft slice: its first drafts, then one token more."""
    if not len(step.drafts) == len(result.verified) == len(result.verified_logprobs or result.verified):
        return False
    return all(
        tokens and tokens[:-1] == part.tokens[1 : len(tokens)]
        for part, tokens in zip(step.drafts, result.verified, strict=True)
    )


def logprob_columns(result: StepResult) -> Iterator[tuple[TokenLogprobs, ...]]:
    """Logprobs of each sequence that samples, one per token; empty for a sequence that did not ask for logprobs."""
    if not result.logprobs:
        return repeat(())
    return (tuple(entry for entry in column if entry is not None) for column in zip(*result.logprobs, strict=True))
