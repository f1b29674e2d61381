"""Log probabilities of prompt tokens, computed from the hidden states of a prefill chunk."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from engine.core.sampling.arithmetic import row_logprobs
from engine.core.sampling.sampled_tokens import token_logprobs
from engine.core.transfer import to_device
from engine.core.types import NewSequence, Step, TokenLogprobs

if TYPE_CHECKING:
    from engine.core.models.base import Model

StepPromptLogprobs = tuple[tuple[int, tuple[TokenLogprobs, ...]], ...]
"""As StepResult.prompt_logprobs."""
MAX_ROWS = 256
"""Rows of logits computed in one call: logits of a whole chunk would take gigabytes."""


class PromptLogprobs:
    """The running sequences that ask for log probabilities of their prompts."""

    def __init__(self) -> None:
        self._sequences: dict[int, NewSequence] = {}

    def __bool__(self) -> bool:
        return bool(self._sequences)

    def add(self, new: NewSequence) -> None:
        """Note a sequence if it asks, unless it resumes after a preemption: its prompt was scored before."""
        if new.params.prompt_logprobs is not None and len(new.tokens) == new.prompt_len:
            self._sequences[new.sequence] = new

    def remove(self, sequence: int) -> None:
        """Forget a sequence."""
        self._sequences.pop(sequence, None)

    def compute(self, step: Step, hidden: torch.Tensor, model: Model) -> StepPromptLogprobs:
        """Log probabilities of the prompt tokens that follow each token of the step's chunks; waits for the device.

        hidden: [tokens of the step, hidden_size].
        """
        scored = []
        row = len(step.decodes)
        for chunk in step.chunks:
            new = self._sequences.get(chunk.sequence)
            if new is not None and chunk.start < new.prompt_len - 1:
                (targets,) = to_device([prompt_targets(new, chunk.start, chunk.count)], hidden.device)
                count = new.params.prompt_logprobs or 0
                entries: list[TokenLogprobs] = []
                for begin in range(0, len(targets), MAX_ROWS):
                    end = min(begin + MAX_ROWS, len(targets))
                    logits = model.logits(hidden[row + begin : row + end])
                    entries += prompt_logprobs(logits, targets[begin:end], count)
                scored.append((chunk.sequence, tuple(entries)))
            row += chunk.count
        return tuple(scored)


def prompt_targets(new: NewSequence, start: int, count: int) -> npt.NDArray[np.int64]:
    """The prompt tokens that follow positions `start` to `start + count`; the last prompt position has none."""
    stop = min(start + count, new.prompt_len - 1)
    return np.frombuffer(new.tokens[start + 1 : stop + 1].pack(), np.int32).astype(np.int64)


def prompt_logprobs(logits: torch.Tensor, next_tokens: torch.Tensor, count: int) -> list[TokenLogprobs]:
    """Log probability of the token that followed each position, and of the `count` most likely ones; waits for the
    device.

    logits: [rows, vocab]; next_tokens: [rows] int64.
    """
    chosen: list[int] = next_tokens.tolist()
    return token_logprobs(chosen, [count] * len(chosen), *row_logprobs(logits, next_tokens, count))
