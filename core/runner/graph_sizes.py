"""Sizes of batches and of steps that CUDA graphs are captured for; others are padded to the next size."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

ALL_RECORDED = 64
"""Up to this batch size of a decode step, every size may have kernels of its own."""
ALL_COUNTS_RECORDED = 256
"""As ALL_RECORDED, for the number of tokens of a step with prefill chunks."""
ALL_COUNTS_OF_TUNED_RECORDED = 1024
"""The same where GEMMs of more than ALL_COUNTS_RECORDED rows are autotuned: up to about as many rows they have tiles
that fill waves of programs."""
MIN_GRAPH_TOKENS = 1024
"""Steps of up to this many tokens have piecewise graphs on every device."""
HOST_MARGIN = 2
"""What the launches of a full step may take, in relation to the shortest time measured at the start: decode attention
next to prompts has launches of its own, short prompts take the device less time than those of the measured step, and
the time of the host varies by a factor of 1.5 from minute to minute."""
PLANNING_SECONDS = 0.6e-6
"""Host's time per token of a full step for all that is not launching: scheduling, building the batch, sampling and
committing 64 prompts of 128 tokens took 5 ms (docs/optimizations-steps.md)."""


def batch_sizes(max_running: int) -> list[int]:
    """Batch sizes to capture graphs for.

    A batch is padded by less than 8 sequences up to 64, by less than a quarter of its size up to 256, and by less than
    an eighth beyond, where the rows of a step cost more than its weights: of 1,578 sequences of Llama-3.1-8B in fp8, a
    quarter would be 6 % of the step.
    """
    sizes = [1, 2, 3, 4, 6, 8, *range(16, 65, 8)]
    while sizes[-1] < max_running:
        power = 1 << sizes[-1].bit_length() - 1
        sizes.append(sizes[-1] + power // (4 if power < 256 else 8))
    return [size for size in sizes if size < max_running] + [max_running]


def token_counts(max_tokens: int) -> list[int]:
    """Numbers of tokens to capture steps for, the last of them `max_tokens`.

    A step is padded by less than 64 tokens up to 512, by less than 128 up to 2,048, and by less than an eighth beyond.
    """
    counts = [*range(64, 513, 64)]
    while counts[-1] < max_tokens:
        power = 1 << counts[-1].bit_length() - 1
        counts.append(counts[-1] + max(power // 8, 128))
    return [count for count in counts if count < max_tokens] + [max_tokens]


def find_max_graph_tokens(tokens: int, launch_seconds: float, seconds: float) -> int:
    """Number of tokens up to which a step is faster as piecewise graphs than launched kernel by kernel.

    A step of `tokens` tokens was run without graphs. launch_seconds: the host's time for its launches. seconds: the
    time until its result.

    If a full step may take the host as long as the device (HOST_MARGIN, PLANNING_SECONDS), all steps have graphs:
    under load full steps follow each other, and graphs do not pad them. Otherwise the device's time is taken to be
    proportional to the tokens. A larger step than the result keeps the device busy for longer than the host takes to
    launch its kernels, and needs no padding without graphs. The host plans steps too, for which a tenth is added.
    """
    if HOST_MARGIN * launch_seconds + PLANNING_SECONDS * tokens >= seconds:
        return tokens
    found = int(1.1 * tokens * launch_seconds / seconds) // 64 * 64
    return min(tokens, max(MIN_GRAPH_TOKENS, found))


def extra_graph_memory(max_graph_tokens: int, step_tokens: int) -> float:
    """Memory of the graphs beyond MIN_GRAPH_TOKENS, as a share of the memory of a step of `step_tokens` tokens.

    All graphs together take the memory of the largest.
    """
    return max(max_graph_tokens - MIN_GRAPH_TOKENS, 0) / step_tokens


def all_counts_recorded(row_classes: Iterable[int]) -> int:
    """Number of tokens up to which every size may have kernels of its own. row_classes: of the autotuned GEMMs."""
    is_tuned = max(row_classes, default=0) > ALL_COUNTS_RECORDED
    return ALL_COUNTS_OF_TUNED_RECORDED if is_tuned else ALL_COUNTS_RECORDED


def recorded_sizes(sizes: Sequence[int], all_up_to: int) -> list[int]:
    """Sizes whose kernels most likely include those of all: those up to `all_up_to`, powers of two, and the largest."""
    return [size for size in sizes if size <= all_up_to or size & (size - 1) == 0 or size == sizes[-1]]
