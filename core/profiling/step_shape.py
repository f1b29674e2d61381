"""The properties of a step on which its cost depends: tokens, contexts, and which keys each query sees."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat

from attrs import frozen

Window = int | None
"""The number of tokens that a token attends to, itself included; None: the whole context."""


@frozen(kw_only=True)
class StepShape:
    """The sizes of one step (of all iterations of a multi-step step)."""

    tokens: int
    """Tokens computed, of prefill chunks and decodes."""
    sampled: int
    """Rows of logits."""
    sequences: int
    """Sequences computed, counted once per iteration."""
    pairs: Mapping[Window, int]
    """By window: pairs of a query and a key that the query sees."""
    keys: Mapping[Window, int]
    """By window: keys that some query of their sequence sees, summed over the sequences."""
    iterations: int = 1
    """How often the weights are read."""

    @classmethod
    def of(
        cls,
        *,
        decodes: Sequence[int] = (),
        chunks: Sequence[tuple[int, int]] = (),
        sampled: int | None = None,
        windows: Iterable[Window] = (None,),
    ) -> StepShape:
        """The shape of a step of one iteration.

        decodes: context length of each decoding sequence, the token computed included. chunks: (start, tokens) of each
        prefill chunk. sampled: rows of logits; None: one per sequence. windows: of all layers of the model.
        """
        parts = [*((length - 1, 1) for length in decodes), *chunks]
        kinds = tuple(windows)
        return cls(
            tokens=sum(count for _, count in parts),
            sampled=len(parts) if sampled is None else sampled,
            sequences=len(parts),
            pairs={window: sum(visible_pairs(start, count, window) for start, count in parts) for window in kinds},
            keys={window: sum(visible_keys(start, count, window) for start, count in parts) for window in kinds},
        )


def visible_pairs(start: int, count: int, window: Window = None) -> int:
    """Pairs of a query and a key that it sees, of `count` consecutive tokens from position `start` on."""
    full = count * start + count * (count + 1) // 2
    if window is None or start + count <= window:
        return full
    growing = max(0, min(count, window - start - 1))  # queries that see less than a whole window
    return growing * start + growing * (growing + 1) // 2 + (count - growing) * window


def total_pairs(starts: Sequence[int], counts: Sequence[int], window: Window = None) -> int:
    """The sum of `visible_pairs` over several runs of tokens."""
    if window is None:
        return sum([count * (2 * start + count + 1) for start, count in zip(starts, counts, strict=True)]) // 2
    return sum(map(visible_pairs, starts, counts, repeat(window)))


def visible_keys(start: int, count: int, window: Window = None) -> int:
    """Keys that at least one of `count` consecutive tokens from position `start` on sees."""
    end = start + count
    return end if window is None else end - max(0, start - window + 1)
